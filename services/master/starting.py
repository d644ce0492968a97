"""What calls are answered while the log is replayed: that they are to come again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from services.master import errors
from services.master.cluster import Cluster
from services.master.servicers.errors import translated

_OWN_SERVICES: Final = "/ullage.v1."


class StartingInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every call of Ullage's own services until the replay is done; health and reflection answer."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if not self._cluster.replaying or not handler_call_details.method.startswith(_OWN_SERVICES):
            return await continuation(handler_call_details)
        # On the wire a call that fails at once is the same for all four kinds.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        with translated():
            raise errors.Unavailable(
                f"the master is replaying its log, {self._cluster.state.sequence} of {self._cluster.head_sequence}: "
                "try again in a moment"
            )
            yield b""  # Makes this a stream, as gRPC expects one.
