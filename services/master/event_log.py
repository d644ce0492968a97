"""The log: append, read. One thread writes; what waits for it goes to disk in one transaction.

Rules this module lives by:
- A fact is delivered only after the transaction that holds it is on disk (WAL, synchronous=FULL).
- The writer counts the sequence, so there are no gaps; it alone checkpoints, on its own connection.
- A source's facts are stored once: what is at or below its last stored source_seq is skipped, in the same
  transaction that stores the rest.
- Nobody waits for ever: a commit that fails fails everybody in it. A full disk is tried again with the next
  append; any other failure of the writer is final.
- What else is to be written, checkpoints and what becomes of old samples, is done by the same thread between two
  commits, a little at a time.
- What every commit does goes to the driver itself: around so few statements SQLAlchemy costs a fifth of the commit.
"""

from __future__ import annotations

import concurrent.futures
import queue
import sqlite3
import threading
from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import structlog
from sqlalchemy import Connection

from services import log_format
from services.clock import Clock
from services.master import errors, log_file
from services.master.batch import NOTHING, Batch
from services.master.log_head import Head, HeadFile, head_path, read_head
from services.master.log_lock import LogLock
from services.master.log_reader import LogReader, head

COMMIT_FACTS_MAX: Final = 4096
"""Facts in one transaction: beyond this, larger ones are no cheaper."""

QUEUE_BYTES_MAX: Final = 64 << 20
"""What may wait for the disk: a second of the most samples it takes."""

_ROW_BYTES: Final = 64
"""A row, beside its payload."""

FACT_BYTES_MAX: Final = 3 << 20
"""The largest fact that is stored: a refusal of ten thousand nodes, and what any gRPC client reads in one message."""

_UPSERT_SOURCE: Final = (
    "INSERT INTO sources (id, name, last_seq) VALUES (?, ?, ?) "
    "ON CONFLICT (id) DO UPDATE SET last_seq = excluded.last_seq"
)
_ROWS_PER_STATEMENT_MAX: Final = 512
"""At each statement the writer waits for the interpreter's lock, so few are best; beyond this it hardly shows.

Its 3,584 variables are far below 32,766, the limit of every SQLite that knows STRICT tables.
"""

_INSERTS: Final = {
    count: f"INSERT INTO events (seq, recorded_at_ns, kind, source, source_seq, crc, payload) VALUES {marks}"  # noqa: S608 - marks only
    for count, marks in ((1 << power, ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * (1 << power))) for power in range(10))
}
"""The statement that inserts so many rows; for powers of two, so that a handful of them serve every length."""

_INSERT_HASH: Final = "INSERT INTO chain (seq, hash) VALUES (?, ?)"
T = TypeVar("T")

log = structlog.get_logger()


@dataclass(slots=True)
class Append:
    """What somebody wants stored, and what became of it."""

    source: str
    batch: Batch
    done: Future[Append]
    """For whoever waits; the log itself never touches it."""
    after: int = 0
    """The source_sequence that must be stored already for this to be stored."""
    error: errors.MasterError | None = None
    """Why this is not stored, though the commit succeeded."""
    last_sequence: int = 0
    """The log's last sequence once this is stored."""
    acknowledged: int = 0
    """The source_sequence up to which everything of this source is stored."""
    stored: Batch = NOTHING
    """What of it is new on disk: what was there already is left out."""
    first_sequence: int = 0
    """The sequence of the first fact of `stored`; the others follow it."""

    @property
    def size_bytes(self) -> int:
        """What it takes on disk, nearly."""
        return sum(map(len, self.batch.payloads)) + _ROW_BYTES * len(self.batch.payloads)


@dataclass(slots=True)
class Commit:
    """One transaction: what was asked for, in the order it was stored, or why nothing of it is."""

    appends: list[Append]
    recorded_at_ns: int = 0
    error: errors.MasterError | None = None
    fatal: bool = False
    """The writer has ended: nothing can be stored any more."""


class Chore(Generic[T]):
    """Something else for the writer to do, and what came of it."""

    def __init__(self, work: Callable[[Connection], T]) -> None:
        self.done: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.size_bytes = 0
        self._work = work

    def attempt(self, connection: Connection) -> None:
        """Do it."""
        try:
            with connection.begin():
                result = self._work(connection)
        except Exception as error:  # Whoever waits must be told, whatever it is.
            self.done.set_exception(error)
        else:
            self.done.set_result(result)

    def give_up(self, error: Exception) -> None:
        """Tell whoever waits that it will not be done."""
        self.done.set_exception(error)


class _Source(NamedTuple):
    number: int
    name: str
    last_sequence: int


class ReadOnlyLog(LogReader):
    """A log nobody shall write to: neither its file nor its folder."""

    def __init__(self, path: Path) -> None:
        """Open the log at `path`. Raises LogFileError when it is none."""
        with ExitStack() as opened:
            engine = opened.enter_context(log_file.read_only_engine(path))
            log_file.check_readable(path, engine)
            self._opened = opened.pop_all()
        super().__init__(engine)

    def append(self, append: Append) -> None:
        """Raises NotNow, always."""
        raise errors.NotNow("this master only reads a log: ask the one that runs the cluster")

    def close(self) -> None:
        """Let go of the file."""
        self._opened.close()


class EventLog(LogReader):
    """The log this process alone writes, from `__init__` until `close`."""

    def __init__(self, path: Path, clock: Clock, deliver: Callable[[Commit], object]) -> None:
        """Open the log at `path`, new where there is none. `deliver` is called in the writer's thread, in order.

        Raises LogLockedError when another process writes it, LogFileError when this release cannot.
        """
        with log_file.kept_at(path), ExitStack() as opened:
            path.parent.mkdir(parents=True, exist_ok=True)
            opened.callback(LogLock(path).release)
            log_file.prepare(path)
            head_file = HeadFile(path)
            opened.callback(head_file.close)
            writing, reading = log_file.writing_engine(path), log_file.reading_engine(path)
            # The last connection to close empties the WAL into the file: the writer's.
            opened.callback(writing.dispose)
            connection = opened.enter_context(writing.connect())
            opened.callback(reading.dispose)
            super().__init__(reading)
            _refuse_shortened(path, connection)
            self._writer = _Writer(connection, clock, deliver, head_file)
            self._opened = opened.pop_all()

    def append(self, append: Append) -> None:
        """Have facts stored, and `append` delivered in a Commit, whatever becomes of it.

        Raises Unavailable when too much waits already, or the log is closed.
        """
        self._writer.put(append)

    def do(self, work: Callable[[Connection], T]) -> concurrent.futures.Future[T]:
        """Have `work` done in a transaction of its own, after what was appended before it.

        It keeps everybody waiting meanwhile, so it is short. Its failure is its caller's alone. Raises as `append`.
        """
        chore = Chore(work)
        self._writer.put(chore)
        return chore.done

    def close(self) -> None:
        """Store what waits, and let go of the file."""
        self._writer.stop()
        self._opened.close()


class _Writer:
    """The thread that owns the writing connection, the sequence and the hash chain."""

    def __init__(
        self, connection: Connection, clock: Clock, deliver: Callable[[Commit], object], head_file: HeadFile
    ) -> None:
        self._connection = connection
        self._driver = log_file.driver(connection)
        """Beneath it, and between its transactions."""
        self._clock = clock
        self._deliver = deliver
        self._head_file = head_file
        self._queue: queue.SimpleQueue[Append | Chore[Any] | None] = queue.SimpleQueue()
        self._put_back: Chore[Any] | None = None
        self._bytes_put = 0
        self._bytes_taken = 0
        """Counted by the writer alone, which so needs no lock; the difference is what waits."""
        self._lock = threading.Lock()
        self._ended = False
        with connection.begin():
            self._sequence = head(connection)
            self._hash = _last_hash(connection)
            rows = connection.exec_driver_sql("SELECT id, name, last_seq FROM sources")
            self._sources = {row[1]: _Source(*row) for row in rows}
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def put(self, asked: Append | Chore[Any]) -> None:
        size_bytes = asked.size_bytes
        with self._lock:
            if self._ended:
                raise errors.Unavailable("the log is closed: the master is stopping")
            if self._bytes_put + size_bytes - self._bytes_taken > QUEUE_BYTES_MAX:
                raise errors.Unavailable("more facts wait for the disk than it can take: try again later")
            self._bytes_put += size_bytes
            self._queue.put(asked)

    def stop(self) -> None:
        with self._lock:
            self._ended = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        failure: errors.MasterError | None = None
        while (taken := self._take()) is not None:
            if isinstance(taken, Chore):
                taken.attempt(self._connection) if failure is None else taken.give_up(failure)
                continue
            if failure is None:
                commit = self._attempt(taken)
                failure = commit.error if commit.fatal else None
            else:
                commit = Commit(taken, error=failure, fatal=True)
            self._deliver(commit)

    def _take(self) -> list[Append] | Chore[Any] | None:
        """What is queued, up to a full transaction, or what else is to be done; None at the end."""
        first = self._put_back or self._queue.get()
        self._put_back = None
        if first is None or isinstance(first, Chore):
            return first
        appends = [first]
        facts = len(first.batch.payloads)
        while facts < COMMIT_FACTS_MAX:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if following is None:
                self._queue.put(None)  # Seen again, once this is stored.
                break
            if isinstance(following, Chore):
                self._put_back = following
                break
            appends.append(following)
            facts += len(following.batch.payloads)
        self._bytes_taken += sum(append.size_bytes for append in appends)
        return appends

    def _attempt(self, appends: list[Append]) -> Commit:
        try:
            return self._commit(appends)
        except sqlite3.Error as error:
            # An error of the driver itself has no code.
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                full = errors.LogFull("the disk with the log is full: make room and try again; nothing stored is lost")
                return Commit(appends, error=full)
            return Commit(appends, error=errors.LogFailed(str(error)), fatal=True)
        except Exception as error:  # Whoever waits must be told, whatever it is.
            log.error("the log's writer failed", exc_info=error)
            return Commit(appends, error=errors.LogFailed(repr(error)), fatal=True)

    def _commit(self, appends: list[Append]) -> Commit:
        now_ns = self._clock.now_ns()
        draft = _Draft(self._sequence, now_ns, self._sources)
        for append in appends:
            draft.add(append)
        if draft.cells:
            digest = log_format.chain_hash(self._hash, draft.cells)
            with self._driver:  # Commits, or rolls back; but leaves the beginning to us.
                self._driver.execute("BEGIN IMMEDIATE")
                self._driver.executemany(_UPSERT_SOURCE, draft.sources.values())
                insert(self._driver, draft.cells)
                self._driver.execute(_INSERT_HASH, (draft.sequence, digest))
            self._head_file.write(Head(draft.sequence, digest))
            self._sequence, self._hash = draft.sequence, digest
            self._sources.update(draft.sources)
        return Commit(appends, now_ns)


class _Draft:
    """A transaction before it is on disk: until it is, the log still ends where it did."""

    def __init__(self, sequence: int, recorded_at_ns: int, sources: Mapping[str, _Source]) -> None:
        self.sequence = sequence
        self.sources: dict[str, _Source] = {}
        """Those that are new, or said something new."""
        self.cells: list[int | bytes] = []
        """Its rows, one after the other."""
        self._recorded_at_ns = recorded_at_ns
        self._sources_before = sources

    def add(self, append: Append) -> None:
        """Number what `append` brings that is new, and note in it how far its source is stored then."""
        number, _, last = self._source(append.source)
        if last < append.after:
            append.error = errors.Unavailable("what was to be stored before this was not: connect again")
            return
        new = append.stored = append.batch.newer(last)
        if new.facts:
            append.first_sequence = self.sequence + 1
            self.cells += new.cells(append.first_sequence, self._recorded_at_ns, number)
            self.sequence += len(new.facts)
            last = max(last, new.source_sequences[-1])
            self.sources[append.source] = _Source(number, append.source, last)
        append.last_sequence = self.sequence
        append.acknowledged = last

    def _source(self, name: str) -> _Source:
        known = self.sources.get(name) or self._sources_before.get(name)
        if known is not None:
            return known
        new = sum(source.name not in self._sources_before for source in self.sources.values())
        return _Source(len(self._sources_before) + new + 1, name, 0)


def insert(driver: sqlite3.Connection, cells: Sequence[Any]) -> None:
    """Insert many rows, one after the other in `cells`, with few statements.

    sqlite3 lets go of the interpreter's lock at each row of an executemany, and waits for it behind the event
    loop again: with a busy loop that is a hundred times slower than handing SQLite the rows together.
    """
    rows, start = len(cells) // log_format.ROW_CELLS, 0
    while start < rows:
        count = min(_ROWS_PER_STATEMENT_MAX, 1 << ((rows - start).bit_length() - 1))
        together = cells[start * log_format.ROW_CELLS : (start + count) * log_format.ROW_CELLS]
        driver.execute(_INSERTS[count], together)
        start += count


def _refuse_shortened(path: Path, connection: Connection) -> None:
    """Raise LogFileError when the log does not hold what was last acknowledged."""
    acknowledged = read_head(path)
    if acknowledged is None:
        return
    remedy = f"restore a backup, or remove {head_path(path).name} beside it to go on with what is there"
    with connection.begin():
        ends_at = head(connection)
        stored = connection.exec_driver_sql("SELECT hash FROM chain WHERE seq = ?", (acknowledged.sequence,)).scalar()
    if ends_at < acknowledged.sequence:
        raise log_file.LogFileError(
            f"{path} ends at sequence {ends_at}, but {acknowledged.sequence} was acknowledged: its -wal is missing or "
            f"damaged, or this is an older copy; {remedy}"
        )
    if acknowledged.sequence and stored != acknowledged.digest:
        raise log_file.LogFileError(
            f"{path} is not the log that was acknowledged up to sequence {acknowledged.sequence}: its history differs "
            f"there; {remedy}"
        )


def _last_hash(connection: Connection) -> bytes:
    """The end of the chain. Raises CorruptEventError when the last commit is not the one that was hashed."""
    last_two = connection.exec_driver_sql("SELECT seq, hash FROM chain ORDER BY seq DESC LIMIT 2").fetchall()
    last, before = (*last_two, (0, b""), (0, b""))[:2]
    rows = connection.exec_driver_sql("SELECT * FROM events WHERE seq > ? ORDER BY seq", (before[0],)).fetchall()
    if rows and log_format.chain_hash(before[1], list(chain.from_iterable(rows))) != last[1]:
        raise log_format.CorruptEventError(rows[-1][0], "the last commit does not match its hash")
    digest: bytes = last[1]
    return digest
