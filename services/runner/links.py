"""Whether this node reaches another: dialled, not assumed."""

from __future__ import annotations

from typing import Final

import grpc

from services import rpc
from services.clock import Clock
from ullage.v1 import dispatch_service_pb2, node_pb2, runner_service_pb2, runner_service_pb2_grpc

DIAL_SECONDS: Final = 3.0
"""A machine that takes longer to answer is not one to send every token through."""

PING_SECONDS: Final = 1.0

PINGS: Final = 5
"""The quickest of these is the path's latency; the others say how busy the machines were."""


async def measure(node_id: str, peer: dispatch_service_pb2.Peer, clock: Clock) -> node_pb2.Link:
    """The path from this node to `peer`, with the time of a call there and back once connected."""
    link = node_pb2.Link(from_node_id=node_id, to_node_id=peer.node_id, to_address=peer.address)
    async with rpc.channel(peer.address) as channel:
        stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
        request = runner_service_pb2.GetStatusRequest()
        try:
            answer = await stub.GetStatus(request, timeout=DIAL_SECONDS)
            seconds = []
            for _ in range(PINGS):
                began = clock.monotonic()
                await stub.GetStatus(request, timeout=PING_SECONDS)
                seconds.append(clock.monotonic() - began)
        except grpc.aio.AioRpcError as error:
            link.failure = f"{peer.address} does not answer: {error.code().name} {error.details()}"
            return link
    if answer.profile.node_id != peer.node_id:
        link.failure = f"{peer.address} is answered by node {answer.profile.node_id}: give each runner its --advertise"
        return link
    link.reachable = True
    link.latency.FromNanoseconds(int(min(seconds) * 1e9))
    return link
