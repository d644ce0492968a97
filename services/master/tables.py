"""The log's tables. `migrations/` builds the same ones step by step; a test holds the two together.

Events and chain are append-only: the first migration also makes triggers that refuse UPDATE and DELETE.
"""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Integer, LargeBinary, MetaData, Table, Text

metadata = MetaData()

sources = Table(
    "sources",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    # What a source said up to here is stored: nothing is stored twice.
    Column("last_seq", Integer, nullable=False),
    sqlite_strict=True,
)

events = Table(
    "events",
    metadata,
    # 1, 2, 3 ...: the writer counts, so that there are no gaps.
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("recorded_at_ns", Integer, nullable=False),
    # The fact's field number in event.proto; 0 where this release knows none.
    Column("kind", Integer, nullable=False),
    # A number, since a source's name is as long as the fact it reports.
    Column("source", Integer, ForeignKey("sources.id"), nullable=False),
    Column("source_seq", Integer, nullable=False),
    Column("crc", Integer, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    sqlite_strict=True,
)

chain = Table(
    "chain",
    metadata,
    # The last event of a commit, and the hash over it, all before it in the commit, and the hash before.
    Column("seq", Integer, ForeignKey("events.seq"), primary_key=True, autoincrement=False),
    Column("hash", LargeBinary, nullable=False),
    sqlite_strict=True,
)
