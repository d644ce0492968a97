"""Brings a log's tables up to this release, step by step: `migrations/` has the steps.

It is imported only where there is a step to take: Alembic is a sixth of a start, and 9 MiB while the master runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

MIGRATIONS: Final = Path(__file__).resolve().parents[2] / "migrations"


class UnknownRevisionError(Exception):
    """The tables are of a revision that this release does not know."""


def migrate(connection: Connection, revision: str | None) -> None:
    """Take every step that follows `revision`, None for no tables yet. Raises UnknownRevisionError."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    known = {each.revision for each in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise UnknownRevisionError(revision)
    command.upgrade(config, "head")
