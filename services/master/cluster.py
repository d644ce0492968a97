"""The one writer: what is appended is stored, then applied, then told to whoever waits, in that order.

Rules this module lives by:
- Nothing is applied, acknowledged or published before the log has it on disk.
- The state changes on the event loop only, one commit after the other in the order of the log, without an
  await in between: whoever reads it between two awaits of his own sees one moment of it.
- Liveness is this process's own, by its monotonic clock; it is written to the log as facts, never read back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count, repeat
from pathlib import Path
from typing import Final

import structlog

from services import log_format
from services.clock import Clock
from services.master import errors
from services.master.batch import Batch, batch
from services.master.event_log import FACT_BYTES_MAX, Append, Commit, EventLog, ReadOnlyLog
from services.master.liveness import Bounds, fallen, liveness, overdue
from services.master.replay import fold, nearest
from services.master.state import State, apply_facts, superseded
from services.master.subscription import Happened, Happenings, Subscription
from ullage.v1 import event_pb2, state_pb2, telemetry_service_pb2

MASTER_SOURCE: Final = "master"

WATCH_PERIOD_SECONDS: Final = 0.25
"""How often silences are looked for: well below the shortest bound that makes sense."""

log = structlog.get_logger()


class Cluster:
    """The state, and the only way to change it."""

    def __init__(
        self, open_log: Callable[[Callable[[Commit], object]], EventLog | ReadOnlyLog], clock: Clock, bounds: Bounds
    ) -> None:
        """`open_log` is given what takes the commits; use `opened` or `read_only`."""
        loop = asyncio.get_running_loop()
        self.state = State()
        self.log = open_log(lambda commit: loop.call_soon_threadsafe(self._committed, commit))
        self.head_sequence = 0
        """Where the log ended when the replay began."""
        self.replaying = True
        """The state is not yet what the log says; nothing can be appended."""
        self.placing = asyncio.Lock()
        self.stopping = asyncio.Event()
        """Set when streams shall end."""
        self.failed: asyncio.Future[None] = loop.create_future()
        """Has an exception once the log can no longer be written: nothing can be promised, so the process must end."""
        self.clock = clock
        self.bounds = bounds
        self._heard: dict[str, float] = {}
        self._runner_heard: dict[str, float] = {}
        self._seen: dict[str, state_pb2.Liveness.ValueType] = {}
        self._acknowledged = self.log.sources()
        self._subscriptions: set[Subscription] = set()

    async def replay(self) -> None:
        """Make the state what the log says, letting the event loop live meanwhile. Before anything else."""
        self.head_sequence = self.log.head()
        made_at = max(self.log.checkpoint_sequences(), default=0)
        if made_at > self.head_sequence:
            lost = f"it is missing, and a checkpoint was made at {made_at}"
            raise log_format.CorruptEventError(self.head_sequence + 1, lost)
        self.state = await asyncio.to_thread(nearest, self.log, self.head_sequence)
        for _ in fold(self.log, self.state, self.head_sequence):
            await asyncio.sleep(0)
        self.replaying = False

    async def append(self, *facts: event_pb2.Fact) -> int:
        """Store the master's own facts; returns the last one's sequence once they are durable and applied.

        Raises LogFull when the disk takes no more, Unavailable when the master stops.
        """
        if not facts:
            return self.state.sequence
        stored = await self.submit(MASTER_SOURCE, batch((0, fact) for fact in facts))
        return stored.last_sequence

    async def record(self, source: str, observations: Sequence[telemetry_service_pb2.Observation]) -> int:
        """Store what `source` said, skipping what it said before.

        Returns the source_sequence up to which everything is durable and applied. Raises as `append` does.
        """
        stored = await self.submit(source, batch((said.source_sequence, said.fact) for said in observations))
        return stored.acknowledged

    def submit(self, source: str, facts: Batch, *, after: int = 0) -> asyncio.Future[Append]:
        """Queue facts for the log, in the order of the calls; done when durable and applied.

        Whoever does not wait for one call before the next says `after`, the last source_sequence of the one
        before: should that fail, this does too, rather than hide for ever what was to come before it. Raises
        InvalidRequest for a fact that is too large, Unavailable as the log does.
        """
        if self.replaying:
            raise errors.Unavailable("the master is replaying its log: try again in a moment")
        if (largest := max(map(len, facts.payloads), default=0)) > FACT_BYTES_MAX:
            raise errors.InvalidRequest(f"a fact has {largest} bytes: the log takes at most {FACT_BYTES_MAX} in one")
        done: asyncio.Future[Append] = asyncio.get_running_loop().create_future()
        self.log.append(Append(source, facts, done, after))
        return done

    def acknowledged(self, source: str) -> int:
        """The source_sequence up to which all that `source` said is durable; 0 for a new one."""
        return self._acknowledged.get(source, 0)

    def hear(self, node_id: str) -> None:
        """Note that the node spoke now."""
        self._heard[node_id] = self.clock.monotonic()

    def hear_runner(self, node_id: str) -> None:
        """Note that the node's runner spoke now, over its session."""
        self.hear(node_id)
        self._runner_heard[node_id] = self.clock.monotonic()

    def miss_runner(self, node_id: str) -> None:
        """Note that the node's runner has no session any more."""
        self._runner_heard.pop(node_id, None)

    def liveness(self, node_id: str) -> state_pb2.Liveness.ValueType:
        """Whether the node is heard."""
        return liveness(self._heard.get(node_id), self.clock.monotonic(), self.bounds)

    def silent_node_ids(self) -> frozenset[str]:
        """The nodes in the state that are not live, or whose runner is not: neither can be given work.

        None where a log is only read, since nobody speaks there.
        """
        if self.read_only:
            return frozenset()
        now, nodes = self.clock.monotonic(), self.state.nodes
        # Of thousands nearly all are heard, so those are looked for that are not.
        silent = (nodes.keys() - self._heard.keys()).union(overdue(self._heard, now, self.bounds))
        unserved = (nodes.keys() - self._runner_heard.keys()).union(overdue(self._runner_heard, now, self.bounds))
        silent.update(id_ for id_ in unserved if id_ in nodes and nodes[id_].runner is not None)
        return frozenset(silent & nodes.keys())

    def is_silent(self, node_id: str) -> bool:
        """Whether this one node is among them, or is not there at all."""
        node = self.state.nodes.get(node_id)
        if node is None or self.read_only:
            return node is None
        runner = liveness(self._runner_heard.get(node_id), self.clock.monotonic(), self.bounds)
        unserved = node.runner is not None and runner != state_pb2.LIVENESS_LIVE
        return unserved or self.liveness(node_id) != state_pb2.LIVENESS_LIVE

    @asynccontextmanager
    async def subscribe(self, kinds: Collection[str] | None = None) -> AsyncIterator[Subscription]:
        """A subscription to what happens from now on; with `kinds` (names of Fact's fields) to these only."""
        subscription = Subscription(kinds, self.state.sequence)
        if self.stopping.is_set():
            subscription.end(errors.Unavailable("the master is stopping"))
        self._subscriptions.add(subscription)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    @property
    def read_only(self) -> bool:
        """The log is only read: nothing can be appended, and no node is heard."""
        return isinstance(self.log, ReadOnlyLog)

    def stop_streams(self) -> None:
        """Have every stream end: gRPC does not tell them that the server stops."""
        self.stopping.set()
        for subscription in self._subscriptions:
            subscription.end(errors.Unavailable("the master is stopping"))

    async def watch_silences(self) -> None:
        """Record each node that falls silent, once at each bound, until cancelled."""
        while True:
            await self.clock.sleep(WATCH_PERIOD_SECONDS)
            await self.note_silences()

    async def note_silences(self) -> None:
        """Record the nodes that became suspected or lost since the last look."""
        now = {node_id: self.liveness(node_id) for node_id in self.state.nodes}
        facts = [_silence(node_id, what) for node_id, what in fallen(self._seen, now)]
        try:
            await self.append(*facts)
        except errors.MasterError as error:
            # Looked at again the next time, since what was seen then is not taken over.
            log.warning("silences not recorded", facts=len(facts), error=str(error))
        else:
            self._seen = now

    def _committed(self, commit: Commit) -> None:
        """Take what the log has stored, or could not; on the event loop, in the order of the log."""
        if commit.error is not None:
            self._uncommitted(commit, commit.error)
            return
        for append in commit.appends:
            self._apply(append.stored, append.first_sequence, commit.recorded_at_ns)
            if append.acknowledged:
                self._acknowledged[append.source] = append.acknowledged
        self._publish(commit)
        self._settle(commit)

    def _apply(self, stored: Batch, first_sequence: int, recorded_at_ns: int) -> None:
        skipped = superseded(self.state, stored.sampled_node_id, len(stored.facts))
        facts = stored.facts[skipped:] if skipped else stored.facts
        apply_facts(self.state, zip(count(first_sequence + skipped), repeat(recorded_at_ns), facts))

    def _settle(self, commit: Commit) -> None:
        for append in commit.appends:
            if append.done.done():
                continue  # Its waiter has gone; what it said is stored all the same.
            if append.error is not None:
                append.done.set_exception(append.error)
            else:
                append.done.set_result(append)

    def _uncommitted(self, commit: Commit, error: Exception) -> None:
        for append in commit.appends:
            if not append.done.done():
                append.done.set_exception(error)
        if commit.fatal and not self.failed.done():
            self.failed.set_exception(error)

    def _publish(self, commit: Commit) -> None:
        told: dict[frozenset[int] | None, Happenings] = {}
        events: dict[int, Happened] = {}
        for subscription in self._subscriptions:
            kinds = subscription.kinds
            if kinds not in told:
                told[kinds] = Happenings(_happened(commit, kinds, events))
            if told[kinds]:
                subscription.put(told[kinds])


def _happened(commit: Commit, kinds: frozenset[int] | None, events: dict[int, Happened]) -> Iterator[Happened]:
    """What of these kinds, or at all, a commit brought; `events` has those made for others, by sequence."""
    for append in commit.appends:
        for index in _wanted(append.stored, kinds):
            sequence = append.first_sequence + index
            event = events.get(sequence) or _event(commit, append, index)
            events[sequence] = event
            yield event


def _wanted(stored: Batch, kinds: frozenset[int] | None) -> Iterable[int]:
    """Where in `stored` facts of these kinds are, or all of them."""
    if kinds is None:
        return range(len(stored.kinds))
    if kinds.isdisjoint(stored.kinds):
        return ()
    return [index for index, kind in enumerate(stored.kinds) if kind in kinds]


def _event(commit: Commit, append: Append, index: int) -> Happened:
    stored = append.stored
    row = log_format.Row(
        append.first_sequence + index,
        commit.recorded_at_ns,
        stored.kinds[index],
        append.source,
        stored.source_sequences[index],
        stored.crcs[index],
        stored.payloads[index],
    )
    return Happened(row, stored.facts[index])


@asynccontextmanager
async def attached(
    path: Path, clock: Clock, bounds: Bounds | None = None, *, read_only: bool = False
) -> AsyncIterator[Cluster]:
    """The cluster whose log is at `path`, not yet replayed; its streams end and its log closes at the end.

    Raises LogLockedError when another master writes the log, LogFileError when this release cannot use it.
    """

    def open_log(deliver: Callable[[Commit], object]) -> EventLog | ReadOnlyLog:
        return ReadOnlyLog(path) if read_only else EventLog(path, clock, deliver)

    cluster = Cluster(open_log, clock, bounds or Bounds())
    try:
        yield cluster
    finally:
        cluster.stop_streams()
        await asyncio.to_thread(cluster.log.close)


@asynccontextmanager
async def opened(path: Path, clock: Clock, bounds: Bounds | None = None) -> AsyncIterator[Cluster]:
    """The same, replayed."""
    async with attached(path, clock, bounds) as cluster:
        await cluster.replay()
        yield cluster


def _silence(node_id: str, what: state_pb2.Liveness.ValueType) -> event_pb2.Fact:
    if what == state_pb2.LIVENESS_LOST:
        return event_pb2.Fact(node_lost=event_pb2.NodeLost(node_id=node_id))
    return event_pb2.Fact(node_suspected=event_pb2.NodeSuspected(node_id=node_id))
