"""Waiting for other ranks that fetch their part of the model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from services import rpc
from services.clock import SystemClock
from services.runner.peers import PeerStuckError, wait_until_fetched
from tests.runner.told import WAIT_SECONDS, until
from ullage.v1 import dispatch_service_pb2, model_pb2, runner_service_pb2, runner_service_pb2_grpc


@dataclass
class Peer:
    """A runner whose rank 1 is as said."""

    address: str = ""
    asked: int = 0
    status: model_pb2.ShardStatus = field(default_factory=lambda: status(model_pb2.SHARD_PHASE_STARTING, 1, 9))

    async def GetStatus(self, request: Any, context: Any) -> runner_service_pb2.GetStatusResponse:
        self.asked += 1
        return runner_service_pb2.GetStatusResponse(shards=[self.status])


def status(phase: model_pb2.ShardPhase.ValueType, done_bytes: int, total_bytes: int) -> model_pb2.ShardStatus:
    return model_pb2.ShardStatus(instance_id="i1", rank=1, phase=phase, done_bytes=done_bytes, total_bytes=total_bytes)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    server, peer = rpc.Server(), Peer()
    add: Any = runner_service_pb2_grpc.add_RunnerServiceServicer_to_server
    base = type("Served", (runner_service_pb2_grpc.RunnerServiceServicer,), {"GetStatus": staticmethod(peer.GetStatus)})
    server.add("ullage.v1.RunnerService", add, base())
    peer.address = f"127.0.0.1:{await server.start('127.0.0.1:0')}"
    yield peer
    await server.stop(0)


async def wait(peer: Peer, *source_node_ids: str, stall_seconds: float = 60.0) -> None:
    assignment = dispatch_service_pb2.Assignment(
        instance_id="i1",
        rank=0,
        peers=[
            dispatch_service_pb2.Peer(rank=0, node_id="a", address="127.0.0.1:1"),
            dispatch_service_pb2.Peer(rank=1, node_id="b", address=peer.address),
        ],
        sources=[dispatch_service_pb2.Peer(node_id=node_id) for node_id in source_node_ids],
    )
    async with asyncio.timeout(WAIT_SECONDS):
        await wait_until_fetched(assignment, SystemClock(), stall_seconds, lambda: None)


async def test_a_rank_that_fetches_is_waited_for_until_it_has_all(peer: Peer) -> None:
    waiting = asyncio.create_task(wait(peer, "a"))
    await until(lambda: peer.asked >= 3)
    assert not waiting.done()

    peer.status = status(model_pb2.SHARD_PHASE_STARTING, 9, 9)
    await waiting


async def test_a_rank_that_has_the_files_is_not_asked(peer: Peer) -> None:
    await wait(peer, "a", "b")

    assert peer.asked == 0


async def test_a_rank_that_goes_on_or_has_failed_is_waited_for_no_longer(peer: Peer) -> None:
    for phase in (model_pb2.SHARD_PHASE_CONNECTING, model_pb2.SHARD_PHASE_FAILED):
        peer.status = status(phase, 1, 9)
        await wait(peer, "a")

    assert peer.asked >= 2


async def test_a_rank_that_does_not_get_on_is_named(peer: Peer) -> None:
    with pytest.raises(
        PeerStuckError, match=r"^rank 1 on node b has not got on with fetching the model for 1 s$"
    ) as stuck:
        await wait(peer, "a", stall_seconds=1.0)
    assert stuck.value.rank == 1
