"""ProbeService: what this node reads of itself, asked on the spot."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from services.probe.latest import Latest
from services.probe.reporter import Reporter
from services.rpc import RpcError
from ullage.v1 import probe_service_pb2, probe_service_pb2_grpc


class ProbeServicer(probe_service_pb2_grpc.ProbeServiceServicer):
    """Answers from the latest samples; asking takes no new reading."""

    def __init__(self, latest: Latest, reporter: Reporter) -> None:
        self._latest = latest
        self._reporter = reporter

    async def GetSample(
        self, request: probe_service_pb2.GetSampleRequest, context: object
    ) -> probe_service_pb2.GetSampleResponse:
        """The latest samples."""
        if self._latest.memory is None:
            raise RpcError(
                grpc.StatusCode.UNAVAILABLE, "nothing has been read yet: ask again in a moment", reason="NO_SAMPLE"
            )
        return probe_service_pb2.GetSampleResponse(
            identity=self._reporter.identity,
            memory=self._latest.memory,
            system=self._latest.system,
            connected_to_master=self._reporter.connected,
            buffered_facts=self._reporter.buffered_facts,
            dropped_facts=self._reporter.dropped_facts,
        )

    async def WatchSamples(
        self, request: probe_service_pb2.WatchSamplesRequest, context: object
    ) -> AsyncIterator[probe_service_pb2.WatchSamplesResponse]:
        """Every memory sample from now on; a slow reader misses some."""
        while (memory := await self._latest.next_memory()) is not None:
            yield probe_service_pb2.WatchSamplesResponse(memory=memory)
