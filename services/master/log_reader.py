"""Reads the log: its rows by ranges, and its checkpoints.

Rules this module lives by:
- A page is read and let go of: an open read transaction keeps the WAL from being emptied.
- Rows may be missing at or below the mark, where samples were compacted away, and nowhere else.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from itertools import repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf.message import DecodeError
from sqlalchemy import Connection, CursorResult, Engine

from services import log_format
from services.master import log_file
from ullage.v1 import event_pb2

PAGE_EVENTS: Final = 2048
"""Events in a page: some milliseconds, and few enough to stay in the processor's cache."""

READ_BYTES_MAX: Final = 8 << 20
"""Bytes of facts in a page, and those of few more: a fact can have three million."""

_FETCHED_TOGETHER: Final = 16
"""Rows fetched before their bytes are counted."""

_SELECT: Final = (
    "SELECT e.seq, e.recorded_at_ns, e.kind, s.name, e.source_seq, e.crc, e.payload "
    "FROM events e JOIN sources s ON s.id = e.source WHERE e.seq BETWEEN ? AND ?"
)


class Range(NamedTuple):
    """A range of sequences in which samples may be missing, both ends included."""

    first: int
    last: int


class Size(NamedTuple):
    """What a log takes on disk, beside the size of its files."""

    free_bytes: int
    checkpoint_bytes: int
    kinds: list[tuple[int, int, int]]
    """Kind, number of events and their own bytes."""


class Page(NamedTuple):
    """Rows for a replay, by columns, the sequence up to which there are no more, and when the last was stored."""

    reached: int
    recorded_at_ns: int
    sequences: Sequence[int]
    crcs: Sequence[int]
    payloads: Sequence[bytes]

    def check(self) -> None:
        """Raise CorruptEventError when a row is not what was stored."""
        log_format.check(self.sequences, self.crcs, self.payloads)

    def facts(self, at: Sequence[int]) -> Iterator[tuple[int, int, event_pb2.Fact]]:
        """Of the rows at these places in it the sequence, the time of the page's last, and the fact.

        Raises CorruptEventError where one is none.
        """
        sequences, payloads = [self.sequences[index] for index in at], [self.payloads[index] for index in at]
        return zip(sequences, repeat(self.recorded_at_ns), log_format.facts(sequences, payloads))


class Scan(NamedTuple):
    """Rows that were looked for, and the sequence up to which, or down to which, there are no more."""

    rows: list[log_format.Row]
    reached: int


class LogReader:
    """Reads a log's rows by ranges. Safe from any thread; each call is one short transaction."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        with engine.connect() as connection:
            names = connection.exec_driver_sql("SELECT name FROM sqlite_master WHERE type = 'table'").scalars()
            # A log of an older release that is only read has not been migrated.
            self._has_retention = "compacted" in set(names)

    def head(self) -> int:
        """The last sequence, 0 in an empty log."""
        with self.engine.connect() as connection:
            return head(connection)

    def mark(self) -> int:
        """The sequence up to which samples may be missing; 0 in a log that was never compacted."""
        if not self._has_retention:
            return 0
        with self.engine.connect() as connection:
            return _mark(connection)

    def compacted(self) -> list[Range]:
        """The ranges in which samples may be missing, in the order in which they were compacted."""
        if not self._has_retention:
            return []
        with self.engine.connect() as connection:
            rows = connection.exec_driver_sql("SELECT first_seq, last_seq FROM compacted ORDER BY id")
            return [Range(*row) for row in rows]

    def read(
        self,
        first: int,
        last: int,
        *,
        kinds: Collection[int] = (),
        descending: bool = False,
        limit: int | None = None,
    ) -> list[log_format.Row]:
        """The rows numbered `first` to `last`, both included, of these kinds or of all; at most `limit`."""
        statement = _selection(kinds, descending=descending)
        if limit is not None:
            statement += f" LIMIT {limit}"
        with self.engine.connect() as connection:
            return [log_format.Row(*row) for row in connection.exec_driver_sql(statement, (first, last))]

    def scan(self, first: int, last: int, *, kinds: Collection[int] = (), descending: bool = False) -> Scan:
        """The same, but no more bytes at once than a page has: who wants the rest goes on from where it reached."""
        with self.engine.connect() as connection:
            statement = _selection(kinds, descending=descending)
            fetched, whole = _fetched(connection.exec_driver_sql(statement, (first, last)))
        rows = list(map(log_format.Row._make, fetched))
        end = first if descending else last
        return Scan(rows, end if whole else rows[-1].sequence)

    def pages(self, first: int, last: int) -> Iterator[Page]:
        """The rows numbered `first` to `last`: all that a replay needs of them.

        Raises CorruptEventError when one is not there that was not compacted away.
        """
        # One connection for all of them; each page is a transaction of its own.
        with self.engine.connect() as connection:
            while first <= last:
                page = self._page(connection, first, last)
                yield page
                first = page.reached + 1

    def _page(self, connection: Connection, first: int, last: int) -> Page:
        end = min(last, first + PAGE_EVENTS - 1)
        # Of all but the last the time is of no use: a number less for each of millions of rows.
        recorded_at_ns = connection.exec_driver_sql("SELECT recorded_at_ns FROM events WHERE seq = ?", (end,)).scalar()
        result = connection.exec_driver_sql(
            "SELECT crc, payload FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq", (first, end)
        )
        rows, _ = _fetched(result)
        if recorded_at_ns is not None and len(rows) == end - first + 1:
            return Page(end, recorded_at_ns, range(first, end + 1), *zip(*rows, strict=True))
        return self._sparse_page(connection, first, last)

    def _sparse_page(self, connection: Connection, first: int, last: int) -> Page:
        statement = (
            "SELECT seq, recorded_at_ns, crc, payload FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq LIMIT ?"
        )
        rows, whole = _fetched(connection.exec_driver_sql(statement, (first, last, PAGE_EVENTS)))
        reached = last if whole and len(rows) < PAGE_EVENTS else rows[-1][0]
        # Asked after the rows: it is moved before the first of them goes.
        mark = _mark(connection) if self._has_retention else 0
        there = {row[0] for row in rows}
        missing = next((each for each in range(max(first, mark + 1), reached + 1) if each not in there), None)
        if missing is not None:
            raise log_format.CorruptEventError(missing, "it is missing")
        if not rows:
            return Page(reached, 0, (), (), ())
        sequences, times_ns, crcs, payloads = zip(*rows, strict=True)
        return Page(reached, times_ns[-1], sequences, crcs, payloads)

    def checkpoint(self, last: int) -> event_pb2.Checkpoint | None:
        """The latest checkpoint at or below `last` that is what was stored; None when there is none."""
        return next(self.checkpoints(last), None)

    def checkpoints(self, last: int) -> Iterator[event_pb2.Checkpoint]:
        """The checkpoints at or below `last`, the latest first, but for those that are damaged."""
        for sequence in self.checkpoint_sequences():
            if sequence <= last and (whole := self._checkpoint(sequence)) is not None:
                yield whole

    def checkpoint_sequences(self) -> list[int]:
        """Where there are checkpoints, the latest first."""
        if not self._has_retention:
            return []
        with self.engine.connect() as connection:
            return list(connection.exec_driver_sql("SELECT seq FROM checkpoints ORDER BY seq DESC").scalars())

    def _checkpoint(self, sequence: int) -> event_pb2.Checkpoint | None:
        with self.engine.connect() as connection:
            row = connection.exec_driver_sql(
                "SELECT crc, payload FROM checkpoints WHERE seq = ?", (sequence,)
            ).fetchone()
        if row is None or zlib.crc32(row[1]) != row[0]:
            return None
        try:
            made = event_pb2.Checkpoint.FromString(row[1])
        except DecodeError:
            return None
        return made if made.sequence == sequence else None

    def first_since(self, recorded_at_ns: int) -> int | None:
        """The first sequence recorded at that time or later, None when there is none yet."""
        with self.engine.connect() as connection:
            sequence: int | None = connection.exec_driver_sql(
                "SELECT seq FROM events WHERE recorded_at_ns >= ? ORDER BY seq LIMIT 1", (recorded_at_ns,)
            ).scalar()
            return sequence

    def last_until(self, recorded_at_ns: int) -> int:
        """The last sequence recorded at that time or earlier, 0 when there is none; the clock may have gone back."""
        with self.engine.connect() as connection:
            sequence: int | None = connection.exec_driver_sql(
                "SELECT seq FROM events WHERE recorded_at_ns <= ? ORDER BY seq DESC LIMIT 1", (recorded_at_ns,)
            ).scalar()
            return sequence or 0

    def commit_before(self, sequence: int) -> int:
        """The last sequence of the last commit that ends before `sequence`; 0 when there is none."""
        with self.engine.connect() as connection:
            end: int = connection.exec_driver_sql(
                "SELECT coalesce(max(seq), 0) FROM chain WHERE seq < ?", (sequence,)
            ).scalar_one()
            return end

    def commit_hash(self, sequence: int) -> bytes | None:
        """The hash of the commit that ends at `sequence`, None when none does, or it was compacted away."""
        with self.engine.connect() as connection:
            digest: bytes | None = connection.exec_driver_sql(
                "SELECT hash FROM chain WHERE seq = ?", (sequence,)
            ).scalar()
            return digest

    def stored_rows(self, first: int, last: int) -> Iterator[log_format.StoredRow]:
        """The rows numbered `first` to `last` as they are in the table, page by page."""
        statement = "SELECT * FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq LIMIT ?"
        while first <= last:
            with self.engine.connect() as connection:
                rows, whole = _fetched(connection.exec_driver_sql(statement, (first, last, PAGE_EVENTS)))
            yield from rows
            if whole and len(rows) < PAGE_EVENTS:
                return
            first = rows[-1][0] + 1

    def commits(self, after: int) -> Iterator[tuple[int, bytes]]:
        """The end and the hash of every commit that ends after `after`, in order, page by page."""
        while True:
            with self.engine.connect() as connection:
                rows = connection.exec_driver_sql(
                    "SELECT seq, hash FROM chain WHERE seq > ? ORDER BY seq LIMIT ?", (after, PAGE_EVENTS)
                ).fetchall()
            for row in rows:
                yield row[0], row[1]
            if len(rows) < PAGE_EVENTS:
                return
            after = rows[-1][0]

    def size(self) -> Size:
        """What it takes, and what for; reads all of the log."""
        with self.engine.connect() as connection:
            free: int = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            page_bytes: int = connection.exec_driver_sql("PRAGMA page_size").scalar_one()
            kinds = connection.exec_driver_sql(
                "SELECT kind, count(*), sum(length(payload)) FROM events GROUP BY kind ORDER BY kind"
            ).fetchall()
            checkpoints = 0
            if self._has_retention:
                checkpoints = connection.exec_driver_sql(
                    "SELECT coalesce(sum(length(payload)), 0) FROM checkpoints"
                ).scalar_one()
        return Size(free * page_bytes, checkpoints, [(row[0], row[1], row[2]) for row in kinds])

    def copy_to(self, path: Path) -> None:
        """Write a consistent copy of the log as it is now."""
        # Not VACUUM INTO, which a connection that only reads may not do.
        with self.engine.connect() as connection, closing(sqlite3.connect(path)) as target:
            log_file.driver(connection).backup(target)

    def sources(self) -> dict[str, int]:
        """The last stored source_sequence of every source."""
        with self.engine.connect() as connection:
            return {name: last for name, last in connection.exec_driver_sql("SELECT name, last_seq FROM sources")}  # noqa: C416 - mypy knows these to be pairs

    def said(self, after: int, last: int) -> dict[str, int]:
        """The greatest source_sequence of each source that said something in the rows above `after`, up to `last`."""
        with self.engine.connect() as connection:
            rows = connection.exec_driver_sql(
                "SELECT s.name, max(e.source_seq) FROM events e JOIN sources s ON s.id = e.source "
                "WHERE e.seq > ? AND e.seq <= ? GROUP BY e.source",
                (after, last),
            )
            return {name: greatest for name, greatest in rows}  # noqa: C416 - mypy knows these to be pairs


def _selection(kinds: Collection[int], *, descending: bool) -> str:
    """The statement for the rows of these kinds, or of all."""
    of_kinds = f" AND e.kind IN ({', '.join(str(int(kind)) for kind in sorted(kinds))})" if kinds else ""
    return f"{_SELECT}{of_kinds} ORDER BY e.seq {'DESC' if descending else 'ASC'}"


def _fetched(result: CursorResult[Any]) -> tuple[list[Any], bool]:
    """The rows of a result whose last column is the payload, up to READ_BYTES_MAX; and whether there are no more.

    They are the driver's own tuples, without SQLAlchemy's row around each: a replay reads millions.
    """
    rows: list[Any] = []
    size_bytes = 0
    with closing(result.cursor) as cursor:
        while size_bytes < READ_BYTES_MAX:
            some = cursor.fetchmany(_FETCHED_TOGETHER)
            if not some:
                return rows, True
            rows += some
            size_bytes += sum([len(row[-1]) for row in some])
    return rows, False


def head(connection: Connection) -> int:
    """The last sequence, 0 in an empty log."""
    sequence: int = connection.exec_driver_sql("SELECT coalesce(max(seq), 0) FROM events").scalar_one()
    return sequence


def _mark(connection: Connection) -> int:
    sequence: int = connection.exec_driver_sql("SELECT coalesce(max(last_seq), 0) FROM compacted").scalar_one()
    return sequence
