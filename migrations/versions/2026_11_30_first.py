"""The first log: events, who said them, and a hash over every commit."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_first"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables, and make them append-only."""
    op.create_table(
        "sources",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("name", sa.Text, nullable=False, unique=True),
        sa.Column("last_seq", sa.Integer, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "events",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("recorded_at_ns", sa.Integer, nullable=False),
        sa.Column("kind", sa.Integer, nullable=False),
        sa.Column("source", sa.Integer, sa.ForeignKey("sources.id"), nullable=False),
        sa.Column("source_seq", sa.Integer, nullable=False),
        sa.Column("crc", sa.Integer, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "chain",
        sa.Column("seq", sa.Integer, sa.ForeignKey("events.seq"), primary_key=True, autoincrement=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sqlite_strict=True,
    )
    for table in ("events", "chain"):
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_never_{verb.lower()}d BEFORE {verb} ON {table} "
                "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
            )
