"""A master and a runner of canned answers, for a real gRPC server to serve, and the messages they answer with."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_status import rpc_status

from services import rpc
from ullage.v1 import (
    event_pb2,
    event_service_pb2,
    event_service_pb2_grpc,
    model_pb2,
    node_pb2,
    placement_service_pb2,
    placement_service_pb2_grpc,
    runner_service_pb2,
    runner_service_pb2_grpc,
    state_pb2,
)


@dataclass
class CannedMaster(event_service_pb2_grpc.EventServiceServicer, placement_service_pb2_grpc.PlacementServiceServicer):
    """Answers with what a test gave it, and keeps what it was asked."""

    state: state_pb2.ClusterState = field(default_factory=state_pb2.ClusterState)
    events: list[event_pb2.RecordedEvent] = field(default_factory=list)
    instance: model_pb2.Instance = field(default_factory=model_pb2.Instance)
    changes: list[model_pb2.Instance] = field(default_factory=list)
    refusal: model_pb2.Refusal | None = None
    error: rpc.RpcError | None = None
    explanation: event_service_pb2.ExplainPlacementResponse = field(
        default_factory=event_service_pb2.ExplainPlacementResponse
    )
    whatifs: list[event_service_pb2.WhatIfRequest] = field(default_factory=list)
    specs: list[model_pb2.PlacementSpec] = field(default_factory=list)
    listings: list[event_service_pb2.ListEventsRequest] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    def _fail(self, context: grpc.ServicerContext) -> None:
        if self.error is not None:
            context.abort_with_status(rpc_status.to_status(self.error.to_status()))

    def GetState(
        self, request: event_service_pb2.GetStateRequest, context: grpc.ServicerContext
    ) -> event_service_pb2.GetStateResponse:
        self._fail(context)
        return event_service_pb2.GetStateResponse(state=self.state, state_hash="abc", head_sequence=7)

    def ListEvents(
        self, request: event_service_pb2.ListEventsRequest, context: grpc.ServicerContext
    ) -> event_service_pb2.ListEventsResponse:
        self.listings.append(request)
        page = [event for event in self.events if event.sequence >= request.from_sequence]
        ordered = sorted(page, key=lambda event: event.sequence, reverse=request.descending)
        start = int(request.page_token or 0)
        end = start + request.page_size
        token = str(end) if end < len(ordered) else ""
        return event_service_pb2.ListEventsResponse(events=ordered[start:end], next_page_token=token)

    def ExplainPlacement(
        self, request: event_service_pb2.ExplainPlacementRequest, context: grpc.ServicerContext
    ) -> event_service_pb2.ExplainPlacementResponse:
        return self.explanation

    def WhatIf(
        self, request: event_service_pb2.WhatIfRequest, context: grpc.ServicerContext
    ) -> event_service_pb2.WhatIfResponse:
        self.whatifs.append(request)
        return event_service_pb2.WhatIfResponse(placement=self.instance.placement, at_sequence=request.at_sequence)

    def Follow(
        self, request: event_service_pb2.FollowRequest, context: grpc.ServicerContext
    ) -> Iterator[event_service_pb2.FollowResponse]:
        yield event_service_pb2.FollowResponse(events=self.events)

    def Place(
        self, request: placement_service_pb2.PlaceRequest, context: grpc.ServicerContext
    ) -> placement_service_pb2.PlaceResponse:
        self.specs.append(request.spec)
        self._fail(context)
        return placement_service_pb2.PlaceResponse(instance=self.instance)

    def PreviewPlacement(
        self, request: placement_service_pb2.PreviewPlacementRequest, context: grpc.ServicerContext
    ) -> placement_service_pb2.PreviewPlacementResponse:
        self.specs.append(request.spec)
        if self.refusal is not None:
            return placement_service_pb2.PreviewPlacementResponse(refusal=self.refusal)
        return placement_service_pb2.PreviewPlacementResponse(placement=self.instance.placement)

    def WatchInstance(
        self, request: placement_service_pb2.WatchInstanceRequest, context: grpc.ServicerContext
    ) -> Iterator[placement_service_pb2.WatchInstanceResponse]:
        for change in self.changes:
            yield placement_service_pb2.WatchInstanceResponse(instance=change)

    def Release(
        self, request: placement_service_pb2.ReleaseRequest, context: grpc.ServicerContext
    ) -> placement_service_pb2.ReleaseResponse:
        self.released.append(request.instance_id)
        return placement_service_pb2.ReleaseResponse(
            instance=model_pb2.Instance(instance_id=request.instance_id, state=model_pb2.INSTANCE_STATE_RELEASING)
        )


@dataclass
class CannedRunner(runner_service_pb2_grpc.RunnerServiceServicer):
    """Answers every prompt with the same words, and keeps what it was asked; a stopped one then falls silent."""

    responses: Sequence[runner_service_pb2.GenerateResponse] = ()
    requests: list[runner_service_pb2.GenerateRequest] = field(default_factory=list)
    is_stopped: bool = False

    def Generate(
        self, request: runner_service_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[runner_service_pb2.GenerateResponse]:
        self.requests.append(request)
        yield from self.responses
        if self.is_stopped:
            gone = threading.Event()
            context.add_callback(gone.set)
            gone.wait()


def node(node_id: str, name: str = "", *, runner: str = "127.0.0.1:1") -> state_pb2.NodeView:
    """A live node under no pressure with 512 MiB to give."""
    return state_pb2.NodeView(
        identity=node_pb2.NodeIdentity(node_id=node_id, friendly_name=name or None),
        memory=node_pb2.MemorySample(
            balanced_available_bytes=512 * 2**20, pressure_level=node_pb2.PRESSURE_LEVEL_NORMAL
        ),
        runner=node_pb2.RunnerProfile(node_id=node_id, address=runner),
        liveness=state_pb2.LIVENESS_LIVE,
    )


def instance(
    instance_id: str,
    state: model_pb2.InstanceState.ValueType,
    phase: model_pb2.ShardPhase.ValueType,
    *,
    node_ids: Sequence[str] = ("aaaa-1", "bbbb-2"),
) -> model_pb2.Instance:
    """An instance of "m" with ten layers on each of `node_ids`."""
    shards = [
        model_pb2.Shard(
            rank=rank,
            node_id=node_id,
            first_layer=rank * 10,
            end_layer=rank * 10 + 10,
            bytes=model_pb2.ShardBytes(layers_bytes=100 * 2**20, kv_bytes=2**20, total_bytes=101 * 2**20),
        )
        for rank, node_id in enumerate(node_ids)
    ]
    budgets = [
        model_pb2.NodeBudget(
            node_id=node_id,
            friendly_name=f"node-{rank + 1}",
            pressure_level=node_pb2.PRESSURE_LEVEL_WARNING,
            pressure_factor=0.6,
        )
        for rank, node_id in enumerate(node_ids)
    ]
    return model_pb2.Instance(
        instance_id=instance_id,
        spec=model_pb2.PlacementSpec(model_id="m"),
        model=model_pb2.Model(model_id="m"),
        placement=model_pb2.Placement(shards=shards, nodes=budgets, context_tokens=1024, concurrent_sequences=1),
        state=state,
        shards=[
            model_pb2.ShardStatus(instance_id=instance_id, rank=rank, node_id=node_id, phase=phase)
            for rank, node_id in enumerate(node_ids)
        ],
    )
