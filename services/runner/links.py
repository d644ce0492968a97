"""The ways from this node to others: dialled, not assumed, and measured on the path that activations take.

Rules this module lives by:
- Few and small: a handful of frames of a token's size, then one or two larger ones, and only one path at a time.
- The quickest of several is what a path can do; the others say how busy the machines were.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from services import rpc
from services.clock import Clock
from services.runner.relay import ECHO_KEY, SERVICE
from ullage.v1 import dispatch_service_pb2, node_pb2, runner_service_pb2, runner_service_pb2_grpc

DIAL_SECONDS: Final = 3.0
"""A machine that takes longer to answer is not one to send every token through."""

ECHO_SECONDS: Final = 3.0
"""For all the frames of one measurement."""

TOKEN_BYTES: Final = 4096
"""About a token's activation."""

TOKENS: Final = 5

CHUNK_BYTES: Final = (128 << 10, 1 << 20)
"""About a chunk of a prompt. The larger one is left out on a path where the smaller one takes long."""

LONG_SECONDS: Final = 0.1

_Call = Any


class Links:
    """The measurements of one node."""

    def __init__(self, node_id: str, clock: Clock) -> None:
        self._node_id = node_id
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()

    async def measure(self, peer: dispatch_service_pb2.Peer) -> node_pb2.Link:
        """The path to `peer`: whether and in what time it is there and back, and how many bytes a second it takes."""
        link = node_pb2.Link(from_node_id=self._node_id, to_node_id=peer.node_id, to_address=peer.address)
        async with rpc.channel(peer.address) as channel:
            try:
                stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
                answer = await stub.GetStatus(runner_service_pb2.GetStatusRequest(), timeout=DIAL_SECONDS)
            except grpc.aio.AioRpcError as error:
                link.failure = f"{peer.address} does not answer: {error.code().name} {error.details()}"
                return link
            other = answer.profile.node_id
            if other != peer.node_id:
                link.failure = f"{peer.address} is answered by node {other}: give each runner its --advertise"
                return link
            await self._measure(channel, link)
        return link

    async def _measure(self, channel: grpc.aio.Channel, link: node_pb2.Link) -> None:
        method: Any = channel.stream_stream(f"/{SERVICE}/Forward")
        call = rpc.keep_status(method(metadata=((ECHO_KEY, "1"),)))
        try:
            async with self._one_at_a_time, asyncio.timeout(ECHO_SECONDS):
                await self._echo(call, link)
            link.reachable = True
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
            said = f"{error.code().name} {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else "too slow"
            link.failure = f"{link.to_address} answers, but passes no frames on: {said}"
        finally:
            call.cancel()

    async def _echo(self, call: _Call, link: node_pb2.Link) -> None:
        quickest = min([await self._seconds(call, TOKEN_BYTES) for _ in range(TOKENS)])
        link.latency.FromNanoseconds(int(quickest * 1e9))
        rates: list[float] = []
        for size_bytes in CHUNK_BYTES:
            seconds = await self._seconds(call, size_bytes)
            if seconds > quickest:
                rates.append((size_bytes - TOKEN_BYTES) / (seconds - quickest))
            if seconds > LONG_SECONDS:
                break
        if rates:
            link.bandwidth_bytes_per_second = int(max(rates))

    async def _seconds(self, call: _Call, size_bytes: int) -> float:
        """The time until a frame of this size has arrived whole, and that has been heard."""
        activation = runner_service_pb2.Activation(data=bytes(size_bytes))
        frame = runner_service_pb2.ForwardRequest(activation=activation).SerializeToString()
        began = self._clock.monotonic()
        await call.write(frame)
        if await call.read() is grpc.aio.EOF:
            raise asyncio.InvalidStateError("the echo ended")
        return self._clock.monotonic() - began
