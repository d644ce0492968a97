"""The master as a whole: its log, its state and its services, in the order they start and stop.

The port answers first, the replay comes second, health says SERVING third. At the end the streams go first:
gRPC leaves an open stream untold until it cuts it off.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, Final

import structlog

from services import config_servicer
from services.clock import Clock
from services.master import errors, view
from services.master.cluster import Cluster, attached
from services.master.event_log import EventLog
from services.master.keeper import Keeper
from services.master.servicers import events, telemetry
from services.master.servicers.dispatch import DispatchServicer
from services.master.servicers.log import LogServicer
from services.master.servicers.models import ModelServicer
from services.master.servicers.placement import PlacementServicer
from services.master.settings import Settings
from services.master.starting import StartingInterceptor
from services.rpc import Server
from ullage.v1 import (
    dispatch_service_pb2_grpc,
    event_pb2,
    log_service_pb2_grpc,
    model_service_pb2_grpc,
    placement_service_pb2_grpc,
)

STOP_GRACE_SECONDS: Final = 3.0
"""For calls that are answered and streams that are told why they end, on a machine that is busy with others too."""

log = structlog.get_logger()


class Master:
    """A master that serves."""

    def __init__(self, settings: Settings, cluster: Cluster) -> None:
        self.cluster = cluster
        self.address = ""
        self._settings = settings
        self._server = Server(StartingInterceptor(cluster))
        self._dispatch = DispatchServicer(cluster, settings.runner_bounds)
        self._keeper = Keeper(cluster, cluster.log, settings.retention) if isinstance(cluster.log, EventLog) else None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listen, replay, serve. Raises AddressError when the address is taken, CorruptEventError by the replay."""
        self._add_services()
        port = await self._server.start(self._settings.address)
        self.address = self._settings.listened(port)
        log.info("listening", address=self.address, sqlite=sqlite3.sqlite_version)
        started = time.perf_counter()
        await self.cluster.replay()
        state = self.cluster.state
        took = round(time.perf_counter() - started, 3)
        log.info("replayed", sequence=state.sequence, state_hash=view.state_hash(state), seconds=took)
        if not self.cluster.read_only:
            await self._take_over()
        await self._server.set_serving(serving=True)

    def _add_services(self) -> None:
        for name, register, servicer in (
            ("TelemetryService", telemetry.add_to_server, telemetry.TelemetryServicer),
            ("PlacementService", placement_service_pb2_grpc.add_PlacementServiceServicer_to_server, PlacementServicer),
            ("EventService", events.add_to_server, events.EventServicer),
            ("ModelService", model_service_pb2_grpc.add_ModelServiceServicer_to_server, ModelServicer),
        ):
            self._server.add(f"ullage.v1.{name}", register, servicer(self.cluster))
        self._server.add(
            "ullage.v1.DispatchService",
            dispatch_service_pb2_grpc.add_DispatchServiceServicer_to_server,
            self._dispatch,
        )
        self._server.add(
            "ullage.v1.LogService",
            log_service_pb2_grpc.add_LogServiceServicer_to_server,
            LogServicer(self.cluster, self._keeper, self._settings.retention, self._settings.log_path),
        )
        config_servicer.add(self._server, "master", version("ullage"), self._settings.options)

    async def _take_over(self) -> None:
        started = event_pb2.MasterStarted(
            boot_id=uuid.uuid4().hex, ullage_version=version("ullage"), sqlite_version=sqlite3.sqlite_version
        )
        try:
            await self.cluster.append(event_pb2.Fact(master_started=started))
        except errors.LogFull as error:
            # What is there can still be read, and writing is tried again with each fact that comes.
            log.error("the start is not recorded", error=str(error))
        self._tasks = [asyncio.create_task(self.cluster.watch_silences()), asyncio.create_task(self._dispatch.run())]
        if self._keeper is not None:
            self._tasks.append(asyncio.create_task(self._keeper.run()))

    async def fail(self) -> BaseException | None:
        """Return once the master cannot go on, with the reason."""
        waits: list[asyncio.Future[Any]] = [self.cluster.failed, *self._tasks]
        ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return ended.pop().exception()

    async def stop(self) -> None:
        """End the streams, then the calls, then the tasks."""
        await self._server.set_serving(serving=False)
        self.cluster.stop_streams()
        await self._server.stop(STOP_GRACE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def running(settings: Settings, clock: Clock) -> AsyncIterator[Master]:
    """A master that serves until the end of the block.

    Raises LogLockedError, LogFileError, CorruptEventError or AddressError when it cannot.
    """
    async with attached(settings.log_path, clock, settings.bounds, read_only=settings.read_only) as cluster:
        master = Master(settings, cluster)
        try:
            await master.start()
            yield master
        finally:
            await master.stop()
