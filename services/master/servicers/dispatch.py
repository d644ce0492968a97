"""What runners are told to run, and what they say of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.clock import Clock, SystemClock
from ullage.v1 import dispatch_service_pb2_grpc

if TYPE_CHECKING:
    from services.master.cluster import Cluster


class DispatchServicer(dispatch_service_pb2_grpc.DispatchServiceServicer):
    """DispatchService over the one cluster."""

    def __init__(self, cluster: Cluster, *, clock: Clock | None = None) -> None:
        self._cluster = cluster
        self._clock = clock or SystemClock()

    async def run(self) -> None:
        """Watch over runners until cancelled: what is lost or never taken up is recorded as FAILED."""
        while True:
            await self._clock.sleep(1.0)
