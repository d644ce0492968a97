"""Runs migrations on the connection the master gives; without one, on the log that `alembic -x log=PATH` names."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from services.master.tables import metadata


def run(connection: Connection) -> None:
    """Bring the log on `connection` to the revision asked for."""
    context.configure(connection=connection, target_metadata=metadata)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    path = context.get_x_argument(as_dictionary=True).get("log", "")
    with create_engine(f"sqlite:///{path}").connect() as opened:
        run(opened)
