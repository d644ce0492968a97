"""The other ranks of an instance, waited for while they fetch their part of the model.

A rank that has its files would dial its neighbours, and give up on one that fetches for minutes. So it starts its
process only once the others have theirs. Slow is told from stuck by their bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import grpc

from services import rpc
from services.clock import Clock
from ullage.v1 import dispatch_service_pb2, model_pb2, runner_service_pb2, runner_service_pb2_grpc

ASK_PERIOD_SECONDS: Final = 0.5

ASK_SECONDS: Final = 3.0

UNKNOWN_SECONDS: Final = 30.0
"""For a rank to be known where it is to be: its runner is told at the same moment as this one."""


class PeerStuckError(Exception):
    """Another rank does not get on with fetching; str() says which."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


async def wait_until_fetched(
    assignment: dispatch_service_pb2.Assignment, clock: Clock, stall_seconds: float, waits: Callable[[], None]
) -> None:
    """Return when no rank fetches any more, as far as its runner can be asked. `waits` is called again and again.

    Raises PeerStuckError when one has not got on for `stall_seconds`.
    """
    with_files = {source.node_id for source in assignment.sources}
    others = (peer for peer in assignment.peers if peer.rank != assignment.rank and peer.node_id not in with_files)
    waiting = (_wait(assignment.instance_id, peer, clock, stall_seconds, waits) for peer in others if with_files)
    await asyncio.gather(*waiting)


async def _wait(
    instance_id: str, peer: dispatch_service_pb2.Peer, clock: Clock, stall_seconds: float, waits: Callable[[], None]
) -> None:
    began = moved_at = clock.monotonic()
    done_bytes = 0
    async with rpc.channel(peer.address) as channel:
        stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
        while True:
            status = await _status(stub, instance_id, peer.rank)
            now = clock.monotonic()
            if status is None:
                if now - began > UNKNOWN_SECONDS:
                    return  # The dialling of neighbours finds out what is wrong with it.
            elif not _fetches(status):
                return
            elif status.done_bytes != done_bytes:
                done_bytes, moved_at = status.done_bytes, now
            elif now - moved_at > stall_seconds:
                raise PeerStuckError(
                    f"rank {peer.rank} on node {peer.node_id} has not got on with fetching the model for "
                    f"{stall_seconds:g} s",
                    peer.rank,
                )
            waits()
            await clock.sleep(ASK_PERIOD_SECONDS)


async def _status(
    stub: runner_service_pb2_grpc.RunnerServiceAsyncStub, instance_id: str, rank: int
) -> model_pb2.ShardStatus | None:
    try:
        answer = await stub.GetStatus(runner_service_pb2.GetStatusRequest(), timeout=ASK_SECONDS)
    except grpc.aio.AioRpcError:
        return None
    found = (status for status in answer.shards if (status.instance_id, status.rank) == (instance_id, rank))
    return next(found, None)


def _fetches(status: model_pb2.ShardStatus) -> bool:
    """Whether the rank has bytes to get, or has not said yet how many."""
    if status.phase > model_pb2.SHARD_PHASE_STARTING:
        return False
    return not status.HasField("total_bytes") or status.done_bytes < status.total_bytes
