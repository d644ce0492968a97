"""RunnerService as a runner serves it: its own status, and its shards' calls by way of the relay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from services.runner.relay import SERVICE, Relay
from services.runner.shards import Shards
from ullage.v1 import node_pb2, runner_service_pb2


class RunnerServicer:
    """RunnerService of one runner."""

    def __init__(
        self, profile: Callable[[], node_pb2.RunnerProfile], shards: Shards, connected: Callable[[], bool]
    ) -> None:
        """`profile` and `connected` are asked at each call."""
        self._profile = profile
        self._shards = shards
        self._connected = connected
        self.relay = Relay(profile().node_id, shards)

    async def get_status(
        self, request: runner_service_pb2.GetStatusRequest, context: Any
    ) -> runner_service_pb2.GetStatusResponse:
        """The runner and its shards now."""
        return runner_service_pb2.GetStatusResponse(
            profile=self._profile(), shards=self._shards.statuses(), connected_to_master=self._connected()
        )


def add_to_server(servicer: RunnerServicer, server: grpc.aio.Server) -> None:
    """Serve RunnerService: as the generated function would, but with the relayed calls left as bytes."""
    handlers = {
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            servicer.get_status,
            request_deserializer=runner_service_pb2.GetStatusRequest.FromString,
            response_serializer=runner_service_pb2.GetStatusResponse.SerializeToString,
        ),
        "Forward": grpc.stream_stream_rpc_method_handler(servicer.relay.forward),
        "Generate": grpc.unary_stream_rpc_method_handler(servicer.relay.generate),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
