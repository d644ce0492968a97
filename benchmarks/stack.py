"""A master in this process and runners in theirs, over which a model can be placed as it is to be measured."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

from services.clock import SystemClock
from services.master.cluster import Cluster
from services.master.liveness import Bounds
from services.master.server import Master
from services.master.server import running as master_running
from services.master.settings import Settings
from services.master.state import InstanceRecord
from services.model_folder import read_manifest
from ullage.v1 import event_pb2, model_pb2

MODEL_ID: Final = "smollm2-135m"
CONTEXT_TOKENS: Final = 640
WAIT_SECONDS: Final = 120.0


@dataclass
class Stack:
    """A master, and runners that run what is placed on them."""

    master: Master
    folder: Path
    model: model_pb2.Model
    runners: list[subprocess.Popen[bytes]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    @property
    def cluster(self) -> Cluster:
        return self.master.cluster

    async def place(self, layers: Sequence[int], concurrent: int) -> str:
        """The id of an instance with so many layers on each runner, once it runs."""
        instance_id = f"i{self.cluster.state.sequence}"
        cuts = list(pairwise((0, *accumulate(layers))))
        placement = model_pb2.Placement(
            shards=[
                model_pb2.Shard(rank=rank, node_id=self.nodes[rank], first_layer=first, end_layer=end)
                for rank, (first, end) in enumerate(cuts)
            ],
            context_tokens=CONTEXT_TOKENS,
            concurrent_sequences=concurrent,
        )
        placed = event_pb2.InstancePlaced(
            instance_id=instance_id, spec=model_pb2.PlacementSpec(model_id=self.model.model_id), placement=placement
        )
        await self.cluster.append(event_pb2.Fact(instance_placed=placed))
        states = (model_pb2.INSTANCE_STATE_RUNNING, model_pb2.INSTANCE_STATE_FAILED)
        await self.until(lambda: self.instance(instance_id).state in states)
        assert not self.instance(instance_id).failure, self.instance(instance_id).failure
        return instance_id

    def instance(self, instance_id: str) -> InstanceRecord:
        return self.cluster.state.instances[instance_id]

    async def release(self, instance_id: str) -> None:
        released = event_pb2.InstanceReleased(instance_id=instance_id)
        await self.cluster.append(event_pb2.Fact(instance_released=released))
        await self.until(lambda: self.instance(instance_id).state == model_pb2.INSTANCE_STATE_RELEASED)

    async def until(self, happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not happened():  # noqa: ASYNC110 - the state tells nobody
                await asyncio.sleep(0.01)


@asynccontextmanager
async def started(folder: Path, state: Path, runners: int) -> AsyncIterator[Stack]:
    """A stack with the model in `folder` registered; `state` is where its processes keep what they know."""
    settings = Settings(
        address="127.0.0.1:0", log_path=state / "events.db", bounds=Bounds(), read_only=False, ready_file=None
    )
    async with AsyncExitStack() as exits:
        master = await exits.enter_async_context(master_running(settings, SystemClock()))
        stack = Stack(master, folder, read_manifest(folder))
        exits.callback(_stop, stack.runners)
        for number in range(runners):
            stack.runners.append(_runner(master.address, folder.parent, state / f"n{number}"))
        registered = event_pb2.ModelRegistered(model=stack.model)
        await stack.until(lambda: not master.cluster.replaying)
        await stack.cluster.append(event_pb2.Fact(model_registered=registered))
        await stack.until(lambda: len(stack.cluster.state.nodes) == runners)
        for node_id, node in sorted(stack.cluster.state.nodes.items()):
            assert node.runner is not None
            stack.nodes.append(node_id)
            stack.addresses.append(node.runner.address)
        yield stack


def _runner(master: str, models_dir: Path, state_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "services.runner", "--master", master, "--listen", "127.0.0.1:0"]
    command += ["--state-dir", str(state_dir), "--models-dir", str(models_dir), "--threads", "1"]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _stop(runners: Sequence[subprocess.Popen[bytes]]) -> None:
    for runner in runners:
        runner.terminate()
    for runner in runners:
        runner.wait(10)
