"""What runners are told to run, what they say of it, and what becomes of those that say nothing.

Rules this module lives by:
- A runner is acknowledged only what is durable, and told only what is in the state.
- One boot of a node's runner at a time. Another one is refused while the first is heard; the same one again
  takes its own place over.
- Work given to a runner is taken up and kept within bounds, or it has FAILED by the master's own word.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any, Final, NamedTuple

import structlog

from services.clock import Clock, SystemClock
from services.master import dispatch, errors
from services.master.cluster import Cluster
from services.master.liveness import DEFAULT_RUNNER_BOUNDS, RunnerBounds
from services.master.runner_session import RunnerSession
from services.master.servicers.errors import translated
from services.master.soundness import unsound
from services.master.subscription import Subscription
from ullage.v1 import (
    dispatch_service_pb2,
    dispatch_service_pb2_grpc,
    event_pb2,
    node_pb2,
    state_pb2,
    telemetry_service_pb2,
)

HELLO_SECONDS: Final = 10.0
"""For a runner that connected to say who it is."""

SESSION_SILENT_SECONDS: Final = 10.0
"""A runner speaks every second. One that has not for so long is not there, whatever its connection looks like."""

RUNNER_GONE_SECONDS: Final = 4.0
"""Without a session that the runner itself, or its machine, has ended: one that lives dials again within two."""

CONNECTIVITY_SECONDS: Final = 10.0
"""For all runners to have dialled all others; each dial has its own, shorter bound."""

LINKS_PERIOD_SECONDS: Final = 3600.0
"""Between two measurements of the same links: what a network can do changes rarely."""

WATCH_PERIOD_SECONDS: Final = 0.5

HELLO_SEQUENCE: Final = 1
"""The source_sequence of the announcement a boot's hello stands for."""

_REPORTED_KINDS: Final = frozenset(
    {"runner_announced", "shard_status_changed", "link_measured", "generation_started", "generation_finished"}
)
_ASSIGNING_KINDS: Final = ("instance_placed", "instance_released", "shard_status_changed", "runner_announced")
"""Facts that can change what some runner shall run."""

log = structlog.get_logger()


class _Absence(NamedTuple):
    """A runner without a session."""

    since: float
    lost_at: float
    """When its shards have failed, both by the monotonic clock."""


class DispatchServicer(dispatch_service_pb2_grpc.DispatchServiceServicer):
    """DispatchService over the one cluster. `run` has to be running beside it."""

    def __init__(
        self, cluster: Cluster, bounds: RunnerBounds = DEFAULT_RUNNER_BOUNDS, *, clock: Clock | None = None
    ) -> None:
        self._cluster = cluster
        self._bounds = bounds
        self._clock = clock or SystemClock()
        self._sessions: dict[str, RunnerSession] = {}
        self._absent: dict[str, _Absence] = {}
        self._untaken_since: dict[dispatch.Key, float] = {}
        self._started_at = self._clock.monotonic()

    async def Session(
        self, request_iterator: AsyncIterator[dispatch_service_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[dispatch_service_pb2.SessionResponse]:
        with translated():
            profile = await _hello(request_iterator)
            session = self._open(profile)
            reader = asyncio.create_task(self._read(session, request_iterator))
            try:
                await self._announce(session, profile)
                async for response in session.responses():
                    yield response
            finally:
                reader.cancel()
                self._close(session)

    def _open(self, profile: node_pb2.RunnerProfile) -> RunnerSession:
        """A session for this boot of the node's runner, in place of one that is over."""
        now = self._clock.monotonic()
        other = self._sessions.get(profile.node_id)
        if other is not None:
            if other.boot_id != profile.boot_id and now - other.heard_at < SESSION_SILENT_SECONDS:
                raise errors.NodeAlreadyLive(profile.node_id, other.boot_id)
            other.end(errors.Unavailable("the runner has dialled again"))
        session = RunnerSession(profile.node_id, profile.boot_id, self._cluster, now)
        self._sessions[profile.node_id] = session
        self._absent.pop(profile.node_id, None)
        self._cluster.hear_runner(profile.node_id)
        log.info("runner connected", node=profile.node_id, boot=profile.boot_id, address=profile.address)
        return session

    def _close(self, session: RunnerSession) -> None:
        if self._sessions.get(session.node_id) is session:
            del self._sessions[session.node_id]
            self._absent[session.node_id] = self._absence(session)
            self._cluster.miss_runner(session.node_id)
            log.info("runner disconnected", node=session.node_id, boot=session.boot_id)

    def _absence(self, session: RunnerSession) -> _Absence:
        """How long the runner is waited for.

        A closed connection says that a process is gone, and so does silence beside a probe that speaks; silence alone
        only that nothing is heard, for whatever reason.
        """
        now = self._clock.monotonic()
        if self._is_stalled(session):
            return _Absence(session.heard_at, now)
        if now - session.heard_at >= SESSION_SILENT_SECONDS:
            return _Absence(session.heard_at, session.heard_at + self._bounds.lost_after_seconds)
        return _Absence(session.heard_at, now + RUNNER_GONE_SECONDS)

    async def _announce(self, session: RunnerSession, profile: node_pb2.RunnerProfile) -> None:
        """Record who the runner is before it is told anything: a new boot has none of the shards of the last one."""
        fact = event_pb2.Fact(runner_announced=event_pb2.RunnerAnnounced(profile=profile))
        if self._cluster.acknowledged(session.source) < HELLO_SEQUENCE:
            hello = telemetry_service_pb2.Observation(source_sequence=HELLO_SEQUENCE, fact=fact)
            await self._cluster.record(session.source, [hello])
            self._dial_all(session)
            return
        node = self._cluster.state.nodes.get(profile.node_id)
        if node is None or node.runner != profile:
            await self._cluster.append(fact)

    def _dial_all(self, newcomer: RunnerSession) -> None:
        """Have the newcomer and everybody else dial each other, before anything is placed there."""
        for node_id, other in self._sessions.items():
            if node_id != newcomer.node_id:
                other.dial(self._peers([newcomer.node_id]))
        newcomer.dial(self._peers(self._sessions.keys() - {newcomer.node_id}))

    def _dial_again(self) -> None:
        """Have the runner that measured its links longest ago do so again, if that was long ago: one at each look."""
        now = self._clock.monotonic()
        session = min(self._sessions.values(), key=lambda each: each.dialled_at, default=None)
        if session is not None and now - session.dialled_at >= LINKS_PERIOD_SECONDS:
            session.dialled_at = now
            session.dial(self._peers(self._sessions.keys() - {session.node_id}))

    def _peers(self, node_ids: Collection[str]) -> list[dispatch_service_pb2.Peer]:
        return [
            dispatch_service_pb2.Peer(node_id=node_id, address=node.runner.address)
            for node_id in sorted(node_ids)
            if (node := self._cluster.state.nodes.get(node_id)) is not None and node.runner is not None
        ]

    async def _read(self, session: RunnerSession, requests: AsyncIterator[dispatch_service_pb2.SessionRequest]) -> None:
        """Take what the runner says until it hangs up; whatever is wrong with it ends the session."""
        try:
            async for request in requests:
                session.heard_at = self._clock.monotonic()
                self._cluster.hear_runner(session.node_id)
                await self._take(session, request)
            session.end()
        except errors.MasterError as error:
            session.end(error)
        except Exception as error:
            log.error("a runner's report could not be taken", node=session.node_id, exc_info=error)
            session.end(errors.Unavailable("the report could not be taken; the master's log has the reason in full"))

    async def _take(self, session: RunnerSession, request: dispatch_service_pb2.SessionRequest) -> None:
        if request.WhichOneof("message") != "report":
            raise errors.InvalidRequest("a session has one hello, and reports after it")
        observations = request.report.observations
        for observation in observations:
            _check(observation, session.node_id)
        if observations:
            await self._cluster.record(session.source, observations)
        session.acknowledge()

    async def CheckConnectivity(
        self, request: dispatch_service_pb2.CheckConnectivityRequest, context: Any
    ) -> dispatch_service_pb2.CheckConnectivityResponse:
        with translated():
            nodes = self._cluster.state.nodes
            for node_id in request.node_ids:
                if node_id not in nodes:
                    raise errors.UnknownNode(node_id)
            chosen = request.node_ids or [id_ for id_, node in nodes.items() if node.runner is not None]
            links = await self._measure(sorted(set(chosen)))
        return dispatch_service_pb2.CheckConnectivityResponse(links=links)

    async def _measure(self, node_ids: Sequence[str]) -> list[node_pb2.Link]:
        """Every one-way path between these, as measured now; where nothing was, a link that says why."""
        pairs = [(from_, to) for from_ in node_ids for to in node_ids if from_ != to]
        asked = {pair for pair in pairs if pair[0] in self._sessions}
        measured: dict[tuple[str, str], node_pb2.Link] = {}
        async with self._cluster.subscribe(["link_measured"]) as subscription:
            for from_ in sorted({pair[0] for pair in asked} & self._sessions.keys()):
                self._sessions[from_].dial(self._peers(set(node_ids) - {from_}))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECTIVITY_SECONDS):
                    while asked - measured.keys():
                        for event in await anext(subscription):
                            link = event.fact.link_measured.link
                            measured[link.from_node_id, link.to_node_id] = link
        return [measured.get(pair) or self._unmeasured(*pair) for pair in pairs]

    def _unmeasured(self, from_node_id: str, to_node_id: str) -> node_pb2.Link:
        connected = from_node_id in self._sessions
        failure = (
            f"no word from its runner within {CONNECTIVITY_SECONDS:g} s"
            if connected
            else "its runner is not connected to the master: start it with `ullage node` or `ullage runner`"
        )
        address = "".join(peer.address for peer in self._peers([to_node_id]))
        return node_pb2.Link(from_node_id=from_node_id, to_node_id=to_node_id, to_address=address, failure=failure)

    async def run(self) -> None:
        """Tell runners what changes, and give up what they do not do, until the master stops."""
        self._started_at = self._clock.monotonic()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch())
            while not self._cluster.stopping.is_set():
                async with self._cluster.subscribe(_ASSIGNING_KINDS) as changes:
                    await self._follow(changes)
            watching.cancel()
        for session in self._sessions.values():
            session.end(errors.Unavailable("the master is stopping"))

    async def _follow(self, changes: Subscription) -> None:
        """Wake the sessions at each change, until the subscription ends."""
        self._wake_all()
        with contextlib.suppress(errors.SubscriberTooSlow, errors.Unavailable):
            async for _ in changes:
                self._wake_all()

    def _wake_all(self) -> None:
        for session in self._sessions.values():
            session.wake()

    async def _watch(self) -> None:
        while True:
            await self._clock.sleep(WATCH_PERIOD_SECONDS)
            self._end_silent_sessions()
            self._dial_again()
            facts = [*self._lost(), *self._not_taken_up()]
            if facts:
                await self._give_up(facts)

    async def _give_up(self, facts: Sequence[event_pb2.Fact]) -> None:
        try:
            await self._cluster.append(*facts)
        except errors.MasterError as error:
            log.error("lost shards not recorded, tried again", shards=len(facts), error=str(error))

    def _is_stalled(self, session: RunnerSession) -> bool:
        silent_seconds = self._clock.monotonic() - session.heard_at
        is_node_live = self._cluster.liveness(session.node_id) == state_pb2.LIVENESS_LIVE
        return silent_seconds >= self._bounds.stalled_after_seconds and is_node_live

    def _end_silent_sessions(self) -> None:
        now = self._clock.monotonic()
        for session in self._sessions.values():
            if self._is_stalled(session):
                session.end(errors.Unavailable("nothing is heard of this runner, and its node's probe is: dial again"))
            elif now - session.heard_at >= SESSION_SILENT_SECONDS:
                session.end(errors.Unavailable(f"nothing was heard for {SESSION_SILENT_SECONDS:g} s: dial again"))

    def _lost(self) -> list[event_pb2.Fact]:
        """What fails the shards of runners that have been without a session for too long."""
        now = self._clock.monotonic()
        facts: list[event_pb2.Fact] = []
        unheard = _Absence(self._started_at, self._started_at + self._bounds.lost_after_seconds)
        for node_id, node in self._cluster.state.nodes.items():
            absence = self._absent.get(node_id, unheard)
            if node.shards and node_id not in self._sessions and now >= absence.lost_at:
                message = f"its runner has not been heard for {now - absence.since:.0f} s"
                facts += dispatch.given_up(self._cluster.state, node_id, node.shards.keys(), message)
        return facts

    def _not_taken_up(self) -> list[event_pb2.Fact]:
        """What fails the shards that connected runners have been told of and do not take up."""
        now = self._clock.monotonic()
        untaken = {
            node_id: dispatch.untaken(self._cluster.state, node_id)
            for node_id in self._sessions
            if node_id in self._cluster.state.nodes
        }
        waiting = {key for keys in untaken.values() for key in keys}
        self._untaken_since = {key: self._untaken_since.get(key, now) for key in waiting}
        bound = self._bounds.take_up_seconds
        message = f"its runner is connected and did not take it up for {bound:g} s: start the runner again"
        facts: list[event_pb2.Fact] = []
        for node_id, keys in sorted(untaken.items()):
            late = {key for key in keys if now - self._untaken_since[key] >= bound}
            facts += dispatch.given_up(self._cluster.state, node_id, late, message)
        return facts


async def _hello(requests: AsyncIterator[dispatch_service_pb2.SessionRequest]) -> node_pb2.RunnerProfile:
    """Who it is that connected."""
    try:
        async with asyncio.timeout(HELLO_SECONDS):
            request = await anext(aiter(requests))
    except (TimeoutError, StopAsyncIteration):
        raise errors.InvalidRequest("a session begins with a hello") from None
    profile = request.hello.profile
    if not profile.node_id or not profile.boot_id or not profile.address:
        raise errors.InvalidRequest("a session begins with a hello that has node_id, boot_id and address")
    if wrong := unsound(profile):
        raise errors.InvalidRequest(f"profile.{wrong}")
    return profile


def _check(observation: telemetry_service_pb2.Observation, node_id: str) -> None:
    """Raise InvalidRequest for a fact that this runner may not report."""
    kind = observation.fact.WhichOneof("fact")
    if kind not in _REPORTED_KINDS:
        raise errors.InvalidRequest(f"a runner does not report {kind}")
    if observation.source_sequence <= HELLO_SEQUENCE:
        raise errors.InvalidRequest(f"a runner's facts are numbered from {HELLO_SEQUENCE + 1}: its hello is the first")
    said = _said_of(observation.fact)
    if said is not None and said != node_id:
        raise errors.InvalidRequest(f"the runner of node {node_id} reports {kind} of node {said}")
    if wrong := unsound(observation.fact):
        raise errors.InvalidRequest(f"observation {observation.source_sequence}: {wrong}")


def _said_of(fact: event_pb2.Fact) -> str | None:
    """The node a runner's fact is about, or None for a generation, which is an instance's."""
    match fact.WhichOneof("fact"):
        case "runner_announced":
            return fact.runner_announced.profile.node_id
        case "shard_status_changed":
            return fact.shard_status_changed.status.node_id
        case "link_measured":
            return fact.link_measured.link.from_node_id
        case _:
            return None
