"""ConfigService, which every process serves: what it was told at its start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.config import Setting
from services.rpc import Server
from ullage.v1 import config_service_pb2, config_service_pb2_grpc

SERVICE = config_service_pb2.DESCRIPTOR.services_by_name["ConfigService"].full_name


class ConfigServicer(config_service_pb2_grpc.ConfigServiceServicer):
    """Answers the same for as long as the process runs."""

    def __init__(self, service: str, version: str, settings: Iterable[Setting]) -> None:
        self._answer = config_service_pb2.GetConfigResponse(
            service=service,
            ullage_version=version,
            settings=[config_service_pb2.Setting(**setting._asdict()) for setting in settings],
        )

    async def GetConfig(
        self, request: config_service_pb2.GetConfigRequest, context: Any
    ) -> config_service_pb2.GetConfigResponse:
        return self._answer


def add(server: Server, service: str, version: str, settings: Iterable[Setting]) -> None:
    """Have `server` show what its process, the `service` of that release, goes by."""
    servicer = ConfigServicer(service, version, settings)
    server.add(SERVICE, config_service_pb2_grpc.add_ConfigServiceServicer_to_server, servicer)
