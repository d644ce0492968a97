"""Whether one runner reaches another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services import rpc
from services.clock import SystemClock
from services.runner import links, servicer
from services.runner.relay import SERVICE
from services.runner.shards import Shards
from tests.runner.told import WAIT_SECONDS, MakeWorkshop
from ullage.v1 import dispatch_service_pb2, node_pb2


@pytest.fixture
async def address(workshop: MakeWorkshop) -> AsyncIterator[str]:
    """Where the runner of node n2 listens."""
    server = rpc.Server()
    profile = node_pb2.RunnerProfile(node_id="n2")
    shards = Shards(workshop("runs"), threads=1)
    server.add(SERVICE, servicer.add_to_server, servicer.RunnerServicer(lambda: profile, shards, lambda: True))
    port = await server.start("127.0.0.1:0")
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def measure(node_id: str, address: str) -> node_pb2.Link:
    peer = dispatch_service_pb2.Peer(node_id=node_id, address=address)
    return await links.Links("n1", SystemClock()).measure(peer)


async def test_a_runner_that_answers_is_reachable_with_its_latency(address: str) -> None:
    found: list[node_pb2.Link] = []
    async with asyncio.timeout(WAIT_SECONDS):
        # A path is as quick as the processor that is had meanwhile: measured again where that was none.
        while not found or found[-1].bandwidth_bytes_per_second <= 1_000_000:
            found.append(await measure("n2", address))
    link = found[-1]

    assert (link.from_node_id, link.to_node_id, link.to_address) == ("n1", "n2", address)
    assert link.reachable
    assert 0 < link.latency.ToNanoseconds() < 1_000_000_000


async def test_another_node_at_the_address_is_not_the_one_meant(address: str) -> None:
    link = await measure("n3", address)

    assert not link.reachable
    assert link.failure == f"{address} is answered by node n2: give each runner its --advertise"
    assert not link.HasField("latency")


async def test_an_address_where_nobody_listens_says_so(address: str) -> None:
    link = await measure("n2", "127.0.0.1:1")

    assert not link.reachable
    assert link.failure.startswith("127.0.0.1:1 does not answer: UNAVAILABLE ")
