"""The runner as a whole: its server, its shards and its session, started and ended in order."""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path
from typing import Final

import structlog

from services import config_servicer, rpc
from services.clock import Clock
from services.runner import identity, links, model_files, models, servicer
from services.runner.description import NAMES_OF_FORMS, describe
from services.runner.model_fetch import Fetcher
from services.runner.outbox import Outbox
from services.runner.relay import SERVICE
from services.runner.roster import Roster
from services.runner.session import Session
from services.runner.settings import Settings
from services.runner.shards import Shards
from services.runner.supervisor import Workshop
from ullage.v1 import dispatch_service_pb2, event_pb2, model_file_service_pb2_grpc, node_pb2

MODELS_PERIOD_SECONDS: Final = 1.0
"""How often the models on disk are looked at: a model that was just added can be placed at once."""

FAREWELL_LOOKS_MAX: Final = 50
"""For the last facts to reach the master: a second. Looks, for who is stopped meanwhile gets nothing across."""

FAREWELL_LOOK_SECONDS: Final = 0.02

SOCKET_PATH_MAX: Final = 100
"""Shorter than the shortest limit of any system (104 bytes)."""

log = structlog.get_logger()


class Runner:
    """One boot of a node's runner."""

    def __init__(self, settings: Settings, profile: node_pb2.RunnerProfile, shop: Workshop, outbox: Outbox) -> None:
        """`outbox` is what `shop` tells its facts to."""
        self._settings = settings
        self._clock = shop.clock
        self.profile = profile
        self.outbox = outbox
        self.shards = Shards(shop, settings.threads)
        self._channel = rpc.channel(settings.master)
        self.session = Session(
            self._channel,
            lambda: self.profile,
            self.outbox,
            self.shards.reconcile,
            self._dial,
            self.shards.note_overdrawn,
            shop.clock,
        )
        self._dials: set[asyncio.Task[None]] = set()
        self._links = links.Links(profile.node_id, shop.clock)

    async def serve(self) -> rpc.Server:
        """Listen, and know the own address from then on. Raises AddressError."""
        server = rpc.Server()
        own = servicer.RunnerServicer(lambda: self.profile, self.shards, lambda: self.session.connected)
        server.add(SERVICE, servicer.add_to_server, own)
        server.add(
            model_files.SERVICE,
            model_file_service_pb2_grpc.add_ModelFileServiceServicer_to_server,
            model_files.ModelFileServicer(self._settings.models_dir),
        )
        config_servicer.add(server, "runner", self.profile.ullage_version, self._settings.options)
        port = await server.start(self._settings.address)
        self.profile.address = self._settings.advertised(port)
        await server.set_serving(serving=True)
        return server

    async def work(self) -> None:
        """Talk with the master and keep an eye on the models, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.session.run())
            tasks.create_task(self._watch_models())

    async def _watch_models(self) -> None:
        while True:
            await self._clock.sleep(MODELS_PERIOD_SECONDS)
            present = await asyncio.to_thread(models.present, self._settings.models_dir)
            if present != tuple(self.profile.model_ids):
                self.profile.model_ids[:] = present
                announced = node_pb2.RunnerProfile()
                announced.CopyFrom(self.profile)
                self.outbox.add(event_pb2.Fact(runner_announced=event_pb2.RunnerAnnounced(profile=announced)))

    def _dial(self, peer: dispatch_service_pb2.Peer) -> None:
        dial = asyncio.create_task(self._measure(peer))
        self._dials.add(dial)
        dial.add_done_callback(self._dials.discard)

    async def _measure(self, peer: dispatch_service_pb2.Peer) -> None:
        link = await self._links.measure(peer)
        self.outbox.add(event_pb2.Fact(link_measured=event_pb2.LinkMeasured(link=link)))

    async def end_shards(self) -> None:
        """End every shard, and let the master know if it is there."""
        await self.shards.close("its runner was stopped")
        for _ in range(FAREWELL_LOOKS_MAX):
            if not self.session.connected or self.outbox.empty:
                return
            await self._clock.sleep(FAREWELL_LOOK_SECONDS)

    async def close(self) -> None:
        """Let go of the connection to the master."""
        for dial in self._dials:
            dial.cancel()
        await self._channel.close()


@asynccontextmanager
async def running(
    settings: Settings, command: Sequence[str], clock: Clock
) -> AsyncIterator[tuple[Runner, asyncio.Task[None]]]:
    """A runner that listens, and its work, which goes on for ever; its shards end with it.

    Raises IdentityError, DescriptionError or AddressError when it cannot start.
    """
    profile = await _profile(settings, command)
    roster = Roster(settings.state_dir)
    await asyncio.to_thread(roster.clear)
    with tempfile.TemporaryDirectory(prefix="ullage-", dir=_short_place()) as folder:
        outbox = Outbox()
        shop = Workshop(
            node_id=profile.node_id,
            command=command,
            weights=NAMES_OF_FORMS[profile.weight_form],
            folder=Path(folder),
            models_dir=settings.models_dir,
            fetcher=Fetcher(profile.node_id, settings.models_dir, clock),
            clock=clock,
            tell=outbox.add,
            bounds=settings.bounds,
            roster=roster,
        )
        runner = Runner(settings, profile, shop, outbox)
        server = await runner.serve()
        work = asyncio.create_task(runner.work())
        try:
            yield runner, work
        finally:
            await server.set_serving(serving=False)
            await runner.end_shards()
            work.cancel()
            await asyncio.wait([work])
            await runner.close()
            await server.stop(grace_seconds=0.2)


async def _profile(settings: Settings, command: Sequence[str]) -> node_pb2.RunnerProfile:
    """What this boot of the runner is; without its address, which is known once it listens."""
    profile = await describe(command, settings.threads, settings.weights)
    profile.node_id = identity.node_id(settings.state_dir)
    profile.boot_id = uuid.uuid4().hex
    profile.ullage_version = metadata.version("ullage")
    profile.threads = settings.threads
    profile.model_ids.extend(models.present(settings.models_dir))
    return profile


def _short_place() -> Path | None:
    """Where sockets can be: the usual place for temporary files, or /tmp where that is too long a path."""
    longest = Path(tempfile.gettempdir()) / "ullage-12345678" / "1234567" / "s"
    return None if len(str(longest)) < SOCKET_PATH_MAX else Path("/tmp")  # noqa: S108 - a private folder is made in it
