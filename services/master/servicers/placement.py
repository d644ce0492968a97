"""How clients put models on nodes and take them off.

Rules this module lives by:
- A decision is made and committed while `cluster.placing` is held: no two decisions ever see the same bytes.
- It is made beside the event loop, on a survey that stands still. It is committed only if it stands
  on the nodes as they are by then; else it is made again, in the end on the loop, where nothing changes meanwhile.
- A client that goes away in between changes nothing of that: what was begun under the lock ends under it.
- Nothing is dispatched, and nothing reserved, but by the fact that records the decision.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from bisect import bisect_left
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final, TypeVar

import structlog

from services.master import errors, view
from services.master.allocator import RULES_VERSION, Complaint, Request, Roster, Survey, decide, stands, understand
from services.master.cluster import Cluster
from services.master.servicers import pages
from services.master.servicers.errors import translated
from services.master.servicers.refusal_excerpt import excerpt
from services.master.state import InstanceRecord, State
from ullage.v1 import event_pb2, model_pb2, placement_service_pb2, placement_service_pb2_grpc

_INSTANCE_KINDS: Final = ("shard_status_changed", "instance_placed", "instance_released", "runner_announced")
"""The facts that can change an instance."""

_OVER: Final = frozenset({model_pb2.INSTANCE_STATE_RELEASED, model_pb2.INSTANCE_STATE_FAILED})

ALTERNATIVES_PREVIEWED_MAX: Final = 24
"""How many ways a preview shows beside the best; a decision that is recorded keeps fewer."""

DECISIONS_BESIDE_LOOP_MAX: Final = 2
"""How often a decision is made beside the loop before it is made on it."""

NODES_AT_ONCE: Final = 1000
"""Of how many nodes it is taken over at once what they have said: some milliseconds of the loop."""

PIECES_MAX: Final = 64
"""After so many pieces the rest is taken over at once: nodes speak faster than they are listened to."""

_SLUG_LENGTH_MAX: Final = 24

T = TypeVar("T")

log = structlog.get_logger()


class PlacementServicer(placement_service_pb2_grpc.PlacementServiceServicer):
    """PlacementService over the one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._roster = Roster(cluster.state)
        self._under_way: set[asyncio.Task[Any]] = set()

    async def Place(
        self, request: placement_service_pb2.PlaceRequest, context: Any
    ) -> placement_service_pb2.PlaceResponse:
        with translated():
            if request.validate_only:
                return placement_service_pb2.PlaceResponse(instance=await self._validated(request.spec))
            return placement_service_pb2.PlaceResponse(instance=await self._to_its_end(self._placed(request.spec)))

    async def PreviewPlacement(
        self, request: placement_service_pb2.PreviewPlacementRequest, context: Any
    ) -> placement_service_pb2.PreviewPlacementResponse:
        with translated():
            asked, survey, silent = await self._asked(request.spec)
            outcome = await asyncio.to_thread(
                decide, survey, asked, request.spec, silent, runners_up=ALTERNATIVES_PREVIEWED_MAX
            )
            if isinstance(outcome, model_pb2.Refusal):
                return placement_service_pb2.PreviewPlacementResponse(refusal=outcome)
            return placement_service_pb2.PreviewPlacementResponse(placement=outcome)

    async def Release(
        self, request: placement_service_pb2.ReleaseRequest, context: Any
    ) -> placement_service_pb2.ReleaseResponse:
        with translated():
            return placement_service_pb2.ReleaseResponse(instance=await self._to_its_end(self._released(request)))

    async def GetInstance(
        self, request: placement_service_pb2.GetInstanceRequest, context: Any
    ) -> placement_service_pb2.GetInstanceResponse:
        with translated():
            record = self._record(request.instance_id)
            return placement_service_pb2.GetInstanceResponse(instance=view.instance(record))

    async def ListInstances(
        self, request: placement_service_pb2.ListInstancesRequest, context: Any
    ) -> placement_service_pb2.ListInstancesResponse:
        with translated():
            size = pages.page_size(request.page_size)
            records = _records(self._cluster.state, released=request.include_released)
            start = bisect_left(records, _sequence(request.page_token), key=lambda each: each.placed_at_sequence)
            following = records[start + size : start + size + 1]
            return placement_service_pb2.ListInstancesResponse(
                instances=[view.instance(record) for record in records[start : start + size]],
                next_page_token=pages.page_token(str(following[0].placed_at_sequence)) if following else "",
            )

    async def WatchInstance(
        self, request: placement_service_pb2.WatchInstanceRequest, context: Any
    ) -> AsyncIterator[placement_service_pb2.WatchInstanceResponse]:
        with translated():
            record = self._record(request.instance_id)
            async with self._cluster.subscribe(_INSTANCE_KINDS) as subscription:
                shown = view.instance(record)
                yield placement_service_pb2.WatchInstanceResponse(instance=shown)
                while shown.state not in _OVER:
                    await anext(subscription)
                    now = view.instance(record)
                    if now != shown:
                        shown = now
                        yield placement_service_pb2.WatchInstanceResponse(instance=shown)

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns; it goes on to its end even when the call is cancelled meanwhile."""
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # Asked for, so that it is not reported as lost where the caller has gone.

    async def _validated(self, spec: model_pb2.PlacementSpec) -> model_pb2.Instance:
        """The instance as it would be placed now; nothing is recorded."""
        self._check_files(spec)
        outcome, _ = await self._decided(spec)
        if isinstance(outcome, model_pb2.Refusal):
            raise errors.Refused(excerpt(outcome))
        return model_pb2.Instance(spec=spec, placement=outcome, model=self._cluster.state.models[spec.model_id])

    async def _placed(self, spec: model_pb2.PlacementSpec) -> model_pb2.Instance:
        async with self._cluster.placing:
            earlier = self._answered_before(spec)
            if earlier is not None:
                return view.instance(earlier)
            self._check_files(spec)
            outcome, silent = await self._decided(spec)
            if isinstance(outcome, model_pb2.Refusal):
                await self._cluster.append(_refused(spec, outcome, silent))
                log.info("placement refused", model=spec.model_id, reason=_reason(outcome))
                raise errors.Refused(excerpt(outcome))
            instance_id = _new_instance_id(spec.model_id)
            await self._cluster.append(*self._replaced(spec, instance_id), _placed(instance_id, spec, outcome, silent))
            log.info("placed", instance=instance_id, model=spec.model_id, nodes=len(outcome.shards), forced=spec.force)
            return view.instance(self._cluster.state.instances[instance_id])

    def _check_files(self, spec: model_pb2.PlacementSpec) -> None:
        """Raise NotNow for a model of which no file is known: it can be previewed, and not run."""
        model = self._cluster.state.models.get(spec.model_id)
        if model is not None and model.computed_from_config:
            raise errors.NotNow(
                f"what {model.model_id} weighs was computed from its config.json: run `ullage models add` with its "
                "files first; until then only a preview can be had"
            )

    async def _caught_up(self) -> Roster:
        """The nodes in columns, nearly as they are now: the loop does other things between a piece and the next."""
        # A replay that begins at a checkpoint puts another state in the place of the empty one.
        if self._roster.state is not self._cluster.state:
            self._roster = Roster(self._cluster.state)
        for _ in range(PIECES_MAX):
            if self._roster.catch_up(NODES_AT_ONCE):
                break
            await asyncio.sleep(0)
        return self._roster

    def _answered_before(self, spec: model_pb2.PlacementSpec) -> InstanceRecord | None:
        """The instance the same request got before. Raises RequestIdReused when that was another request."""
        instance_id = self._cluster.state.requests.get(spec.request_id) if spec.request_id else None
        if instance_id is None:
            return None
        record = self._cluster.state.instances[instance_id]
        if record.spec != spec:
            raise errors.RequestIdReused(spec.request_id, instance_id)
        return record

    async def _decided(
        self, spec: model_pb2.PlacementSpec
    ) -> tuple[model_pb2.Placement | model_pb2.Refusal, frozenset[str]]:
        """The allocator's answer, with the silent nodes it was made with.

        Raises UnknownModel and UnknownInstance for names that are not there.
        """
        for _ in range(DECISIONS_BESIDE_LOOP_MAX):
            request, survey, silent = await self._asked(spec)
            outcome = await asyncio.to_thread(decide, survey, request, spec, silent)
            if isinstance(outcome, model_pb2.Refusal) or isinstance(request, Complaint):
                return outcome, silent
            if stands(outcome, survey, self._cluster.state, request, self._cluster.is_silent):
                return outcome, silent
            log.info("decided again: nodes changed meanwhile", model=spec.model_id, sequence=survey.sequence)
        request, survey, silent = await self._asked(spec)
        return decide(survey, request, spec, silent), silent

    async def _asked(self, spec: model_pb2.PlacementSpec) -> tuple[Request | Complaint, Survey, frozenset[str]]:
        """What is asked, the nodes as they are, and which of them are silent."""
        roster = await self._caught_up()
        # From here on nothing is awaited: what is there now is there when it is decided on.
        if spec.model_id not in self._cluster.state.models:
            raise errors.UnknownModel(spec.model_id)
        if spec.replace_instance_id:
            self._record(spec.replace_instance_id)
        request = understand(self._cluster.state, spec)
        return request, roster.survey(spec.model_id), self._cluster.silent_node_ids()

    def _replaced(self, spec: model_pb2.PlacementSpec, instance_id: str) -> list[event_pb2.Fact]:
        """The release of the instance that this one takes the place of, if it is still wanted."""
        if not spec.replace_instance_id or self._record(spec.replace_instance_id).released:
            return []
        reason = f"replaced by {instance_id}"
        return [_release(spec.replace_instance_id, reason, spec.requested_by)]

    async def _released(self, request: placement_service_pb2.ReleaseRequest) -> model_pb2.Instance:
        async with self._cluster.placing:
            record = self._record(request.instance_id)
            if not record.released:
                await self._cluster.append(_release(request.instance_id, request.reason, request.requested_by))
                log.info("released", instance=request.instance_id, reason=request.reason)
            return view.instance(record)

    def _record(self, instance_id: str) -> InstanceRecord:
        record = self._cluster.state.instances.get(instance_id)
        if record is None:
            raise errors.UnknownInstance(instance_id)
        return record


def _new_instance_id(model_id: str) -> str:
    """A name for an instance that people can type: its model's, and enough chance to be unique."""
    slug = re.sub(r"[^a-z0-9]+", "-", model_id.lower()).strip("-")[:_SLUG_LENGTH_MAX].strip("-")
    return f"{slug or 'model'}-{uuid.uuid4().hex[:6]}"


def _records(state: State, *, released: bool) -> list[InstanceRecord]:
    """The instances in the order in which they were placed."""
    return [record for record in state.instances.values() if released or not record.released]


def _sequence(page_token: str) -> int:
    """The sequence a page begins at. Raises InvalidRequest for a token of another list."""
    position = pages.position(page_token)
    if position and not position.isdecimal():
        raise errors.InvalidRequest("page_token was given out by another list: leave it empty for the first page")
    return int(position or 0)


def _placed(
    instance_id: str, spec: model_pb2.PlacementSpec, placement: model_pb2.Placement, silent_node_ids: frozenset[str]
) -> event_pb2.Fact:
    return event_pb2.Fact(
        instance_placed=event_pb2.InstancePlaced(
            instance_id=instance_id,
            spec=spec,
            placement=placement,
            silent_node_ids=sorted(silent_node_ids),
            rules_version=RULES_VERSION,
        )
    )


def _refused(
    spec: model_pb2.PlacementSpec, refusal: model_pb2.Refusal, silent_node_ids: frozenset[str]
) -> event_pb2.Fact:
    return event_pb2.Fact(
        placement_refused=event_pb2.PlacementRefused(
            spec=spec, refusal=refusal, silent_node_ids=sorted(silent_node_ids), rules_version=RULES_VERSION
        )
    )


def _release(instance_id: str, reason: str, requested_by: str) -> event_pb2.Fact:
    return event_pb2.Fact(
        instance_released=event_pb2.InstanceReleased(instance_id=instance_id, reason=reason, requested_by=requested_by)
    )


def _reason(refusal: model_pb2.Refusal) -> str:
    return model_pb2.RefusalReason.Name(refusal.reason).removeprefix("REFUSAL_REASON_")
