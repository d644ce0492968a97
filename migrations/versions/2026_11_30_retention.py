"""Checkpoints, and samples that may be thinned: behind a mark, and nothing but samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "2026_11_30_retention"
down_revision = "2026_11_30_first"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables, and let go of samples and hashes at or below the mark, which is the end of a range."""
    op.create_table(
        "checkpoints",
        sa.Column("seq", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("crc", sa.Integer, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "compacted",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("first_seq", sa.Integer, nullable=False),
        sa.Column("last_seq", sa.Integer, nullable=False),
        sqlite_strict=True,
    )
    for verb in ("UPDATE", "DELETE"):
        op.execute(
            f"CREATE TRIGGER compacted_never_{verb.lower()}d BEFORE {verb} ON compacted "
            "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
        )
    mark = "(SELECT coalesce(max(last_seq), 0) FROM compacted)"
    # 12, 13, 14: memory_sampled, system_sampled, link_measured.
    kept = {  # What a trigger lets nobody delete.
        "events": f"OLD.kind NOT IN (12, 13, 14) OR OLD.seq > {mark}",
        "chain": f"OLD.seq > {mark} OR OLD.seq IN (SELECT last_seq FROM compacted)",  # noqa: S608 - a constant
    }
    for table, condition in kept.items():
        op.execute(f"DROP TRIGGER {table}_never_deleted")
        op.execute(
            f"CREATE TRIGGER {table}_never_deleted BEFORE DELETE ON {table} WHEN {condition} "
            "BEGIN SELECT RAISE(ABORT, 'the log is append-only'); END"
        )
