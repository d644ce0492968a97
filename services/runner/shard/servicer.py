"""What a shard's process answers: to its runner, to clients, and to the rank before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Final

import grpc

from services.rpc import RpcError
from services.runner.shard.frames import rank_name
from services.runner.shard.links import RANK_LOST
from services.runner.shard.shard import Shard
from ullage.v1 import (
    dispatch_service_pb2,
    model_pb2,
    runner_service_pb2,
    runner_service_pb2_grpc,
    shard_service_pb2,
    shard_service_pb2_grpc,
)

PROGRESS_SECONDS: Final = 1.0
"""How often a shard that loads is heard of at least."""

_Context = grpc.aio.ServicerContext[object, object]


class ShardServicer(shard_service_pb2_grpc.ShardServiceServicer):
    """For the runner that started this process."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def Load(
        self, request: shard_service_pb2.LoadRequest, context: _Context
    ) -> AsyncIterator[shard_service_pb2.LoadResponse]:
        """See ShardService.Load."""
        _check_assignment(request.assignment, self._shard)
        with self._shard.life.watched() as watcher:
            self._shard.begin(request.assignment, Path(request.model_path))
            while True:
                try:
                    async with asyncio.timeout(PROGRESS_SECONDS):
                        await watcher.next()
                except TimeoutError:
                    # A large layer takes longer than that: still say that it is alive.
                    pass
                status = self._shard.life.status
                yield shard_service_pb2.LoadResponse(status=status)
                if status.phase in {model_pb2.SHARD_PHASE_RUNNING, model_pb2.SHARD_PHASE_FAILED}:
                    return

    async def Watch(
        self, request: shard_service_pb2.WatchRequest, context: _Context
    ) -> AsyncIterator[shard_service_pb2.WatchResponse]:
        """See ShardService.Watch."""
        with self._shard.life.watched() as watcher:
            while True:
                for response in await watcher.next():
                    yield response


class RunnerServicer(runner_service_pb2_grpc.RunnerServiceServicer):
    """For clients and for the rank before, through the runner."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def Generate(
        self, request: runner_service_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[runner_service_pb2.GenerateResponse]:
        """See RunnerService.Generate."""
        assignment = _assignment(self._shard)
        if request.instance_id != assignment.instance_id:
            raise RpcError(
                grpc.StatusCode.NOT_FOUND,
                f"instance {request.instance_id!r} is not here; this is {assignment.instance_id}",
                reason="UNKNOWN_INSTANCE",
            )
        _check_running(self._shard, assignment)
        async with aclosing(self._shard.generations().generate(request)) as responses:
            async for response in responses:
                yield response

    async def GetStatus(
        self, request: runner_service_pb2.GetStatusRequest, context: _Context
    ) -> runner_service_pb2.GetStatusResponse:
        """The one shard of this process; its runner answers for all of them."""
        return runner_service_pb2.GetStatusResponse(shards=[self._shard.life.status])

    async def Forward(
        self, request_iterator: AsyncIterator[runner_service_pb2.ForwardRequest], context: _Context
    ) -> AsyncIterator[runner_service_pb2.ForwardResponse]:
        """See RunnerService.Forward."""
        _assignment(self._shard)
        async for response in self._shard.pipeline().receive(request_iterator):
            yield response


def _check_assignment(assignment: dispatch_service_pb2.Assignment, shard: Shard) -> None:
    """Raise RpcError unless `assignment` is one for this process, and whole."""
    if shard.assignment is not None:
        raise RpcError(
            grpc.StatusCode.FAILED_PRECONDITION, "this process holds a shard already", reason="ALREADY_LOADED"
        )
    said, here = (assignment.instance_id, assignment.rank), (shard.life.status.instance_id, shard.life.status.rank)
    if said != here:
        raise RpcError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"this process was started for rank {here[1]} of {here[0]}, not for rank {said[1]} of {said[0]}",
            reason="OTHER_SHARD",
        )
    ranks, cut = [peer.rank for peer in assignment.peers], assignment.shard
    if ranks != list(range(len(ranks))) or assignment.rank >= len(ranks):
        raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"peers have the ranks {ranks}", reason="BAD_ASSIGNMENT")
    if not 0 <= cut.first_layer < cut.end_layer <= len(assignment.model.layers):
        raise RpcError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"layers [{cut.first_layer}, {cut.end_layer}) of {len(assignment.model.layers)} are no shard",
            reason="BAD_ASSIGNMENT",
        )


def _assignment(shard: Shard) -> dispatch_service_pb2.Assignment:
    if shard.assignment is None:
        # Its runner is about to say; whoever dials tries again.
        raise RpcError(grpc.StatusCode.UNAVAILABLE, "this process does not know its shard yet", reason="SHARD_STARTING")
    return shard.assignment


def _check_running(shard: Shard, assignment: dispatch_service_pb2.Assignment) -> None:
    first = assignment.peers[0]
    if assignment.rank != 0:
        raise RpcError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"this is {rank_name(assignment, assignment.rank)}; ask the first rank, on node {first.node_id} "
            f"at {first.address}",
            reason="NOT_FIRST_RANK",
            metadata={"address": first.address},
        )
    if shard.life.has_failed:
        raise RpcError(
            grpc.StatusCode.UNAVAILABLE,
            f"{assignment.instance_id} has failed: {shard.life.failure.message}; place the model again",
            reason=RANK_LOST,
        )
    if shard.life.phase != model_pb2.SHARD_PHASE_RUNNING:
        phase = model_pb2.ShardPhase.Name(shard.life.phase).removeprefix("SHARD_PHASE_").lower()
        raise RpcError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{rank_name(assignment, 0)} is {phase}: ask again once `ullage status` says it is running",
            reason="NOT_RUNNING",
        )
