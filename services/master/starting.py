"""What calls are answered while the log is replayed: that they are to come again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from services.master import errors
from services.master.cluster import Cluster
from services.master.servicers.errors import translated

_PACKAGE_PREFIX = "/ullage.v1."


class StartingHandler(grpc.GenericRpcHandler):
    """Takes every call of Ullage's own services, before the services do, until the replay is done."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        """A handler that refuses, or None to let the services answer."""
        if not self._cluster.replaying or not handler_call_details.method.startswith(_PACKAGE_PREFIX):
            return None
        # On the wire a call that fails at once is the same for all four kinds.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        with translated():
            raise errors.Unavailable(
                f"the master is replaying its log, {self._cluster.state.sequence} of {self._cluster.head_sequence}: "
                "try again in a moment"
            )
            yield b""  # Makes this a stream, as gRPC expects one.
