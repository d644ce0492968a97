"""The log's tables. `migrations/` builds the same ones step by step; a test holds the two together.

Events, chain and compacted are append-only: the migrations also make triggers that refuse UPDATE and DELETE. But
for samples at or below the mark (the greatest last_seq of compacted), and the hashes of commits there.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Column, ForeignKey, Integer, LargeBinary, MetaData, Table, Text

REVISION: Final = "2026_11_30_retention"
"""The last of the migrations."""

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
    # 1, 2, 3 ...: the writer counts, so that there are no gaps but where samples were compacted away.
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

checkpoints = Table(
    "checkpoints",
    metadata,
    # The sequence whose state it folds to; a Checkpoint of event.proto, and a crc32 over its bytes.
    Column("seq", Integer, primary_key=True, autoincrement=False),
    Column("crc", Integer, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    sqlite_strict=True,
)

compacted = Table(
    "compacted",
    metadata,
    # The ranges in which samples may be missing, in the order in which they were compacted.
    Column("id", Integer, primary_key=True),
    Column("first_seq", Integer, nullable=False),
    Column("last_seq", Integer, nullable=False),
    sqlite_strict=True,
)
