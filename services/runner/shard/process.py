"""All that a shard's process holds: the server, and the shard behind it."""

from __future__ import annotations

from pathlib import Path

import structlog

from services.clock import SystemClock
from services.rpc import Server
from services.runner.shard import blas, device
from services.runner.shard.engine import Engine
from services.runner.shard.life import Life
from services.runner.shard.servicer import RunnerServicer, ShardServicer
from services.runner.shard.shard import Shard
from ullage.v1 import runner_service_pb2_grpc, shard_service_pb2_grpc

log = structlog.get_logger()


class Process:
    """The services of one shard, before it is told which."""

    def __init__(self, instance_id: str, rank: int, weights: device.WeightChoice, loaded: blas.Loaded) -> None:
        here = device.this_device()
        self._form = here.weight_form(weights)
        self._device = here
        self.blas_name = device.multiplies_with(loaded)
        device.rehearse()
        self._shard = Shard(Life(instance_id, rank), Engine(on_cpu=here.kind == "cpu"), self._form, SystemClock())
        self._server = Server()

    async def start(self, socket: Path) -> None:
        """Serve on `socket`."""
        self._server.add(
            "ullage.v1.ShardService",
            shard_service_pb2_grpc.add_ShardServiceServicer_to_server,
            ShardServicer(self._shard),
        )
        self._server.add(
            "ullage.v1.RunnerService",
            runner_service_pb2_grpc.add_RunnerServiceServicer_to_server,
            RunnerServicer(self._shard),
        )
        await self._server.start(f"unix:{socket}")
        await self._server.set_serving(serving=True)
        log.info(
            "listening", address=f"unix:{socket}", device=self._device.kind, weights=self._form, blas=self.blas_name
        )

    async def stop(self) -> None:
        """Stop serving and leave the ring."""
        await self._shard.stop()
        await self._server.stop(0.1)
