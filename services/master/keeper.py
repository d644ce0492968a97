"""Keeps the log short to replay and small on disk: makes checkpoints, and compacts what is old.

Rules this module lives by:
- It reads the log, not the live state, in a thread of its own; the event loop and the writer wait for none of it.
- It writes through the log's writer, between two commits, a little at a time.
- A range is compacted up to a checkpoint only, and ends with a commit, whose hash stays. The mark is moved before
  anything goes; a fact with a seal over what is left is recorded when everything has gone. A range without one was
  interrupted, and is compacted again.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Final, TypeVar

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from services import log_format
from services.master import errors
from services.master.checkpoint import checkpoint
from services.master.cluster import Cluster
from services.master.event_log import EventLog
from services.master.log_reader import LogReader, Range
from services.master.replay import fold, nearest
from services.master.retention import DECISION_KINDS, SAMPLE_KINDS, Policy, Thinning, decided_at, kept_from, subject
from ullage.v1 import event_pb2

LOOK_SECONDS: Final = 5.0
CHECKPOINT_EVENTS: Final = 8192
"""The most a start replays after a checkpoint, but for what comes while one is made."""

CHECKPOINTS_KEPT: Final = 4
COMPACT_SECONDS: Final = 600.0
JUMP_SECONDS: Final = 60.0
"""A clock that is suddenly so far from where it was is looked at once more before anything goes by it."""

DELETIONS_IN_COMMIT: Final = 512
"""Some milliseconds: facts wait no longer for the disk than behind a commit of the largest size."""

COMMITS_IN_COMMIT: Final = 2048
FREE_PAGES_KEPT: Final = 2048
"""8 MiB that the next events fill again; what is free beyond goes back to the disk."""

PAGES_IN_COMMIT: Final = 256

T = TypeVar("T")

log = structlog.get_logger()


class Keeper:
    """What looks after the log of a master that writes it."""

    def __init__(self, cluster: Cluster, event_log: EventLog, policy: Policy) -> None:
        self._cluster = cluster
        self._log = event_log
        self._policy = policy
        self._compacting = asyncio.Lock()
        self._checkpointing = asyncio.Lock()
        self._offset_seconds = self._clock_offset_seconds()

    async def run(self) -> None:
        """Look after it until cancelled."""
        clock = self._cluster.clock
        compact_at = clock.monotonic()
        while True:
            try:
                await self.checkpoint_if_due()
                if clock.monotonic() >= compact_at:
                    if not self._clock_jumped():
                        await self.compact(self._policy)
                    compact_at = clock.monotonic() + COMPACT_SECONDS
            except (errors.MasterError, log_format.CorruptEventError, DBAPIError) as error:
                # A full disk, most likely. The log stays as long as it is, and is looked at again.
                log.warning("the log was not looked after", error=str(error))
            await clock.sleep(LOOK_SECONDS)

    def _clock_offset_seconds(self) -> float:
        return self._cluster.clock.now_ns() / 1e9 - self._cluster.clock.monotonic()

    def _clock_jumped(self) -> bool:
        """The machine's clock was set since the last look: whether samples are old is not believed it this once."""
        before, self._offset_seconds = self._offset_seconds, self._clock_offset_seconds()
        jump = self._offset_seconds - before
        if abs(jump) < JUMP_SECONDS:
            return False
        log.warning("the clock jumped: samples stay until the next look", seconds=round(jump), next=COMPACT_SECONDS)
        return True

    async def checkpoint_if_due(self) -> None:
        """Make a checkpoint when the last one is far behind."""
        made_at = max(self._log.checkpoint_sequences(), default=0)
        if self._cluster.state.sequence - made_at >= CHECKPOINT_EVENTS:
            await self.checkpoint()

    async def checkpoint(self) -> int | None:
        """Make a checkpoint of what is stored now; returns its sequence, None where the history has none."""
        async with self._checkpointing:
            made = await asyncio.to_thread(_checkpoint, self._log, self._cluster.state.sequence)
            if made is None:
                log.warning("this log has no checkpoint: its start replays all of it")
                return None
            payload = made.SerializeToString()
            await self._do(lambda connection: _store(connection, made.sequence, payload))
            log.debug("checkpoint", sequence=made.sequence, bytes=len(payload))
            return made.sequence

    async def compact(self, policy: Policy) -> int:
        """Let go of what `policy` does not keep; returns how many events went."""
        async with self._compacting:
            now_ns = self._cluster.clock.now_ns()
            minutes_from_ns = kept_from(now_ns, policy.minutes_seconds)
            removed = 0
            for interrupted in await asyncio.to_thread(_unsealed, self._log):
                removed += await self._compact(interrupted, minutes_from_ns)
            samples_from_ns = kept_from(now_ns, policy.samples_seconds)
            planned = await asyncio.to_thread(_plan, self._log, samples_from_ns, minutes_from_ns)
            for range_ in planned:
                if await self._checkpointed(range_.last):
                    await self._do(partial(_begin, range_=range_))
                    removed += await self._compact(range_, minutes_from_ns)
            await self._shrink()
            return removed

    async def _checkpointed(self, last: int) -> bool:
        if max(self._log.checkpoint_sequences(), default=0) >= last:
            return True
        return await self.checkpoint() is not None

    async def _compact(self, range_: Range, minutes_from_ns: int) -> int:
        surplus = await asyncio.to_thread(_surplus, self._log, range_, minutes_from_ns)
        for some in _parts(surplus, DELETIONS_IN_COMMIT):
            await self._do(partial(_delete, table="events", sequences=some))
        hashes = await asyncio.to_thread(_inner_commits, self._log, range_)
        for some in _parts(hashes, COMMITS_IN_COMMIT):
            await self._do(partial(_delete, table="chain", sequences=some))
        seal = await asyncio.to_thread(sealed, self._log, range_)
        compacted = event_pb2.LogCompacted(
            first_sequence=range_.first, last_sequence=range_.last, removed_events=len(surplus), seal=seal
        )
        await self._cluster.append(event_pb2.Fact(log_compacted=compacted))
        log.info("compacted", first=range_.first, last=range_.last, removed=len(surplus))
        return len(surplus)

    async def _shrink(self) -> None:
        """Give free pages back to the disk, where the file was made so that it can."""
        while await self._do(_vacuum_some):
            pass

    async def _do(self, work: Callable[[Connection], T]) -> T:
        return await asyncio.wrap_future(self._log.do(work))


def _checkpoint(reader: LogReader, sequence: int) -> event_pb2.Checkpoint | None:
    state = nearest(reader, sequence)
    before = reader.checkpoint(state.sequence) if state.sequence else None
    said = {} if before is None else {mark.source: mark.source_sequence for mark in before.sources}
    said |= reader.said(state.sequence, sequence)
    for _ in fold(reader, state, sequence):
        pass
    return checkpoint(state, said)


def _store(connection: Connection, sequence: int, payload: bytes) -> None:
    connection.exec_driver_sql(
        "INSERT OR REPLACE INTO checkpoints (seq, crc, payload) VALUES (?, ?, ?)",
        (sequence, zlib.crc32(payload), payload),
    )
    connection.exec_driver_sql(
        "DELETE FROM checkpoints WHERE seq NOT IN (SELECT seq FROM checkpoints ORDER BY seq DESC LIMIT ?)",
        (CHECKPOINTS_KEPT,),
    )


def _plan(reader: LogReader, samples_from_ns: int, minutes_from_ns: int) -> list[Range]:
    """The ranges to compact: what minutes are too old in, then what is old and was never thinned."""
    mark = reader.mark()
    head = reader.head()
    ranges = []
    dropped = max((range_.last for range_ in reader.compacted() if range_.first == 1), default=0)
    drop_to = reader.commit_before(min(_first_since(reader, minutes_from_ns), mark + 1))
    if drop_to > dropped:
        ranges.append(Range(1, drop_to))
    # The last commit stays whole: the log ends with what it says it ends with.
    thin_to = reader.commit_before(min(_first_since(reader, samples_from_ns), reader.commit_before(head + 1)))
    if thin_to > mark:
        ranges.append(Range(mark + 1, thin_to))
    return ranges


def _first_since(reader: LogReader, recorded_at_ns: int) -> int:
    return reader.first_since(recorded_at_ns) or reader.head() + 1


def _surplus(reader: LogReader, range_: Range, minutes_from_ns: int) -> list[int]:
    """The sequences of the samples in the range that are not kept."""
    decisions = reader.read(range_.first, reader.head(), kinds=DECISION_KINDS)
    thinning = Thinning(range_.last, [decided_at(log_format.event(row).fact) for row in decisions], minutes_from_ns)
    samples = (
        (row.sequence, row.recorded_at_ns, subject(log_format.fact(row.sequence, row.crc, row.payload)))
        for row in _samples_backwards(reader, range_)
    )
    return list(thinning.surplus(samples))


def _samples_backwards(reader: LogReader, range_: Range) -> Iterator[log_format.Row]:
    last = range_.last
    while last >= range_.first:
        rows = reader.read(range_.first, last, kinds=SAMPLE_KINDS, descending=True, limit=2048)
        yield from rows
        if not rows:
            return
        last = rows[-1].sequence - 1


def _inner_commits(reader: LogReader, range_: Range) -> list[int]:
    """The commits of the range whose hashes no longer match anything: all but those that end a range."""
    ends = {compacted.last for compacted in reader.compacted()}
    inner = []
    for end, _ in reader.commits(range_.first - 1):
        if end > range_.last:
            break
        if end not in ends:
            inner.append(end)
    return inner


def sealed(reader: LogReader, range_: Range) -> bytes:
    """The seal over what is left of a range. Raises CorruptEventError when the commit it ends with is not there."""
    commit = reader.commit_hash(range_.last)
    if commit is None:
        raise log_format.CorruptEventError(range_.last, "the hash of the commit that ends there is missing")
    return log_format.seal(commit, reader.stored_rows(*range_))


def standing(reader: LogReader) -> list[Range]:
    """The compacted ranges but for those that a later one covers, in order."""
    kept: list[Range] = []
    for range_ in reversed(reader.compacted()):
        if not any(other.first <= range_.first and range_.last <= other.last for other in kept):
            kept.append(range_)
    return sorted(kept)


def seals(reader: LogReader) -> dict[Range, bytes]:
    """The last seal recorded for each range."""
    kind = log_format.KIND_NUMBERS["log_compacted"]
    found = {}
    for row in reader.read(1, reader.head(), kinds=[kind]):
        said = log_format.event(row).fact.log_compacted
        found[Range(said.first_sequence, said.last_sequence)] = said.seal
    return found


def _unsealed(reader: LogReader) -> list[Range]:
    known = seals(reader)
    return [range_ for range_ in standing(reader) if range_ not in known]


def _begin(connection: Connection, range_: Range) -> None:
    connection.exec_driver_sql("INSERT INTO compacted (first_seq, last_seq) VALUES (?, ?)", tuple(range_))


def _delete(connection: Connection, table: str, sequences: Sequence[int]) -> None:
    # One statement: sqlite3 waits for the interpreter's lock behind the event loop at each row of an executemany.
    marks = ", ".join(map(str, sequences))
    connection.exec_driver_sql(f"DELETE FROM {table} WHERE seq IN ({marks})")  # noqa: S608 - numbers only


def _vacuum_some(connection: Connection) -> bool:
    """Give some pages back; whether there are more."""
    free: int = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
    if free <= FREE_PAGES_KEPT or connection.exec_driver_sql("PRAGMA auto_vacuum").scalar_one() != 2:
        return False
    # One row for each page: they are fetched, or it stops at the first.
    connection.exec_driver_sql(f"PRAGMA incremental_vacuum({min(PAGES_IN_COMMIT, free - FREE_PAGES_KEPT)})").fetchall()
    return True


def _parts(sequences: Sequence[int], size: int) -> Iterator[list[int]]:
    pending = iter(sequences)
    while part := list(islice(pending, size)):
        yield part
