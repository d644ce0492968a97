"""What shards tell the master, gathered, and waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import psutil

from services.runner.supervisor import Workshop
from ullage.v1 import dispatch_service_pb2, event_pb2, model_pb2

MakeWorkshop: TypeAlias = Callable[..., Workshop]
MakeAssignment: TypeAlias = Callable[..., dispatch_service_pb2.Assignment]

WAIT_SECONDS = 20.0
"""For a loaded machine; nothing here takes a second on an idle one."""


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

    async def until(self, phase: str) -> model_pb2.ShardStatus:
        async with asyncio.timeout(WAIT_SECONDS):
            while phase not in self.phases:
                self.arrived.clear()
                await self.arrived.wait()
        return next(s for s in self.statuses if phase_name(s) == phase)


SERVICES = {"services.cli", "services.master", "services.probe", "services.probe.lean", "services.runner"}


def shard_processes() -> list[psutil.Process]:
    """The shards this process has started, ended but unreaped ones too.

    Not the services of a cluster that other tests of the same session keep running.
    """
    return [child for child in psutil.Process().children() if not _is_service(child)]


def _is_service(child: psutil.Process) -> bool:
    try:
        return not SERVICES.isdisjoint(child.cmdline())
    except psutil.ZombieProcess:
        return False
