"""What nodes say of themselves: checked, stored, acknowledged once it is durable."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc

from services.master import errors
from services.master.cluster import Cluster
from services.master.event_log import Append
from services.master.liveness import liveness
from services.master.observations import checked
from services.master.servicers.errors import translated
from ullage.v1 import node_pb2, state_pb2, telemetry_service_pb2

BATCHES_IN_FLIGHT_MAX: Final = 8
"""Messages of one stream that may wait for the disk before the next is read."""


@dataclass(slots=True, eq=False)
class _Stream:
    """An open Report call: one boot of one node."""

    identity: node_pb2.NodeIdentity
    heard_at: float
    acknowledged: int
    last_sequence: int = 0
    in_flight: deque[asyncio.Future[Append]] = field(default_factory=deque)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is more to acknowledge, or the stream shall end."""
    ended: bool = False

    @property
    def source(self) -> str:
        return f"probe/{self.identity.node_id}/{self.identity.boot_id}"

    def end(self) -> None:
        self.ended = True
        self.moved.set()


def add_to_server(servicer: TelemetryServicer, server: grpc.aio.Server) -> None:
    """Serve TelemetryService without opening the facts in its requests: their bytes are stored as they came."""
    read = telemetry_service_pb2.UnopenedReport.FromString
    handlers = {
        "Report": grpc.stream_stream_rpc_method_handler(
            servicer.Report, read, telemetry_service_pb2.ReportResponse.SerializeToString
        ),
        "ReportOnce": grpc.unary_unary_rpc_method_handler(
            servicer.ReportOnce, read, telemetry_service_pb2.ReportOnceResponse.SerializeToString
        ),
    }
    name = telemetry_service_pb2.DESCRIPTOR.services_by_name["TelemetryService"].full_name
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))


class TelemetryServicer:
    """TelemetryService over the one cluster; not of the generated class, since its requests come unopened."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._streams: dict[str, _Stream] = {}
        """The open stream of each node."""

    async def Report(
        self, request_iterator: AsyncIterator[telemetry_service_pb2.UnopenedReport], context: Any
    ) -> AsyncIterator[telemetry_service_pb2.ReportResponse]:
        with translated():
            first = await anext(request_iterator, None)
            if first is None:
                return
            stream = self._open(first)
            reading = asyncio.create_task(self._read(stream, request_iterator))
            try:
                async for acknowledged in self._acknowledge(stream, reading):
                    yield telemetry_service_pb2.ReportResponse(acknowledged_source_sequence=acknowledged)
            finally:
                reading.cancel()
                self._close(stream)

    async def ReportOnce(
        self, request: telemetry_service_pb2.UnopenedReport, context: Any
    ) -> telemetry_service_pb2.ReportOnceResponse:
        with translated():
            stream = self._stream(request.identity)
            said = checked(stream.identity.node_id, request.observations, 0)
            self._cluster.hear(stream.identity.node_id)
            stored = await self._cluster.submit(stream.source, said)
            return telemetry_service_pb2.ReportOnceResponse(acknowledged_source_sequence=stored.acknowledged)

    def _open(self, first: telemetry_service_pb2.UnopenedReport) -> _Stream:
        """The stream `first` begins, in place of one of the same node that is no longer heard."""
        if first.observations:
            raise errors.InvalidRequest("send the identity alone first, and the observations once it is answered")
        stream = self._stream(first.identity)
        other = self._streams.get(stream.identity.node_id)
        if other is not None:
            other.end()
        self._streams[stream.identity.node_id] = stream
        self._cluster.hear(stream.identity.node_id)
        return stream

    def _stream(self, identity: node_pb2.NodeIdentity) -> _Stream:
        """A stream of this boot. Raises NodeAlreadyLive while another boot of the node has one and is heard."""
        if not identity.node_id or not identity.boot_id or "/" in identity.node_id + identity.boot_id:
            raise errors.InvalidRequest("identity needs a node_id and a boot_id, neither with a '/' in it")
        now = self._cluster.clock.monotonic()
        other = self._streams.get(identity.node_id)
        if (
            other is not None
            and other.identity.boot_id != identity.boot_id
            and liveness(other.heard_at, now, self._cluster.bounds) == state_pb2.LIVENESS_LIVE
        ):
            raise errors.NodeAlreadyLive(identity.node_id, other.identity.boot_id)
        stream = _Stream(identity, now, 0)
        stream.acknowledged = self._cluster.acknowledged(stream.source)
        return stream

    def _close(self, stream: _Stream) -> None:
        if self._streams.get(stream.identity.node_id) is stream:
            del self._streams[stream.identity.node_id]
        for done in stream.in_flight:
            done.add_done_callback(_forget)

    async def _read(self, stream: _Stream, requests: AsyncIterator[telemetry_service_pb2.UnopenedReport]) -> None:
        """Submit what arrives. The end of the stream says nothing: a client that was cut off ends it as well."""
        try:
            async for request in requests:
                self._submit(stream, request.observations)
                if len(stream.in_flight) >= BATCHES_IN_FLIGHT_MAX:
                    await asyncio.wait([stream.in_flight[0]])
        finally:
            stream.moved.set()

    def _submit(self, stream: _Stream, observations: Sequence[telemetry_service_pb2.UnopenedObservation]) -> None:
        said = checked(stream.identity.node_id, observations, stream.last_sequence)
        stream.heard_at = self._cluster.clock.monotonic()
        self._cluster.hear(stream.identity.node_id)
        if not said.facts:
            return
        done = self._cluster.submit(stream.source, said, after=stream.last_sequence)
        done.add_done_callback(lambda _: stream.moved.set())
        stream.in_flight.append(done)
        stream.last_sequence = said.source_sequences[-1]

    async def _acknowledge(self, stream: _Stream, reading: asyncio.Task[None]) -> AsyncIterator[int]:
        """How far the stream's facts are durable: at once, and at each step, until all that was read is."""
        stopping = asyncio.create_task(self._cluster.stopping.wait())
        stopping.add_done_callback(lambda _: stream.moved.set())
        try:
            yield stream.acknowledged
            while True:
                await stream.moved.wait()
                stream.moved.clear()
                before = stream.acknowledged
                while stream.in_flight and stream.in_flight[0].done():
                    stream.acknowledged = stream.in_flight.popleft().result().acknowledged
                if stream.acknowledged != before:
                    yield stream.acknowledged
                if reading.done() and not stream.in_flight:
                    reading.result()
                    return
                if stream.ended or stopping.done():
                    raise errors.Unavailable("the master ends this stream: connect again")
        finally:
            stopping.cancel()


def _forget(done: asyncio.Future[Append]) -> None:
    """Take note of how it ended, though nobody waits for it any more."""
    if not done.cancelled():
        done.exception()
