"""How clients read the log and the state at any point of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final, TypeAlias

import grpc
from google.protobuf import message_factory, timestamp_pb2

from services import log_format
from services.master import errors, view
from services.master.allocator import RULES_VERSION, place
from services.master.cluster import Cluster
from services.master.event_filter import EventFilter
from services.master.event_log import FACT_BYTES_MAX
from services.master.replay import state_at
from services.master.retention import SAMPLE_KINDS
from services.master.servicers import pages
from services.master.servicers.errors import translated
from services.master.soundness import is_time
from services.master.state import State
from services.master.subscription import Happenings, Subscription
from ullage.v1 import event_pb2, event_service_pb2, model_pb2, state_pb2

BATCH_EVENTS_MAX: Final = 64
BATCH_LINGER_SECONDS: Final = 0.05
"""How long an event waits for others to go with it: a message costs as much as fifty events in it."""

PROGRESS_SECONDS: Final = 1.0
"""How often a reader whose filter lets nothing through is told how far it is."""

SCAN_EVENTS: Final = 1024
"""Rows read at a time, in one short transaction."""

LIST_SCANS_MAX: Final = 100
"""How often rows are read for one page of a list; a filter that lets little through gets short pages."""

INT64_MAX: Final = 2**63 - 1

REPLAYS_MAX: Final = 2
"""States rebuilt at once; more wait."""


Wire: TypeAlias = tuple[int, bytes]
"""An event's sequence, and its serialised RecordedEvent."""

Part: TypeAlias = tuple[int, bytes]
"""The sequence of the last of some events, and all of them as a FollowResponse has them."""


def add_to_server(servicer: EventServicer, server: grpc.aio.Server) -> None:
    """Serve EventService; what Follow sends goes out as it was made, once for all who read it."""
    service = event_service_pb2.DESCRIPTOR.services_by_name["EventService"]
    handlers = {
        method.name: grpc.unary_unary_rpc_method_handler(
            getattr(servicer, method.name),
            message_factory.GetMessageClass(method.input_type).FromString,
            message_factory.GetMessageClass(method.output_type).SerializeToString,
        )
        for method in service.methods
        if method.name != "Follow"
    }
    handlers["Follow"] = grpc.unary_stream_rpc_method_handler(
        servicer.follow, event_service_pb2.FollowRequest.FromString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


class EventServicer:
    """EventService over the one cluster; not of the generated class, since what it sends is serialised already."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._replays = asyncio.Semaphore(REPLAYS_MAX)

    async def follow(self, request: event_service_pb2.FollowRequest, context: Any) -> AsyncIterator[bytes]:
        """Follow; each response is serialised already."""
        with translated():
            chosen = EventFilter(request.filter)
            position = await self._start(request) - 1
            await self._refuse_compacted(request, position + 1, chosen)
            # The backlog of a subscription is bounded: it begins once the log is nearly read.
            while (there := self._cluster.state.sequence) - position > SCAN_EVENTS:
                async for response in self._stored(position, there, chosen):
                    yield response
                position = there
            async with self._cluster.subscribe(chosen.kinds or None) as subscription:
                there = self._cluster.state.sequence
                async for response in self._stored(position, there, chosen):
                    yield response
                position = max(position, there)
                yield self._progress(position, subscription)
                async for response in self._live(subscription, position, chosen):
                    yield response

    async def ListEvents(
        self, request: event_service_pb2.ListEventsRequest, context: Any
    ) -> event_service_pb2.ListEventsResponse:
        with translated():
            size = pages.page_size(request.page_size)
            chosen = EventFilter(request.filter)
            head = self._cluster.state.sequence
            first = max(1, request.from_sequence)
            last = min(head, request.to_sequence) if request.HasField("to_sequence") else head
            if request.page_token:
                resumed = _sequence(pages.position(request.page_token))
                first, last = (first, min(last, resumed)) if request.descending else (max(first, resumed), last)
            return await asyncio.to_thread(self._page, first, last, size, chosen, descending=request.descending)

    async def GetState(
        self, request: event_service_pb2.GetStateRequest, context: Any
    ) -> event_service_pb2.GetStateResponse:
        with translated():
            if request.HasField("at_sequence"):
                state = await self._state_at(request.at_sequence)
                shown = view.cluster_state(state)
            elif request.HasField("at_time"):
                at_ns = _nanoseconds(request.at_time, "at_time")
                last = await asyncio.to_thread(self._cluster.log.last_until, at_ns)
                state = await self._state_at(min(last, self._cluster.state.sequence))
                shown = view.cluster_state(state)
            else:
                state = self._cluster.state
                shown = view.cluster_state(state, None if self._cluster.read_only else self._cluster.liveness)
            return event_service_pb2.GetStateResponse(
                state=shown, state_hash=view.state_hash(state), head_sequence=self._cluster.state.sequence
            )

    async def ExplainPlacement(
        self, request: event_service_pb2.ExplainPlacementRequest, context: Any
    ) -> event_service_pb2.ExplainPlacementResponse:
        with translated():
            record = self._cluster.state.instances.get(request.instance_id)
            if record is None:
                raise errors.UnknownInstance(request.instance_id)
            before = await self._state_at(record.placement.decided_at_sequence)
            outcome = await asyncio.to_thread(place, before, record.spec, record.silent_node_ids)
            return event_service_pb2.ExplainPlacementResponse(
                spec=record.spec,
                recorded=record.placement,
                derived=outcome if isinstance(outcome, model_pb2.Placement) else None,
                equal=outcome == record.placement,
                recorded_rules_version=record.rules_version,
                derived_rules_version=RULES_VERSION,
            )

    async def WhatIf(self, request: event_service_pb2.WhatIfRequest, context: Any) -> event_service_pb2.WhatIfResponse:
        with translated():
            there = self._cluster.state.sequence
            at = request.at_sequence if request.HasField("at_sequence") else there
            # A state of its own, since nodes are thought away in it.
            state = await self._state_at(at)
            if request.spec.model_id not in state.models:
                raise errors.UnknownModel(request.spec.model_id)
            for node_id in set(request.without_node_ids):
                # Thinking away whoever is not there would answer as if that changed nothing.
                if state.nodes.pop(node_id, None) is None:
                    raise errors.UnknownNode(node_id)
            outcome = await asyncio.to_thread(place, state, request.spec, ())
            if isinstance(outcome, model_pb2.Refusal):
                return event_service_pb2.WhatIfResponse(refusal=outcome, at_sequence=at)
            return event_service_pb2.WhatIfResponse(placement=outcome, at_sequence=at)

    async def RemoveNode(
        self, request: event_service_pb2.RemoveNodeRequest, context: Any
    ) -> event_service_pb2.RemoveNodeResponse:
        with translated():
            # Nothing is placed on it between the look at the state and the commit.
            async with self._cluster.placing:
                self._refuse_needed(request.node_id)
                removed = event_pb2.NodeRemoved(node_id=request.node_id, requested_by=request.requested_by)
                await self._cluster.append(event_pb2.Fact(node_removed=removed))
            return event_service_pb2.RemoveNodeResponse()

    def _refuse_needed(self, node_id: str) -> None:
        node = self._cluster.state.nodes.get(node_id)
        if node is None:
            raise errors.UnknownNode(node_id)
        if node.shards:
            holders = ", ".join(sorted({instance_id for instance_id, _ in node.shards}))
            raise errors.NotNow(f"node {node_id} holds shards of {holders}: release them first with `ullage release`")
        if self._cluster.liveness(node_id) == state_pb2.LIVENESS_LIVE:
            raise errors.NotNow(f"node {node_id} is live and would be back at its next sample: stop its probe first")

    async def _state_at(self, sequence: int) -> State:
        """The state as it was at `sequence`, replayed. Raises OutOfRange beyond the end of the log."""
        head = self._cluster.state.sequence
        if sequence > head:
            raise errors.OutOfRange(f"there is no sequence {sequence} yet: the log ends at {head}")
        async with self._replays:
            return await asyncio.to_thread(state_at, self._cluster.log, sequence)

    async def _start(self, request: event_service_pb2.FollowRequest) -> int:
        """The first sequence a follower is to get, if it passes."""
        match request.WhichOneof("start"):
            case "from_sequence":
                return max(1, request.from_sequence)
            case "from_time":
                since_ns = _nanoseconds(request.from_time, "from_time")
                first = await asyncio.to_thread(self._cluster.log.first_since, since_ns)
                return first or self._cluster.state.sequence + 1
            case "from_now" | None:
                return self._cluster.state.sequence + 1

    async def _refuse_compacted(
        self, request: event_service_pb2.FollowRequest, first: int, chosen: EventFilter
    ) -> None:
        """Raise Compacted where samples that the reader asks for may be missing, and it has not said that it knows."""
        samples_wanted = not chosen.kind_numbers or not chosen.kind_numbers.isdisjoint(SAMPLE_KINDS)
        mark = await asyncio.to_thread(self._cluster.log.mark)
        if first <= mark and samples_wanted and not request.retained:
            raise errors.Compacted(mark + 1)

    async def _stored(self, after: int, last: int, chosen: EventFilter) -> AsyncIterator[bytes]:
        """Messages with the stored events above `after` and up to `last` that pass."""
        position = after
        while position < last:
            end = min(last, position + SCAN_EVENTS)
            events, position = await asyncio.to_thread(self._passing, position + 1, end, chosen)
            for response in _responses(_parts(events), position):
                yield response

    def _passing(
        self, first: int, last: int, chosen: EventFilter, *, descending: bool = False
    ) -> tuple[list[Wire], int]:
        """The stored events from `first` to `last` that pass, and how far was looked: large ones are not all read."""
        rows, reached = self._cluster.log.scan(first, last, kinds=chosen.kind_numbers, descending=descending)
        sequences, payloads = [row.sequence for row in rows], [row.payload for row in rows]
        log_format.check(sequences, [row.crc for row in rows], payloads)
        facts = log_format.facts(sequences, payloads)
        passing = [row for row, fact in zip(rows, facts, strict=True) if chosen.passes(fact)]
        return [(row.sequence, log_format.wire(row)) for row in passing], reached

    def _page(
        self, first: int, last: int, size: int, chosen: EventFilter, *, descending: bool
    ) -> event_service_pb2.ListEventsResponse:
        """One page of what lies from `first` to `last`, looking at a bounded number of rows, and of bytes."""
        events: list[Wire] = []
        size_bytes = 0
        for _ in range(LIST_SCANS_MAX):
            if first > last or len(events) > size or size_bytes > FACT_BYTES_MAX:
                break
            window = (max(first, last - SCAN_EVENTS + 1), last) if descending else (first, first + SCAN_EVENTS - 1)
            found, reached = self._passing(window[0], min(window[1], last), chosen, descending=descending)
            first, last = (first, reached - 1) if descending else (reached + 1, last)
            events += found
            size_bytes += sum(len(wire) for _, wire in found)
        token = ""
        fitting = next(_together(events, size), [])
        if len(events) > len(fitting):
            token = pages.page_token(str(events[len(fitting)][0]))
        elif first <= last:
            token = pages.page_token(str(last if descending else first))
        listed = [event_pb2.RecordedEvent.FromString(wire) for _, wire in fitting]
        return event_service_pb2.ListEventsResponse(events=listed, next_page_token=token)

    def _progress(self, position: int, subscription: Subscription) -> bytes:
        return _response(b"", position, caught_up=subscription.empty)

    async def _live(self, subscription: Subscription, position: int, chosen: EventFilter) -> AsyncIterator[bytes]:
        """What happens after `position`, as it happens."""
        while True:
            if not await subscription.arrived(PROGRESS_SECONDS):
                if self._cluster.state.sequence > position:
                    position = self._cluster.state.sequence
                    yield self._progress(position, subscription)
                continue
            arrived = await _gathered(subscription)
            if arrived[0].sequence <= position:
                arrived = Happenings(event for event in arrived if event.sequence > position)
            if not arrived:
                continue
            position = arrived[-1].sequence
            parts = arrived.once(chosen.key, lambda events: _parts(_passed(events, chosen)))
            for response in _responses(parts, position, subscription):
                yield response


def _passed(events: Happenings, chosen: EventFilter) -> list[Wire]:
    return [(event.sequence, event.wire) for event in events if chosen.passes(event.fact)]


async def _gathered(subscription: Subscription) -> Happenings:
    """What has happened, with what happens just after it. Raises as the subscription does."""
    events = await anext(subscription)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BATCH_LINGER_SECONDS
    while len(events) < BATCH_EVENTS_MAX and (left := deadline - loop.time()) > 0:
        if await subscription.arrived(left) and subscription.empty:
            break  # It has ended: what was gathered goes out first.
        if not subscription.empty:
            events = Happenings([*events, *await anext(subscription)])
    return events


def _parts(events: Sequence[Wire]) -> list[Part]:
    """Events in parts that go into a message each."""
    return [
        (together[-1][0], log_format.repeated([wire for _, wire in together]))
        for together in _together(events, BATCH_EVENTS_MAX)
    ]


def _responses(parts: Sequence[Part], position: int, subscription: Subscription | None = None) -> Iterator[bytes]:
    """Messages that carry the events, the last of which says that everything up to `position` was looked at.

    It says too that this is all there is, where the subscription they come from has no more by then.
    """
    for last, events in parts[:-1]:
        yield _response(events, last)
    events = parts[-1][1] if parts else b""
    yield _response(events, position, caught_up=subscription is not None and subscription.empty)


def _response(events: bytes, position: int, *, caught_up: bool = False) -> bytes:
    """A FollowResponse with events that are serialised already."""
    rest = event_service_pb2.FollowResponse(progress_sequence=position, caught_up=caught_up)
    return events + rest.SerializeToString()


def _together(events: Sequence[Wire], most: int) -> Iterator[list[Wire]]:
    """`events` in lists of at most so many, and of no more bytes than any client reads, but for one that is larger."""
    together: list[Wire] = []
    size = 0
    for event in events:
        if together and (len(together) == most or size + len(event[1]) > FACT_BYTES_MAX):
            yield together
            together, size = [], 0
        together.append(event)
        size += len(event[1])
    if together:
        yield together


def _nanoseconds(said: timestamp_pb2.Timestamp, field: str) -> int:
    """A moment as the log has it; one before or after all that it can hold is its first or its last."""
    if not is_time(said):
        raise errors.InvalidRequest(f"{field} is no moment from the year 1 to 9999")
    return max(0, min(said.ToNanoseconds(), INT64_MAX))


def _sequence(position: str) -> int:
    if not position.isdecimal():
        raise errors.InvalidRequest("page_token is of another list: leave it empty to begin at the first page")
    return int(position)
