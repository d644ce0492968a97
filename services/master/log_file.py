"""The log as a file: what it is, whether this release may use it, and connections to it.

A file is looked at before anything is written: one that is no log, or is a newer release's, is left as it was.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DatabaseError, OperationalError

from services import log_format
from services.master import tables

WAL_CHECKPOINT_PAGES: Final = 8000
"""SQLite checkpoints inside a commit: at its default of 1000 pages that is most of the slow ones."""


class LogFileError(Exception):
    """A file cannot be used as the log; the message says why and what to do. It was not changed."""


@contextmanager
def kept_at(path: Path) -> Iterator[None]:
    """Raises LogFileError where the disk does not let the log at `path` be opened, locked or made within."""
    try:
        yield
    except (OSError, OperationalError) as error:
        said = error.orig if isinstance(error, OperationalError) else error.strerror or error
        raise LogFileError(
            f"{path} cannot be kept: {said}; make its folder writable, with room on its disk, or name another log "
            "with --log"
        ) from error


def prepare(path: Path) -> None:
    """Make `path` a log this release can write: new where there is none, migrated where it is older.

    Raises LogFileError, leaving the file as it was, when it is no log or a newer release's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path, "mode=rwc") as connection:
        new = _refuse_foreign(path, connection)
    engine = writing_engine(path, journal_mode="DELETE" if new else "WAL")
    if new:
        # Before the first table: afterwards it takes a VACUUM, which stalls whoever writes.
        on_connect(engine, ("auto_vacuum=INCREMENTAL",))
    try:
        with engine.begin() as connection:
            _migrate(path, connection)
    finally:
        engine.dispose()


def check_readable(path: Path, engine: Engine) -> None:
    """Raise LogFileError when `engine`'s file is no log, or one this release cannot read."""
    with engine.connect() as connection:
        if _refuse_foreign(path, connection):
            raise LogFileError(f"{path} holds no events: if it is a copy, copy {path.name}-wal with it")


@cache
def expected_schema() -> dict[str, str]:
    """What makes each table, index and trigger of a log that this release made."""
    with tempfile.TemporaryDirectory(prefix="ullage-log-") as folder:
        path = Path(folder) / "empty.db"
        prepare(path)
        with _opened(path, "mode=rw") as connection:
            rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
            return {name: sql for name, sql in rows}  # noqa: C416 - mypy knows these to be pairs


def writing_engine(path: Path, journal_mode: str = "WAL") -> Engine:
    """An engine for the one connection that writes: each transaction is durable when it has committed."""
    engine = create_engine(f"sqlite:///{path}", connect_args={"isolation_level": None})
    pragmas = (
        f"journal_mode={journal_mode}",
        "synchronous=FULL",
        f"wal_autocheckpoint={WAL_CHECKPOINT_PAGES}",
        "busy_timeout=5000",
    )
    on_connect(engine, pragmas)
    # A deferred transaction that turns into a writing one fails at once, without waiting for a lock.
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def reading_engine(path: Path) -> Engine:
    """An engine for readers beside the writer; they never checkpoint, which only one connection may do safely."""
    engine = create_engine(f"sqlite:///{path}", connect_args={"isolation_level": None})
    on_connect(engine, ("query_only=ON", "wal_autocheckpoint=0", "busy_timeout=5000"))
    return engine


@contextmanager
def read_only_engine(path: Path) -> Iterator[Engine]:
    """An engine for a log nobody shall write to, not even its folder. Raises LogFileError where there is none."""
    if not path.is_file():
        raise LogFileError(f"there is no log at {path}")
    wal, shm = (path.with_name(path.name + suffix) for suffix in ("-wal", "-shm"))
    with ExitStack() as opened:
        if not wal.exists() or wal.stat().st_size == 0:
            engine = opened.enter_context(_disposed(_uri_engine(path, "mode=ro&immutable=1")))
        elif shm.exists() and os.access(shm, os.W_OK):
            # A master is writing it, or was killed: SQLite keeps the two apart through the -shm there is.
            engine = opened.enter_context(_disposed(_uri_engine(path, "mode=ro")))
        else:
            # SQLite would make a -shm to read a log with a -wal: it gets a folder of its own for that.
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="ullage-log-")))
            shutil.copyfile(path, folder / path.name)
            shutil.copyfile(wal, folder / wal.name)
            engine = opened.enter_context(_disposed(_uri_engine(folder / path.name, "mode=rw")))
        yield engine


def _uri_engine(path: Path, parameters: str) -> Engine:
    uri = f"{path.resolve().as_uri()}?{parameters}"
    engine = create_engine(
        "sqlite://",
        creator=lambda: sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False),
        poolclass=None,
    )
    on_connect(engine, ("query_only=ON",))
    return engine


def driver(connection: Connection) -> sqlite3.Connection:
    """What is beneath SQLAlchemy's connection."""
    beneath = connection.connection.driver_connection
    if not isinstance(beneath, sqlite3.Connection):
        raise TypeError(f"the log's driver is {type(beneath)}")
    return beneath


@contextmanager
def _disposed(engine: Engine) -> Iterator[Engine]:
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _opened(path: Path, parameters: str) -> Iterator[Connection]:
    with _disposed(_uri_engine(path, parameters)) as engine, engine.connect() as connection:
        yield connection


def on_connect(engine: Engine, pragmas: tuple[str, ...]) -> None:
    @event.listens_for(engine, "connect")
    def set_pragmas(connection: Any, _record: object) -> None:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")


def _refuse_foreign(path: Path, connection: Connection) -> bool:
    """Whether the file is empty. Raises LogFileError when it is neither that nor a log this release knows."""
    try:
        application_id = connection.exec_driver_sql("PRAGMA application_id").scalar_one()
        version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
        tables = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar_one()
    except DatabaseError as error:
        raise LogFileError(f"{path} is not a log: {error.orig}") from error
    if application_id == 0 and tables == 0:
        return True
    if application_id != log_format.APPLICATION_ID:
        raise LogFileError(f"{path} is a SQLite file of another program, not a log: name another one with --log")
    if version > log_format.FORMAT_VERSION:
        raise LogFileError(
            f"{path} was written by a newer release (format {version}, this one knows {log_format.FORMAT_VERSION}): "
            "install that release, or name another log with --log"
        )
    return False


def _migrate(path: Path, connection: Connection) -> None:
    revision = _revision(connection)
    if revision == tables.REVISION:
        return
    from services.master import log_migrations  # noqa: PLC0415 - 9 MiB, for a start that rarely needs them

    try:
        log_migrations.migrate(connection, revision)
    except log_migrations.UnknownRevisionError as error:
        raise LogFileError(
            f"{path} was written by a newer release (schema {revision}, which this one does not know): "
            "install that release, or name another log with --log"
        ) from error
    connection.exec_driver_sql(f"PRAGMA application_id = {log_format.APPLICATION_ID}")
    connection.exec_driver_sql(f"PRAGMA user_version = {log_format.FORMAT_VERSION}")


def _revision(connection: Connection) -> str | None:
    """The revision of the tables, as Alembic writes it down; None where there are none."""
    made = connection.exec_driver_sql("SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'").scalar_one()
    if not made:
        return None
    revision: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return revision
