"""What shards tell the master, gathered, and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import psutil

from services.runner.supervisor import Workshop
from tests.clocks import FakeClock
from ullage.v1 import dispatch_service_pb2, event_pb2, model_pb2

MakeWorkshop: TypeAlias = Callable[..., Workshop]
MakeAssignment: TypeAlias = Callable[..., dispatch_service_pb2.Assignment]

WAIT_SECONDS = 60.0
"""For a loaded machine; nothing here takes a second on an idle one."""

TURN_SECONDS = 0.02
"""As long as a supervisor waits between two looks for whether its process listens."""


def phase_name(status: model_pb2.ShardStatus) -> str:
    return model_pb2.ShardPhase.Name(status.phase).removeprefix("SHARD_PHASE_")


@dataclass
class Told:
    """What shards told the master, in order."""

    facts: list[event_pb2.Fact] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, fact: event_pb2.Fact) -> None:
        self.facts.append(fact)
        self.arrived.set()

    @property
    def statuses(self) -> list[model_pb2.ShardStatus]:
        changes = (fact.shard_status_changed for fact in self.facts if fact.HasField("shard_status_changed"))
        return [change.status for change in changes]

    @property
    def phases(self) -> list[str]:
        """The phases told of, each once."""
        return list(dict.fromkeys(phase_name(status) for status in self.statuses))

    async def until_true(self, happened: Callable[[], bool]) -> None:
        """Return once `happened`, asked at every fact, is true."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not happened():
                self.arrived.clear()
                await self.arrived.wait()

    async def until(self, phase: str) -> model_pb2.ShardStatus:
        await self.until_true(lambda: phase in self.phases)
        return next(s for s in self.statuses if phase_name(s) == phase)

    async def until_by(self, clock: FakeClock, phase: str) -> model_pb2.ShardStatus:
        """As `until`, while `clock` goes on, no quicker than time does; then it stands still."""
        told = asyncio.create_task(self.until(phase))
        while not told.done():
            clock.advance(TURN_SECONDS)
            await asyncio.wait([told], timeout=TURN_SECONDS)
        return told.result()


async def until(happened: Callable[[], bool]) -> None:
    """Return once `happened` is true, of which nobody tells."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not happened():  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)


async def pass_by(clock: FakeClock, seconds: float) -> None:
    """Let `seconds` pass at once, and whoever waited for that have done what he does."""
    clock.advance(seconds)
    for _ in range(10):
        await asyncio.sleep(0)


SERVICES = {"services.cli", "services.master", "services.probe", "services.probe.lean", "services.runner"}


def shard_processes() -> list[psutil.Process]:
    """The shards this process has started, ended but unreaped ones too.

    Not the services of a cluster that other tests of the same session keep running.
    """
    return [child for child in psutil.Process().children() if _is_shard(child)]


def _is_shard(child: psutil.Process) -> bool:
    try:
        return SERVICES.isdisjoint(child.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        # Another thread has reaped it since it was listed.
        return False
