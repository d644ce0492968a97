"""Real shard processes, joined in a ring over unix sockets."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from services import rpc
from ullage.v1 import (
    dispatch_service_pb2,
    model_pb2,
    runner_service_pb2,
    runner_service_pb2_grpc,
    shard_service_pb2,
    shard_service_pb2_grpc,
)

START_SECONDS_MAX = 120.0

FAILED_SECONDS_MAX = 120.0
"""Only a test that would hang waits so long; what a shard needs to find out is some seconds of a processor."""

ENDLESS_TOKENS = 100_000
"""A context in which no machine comes to the end of an answer while a test looks at it, however long that stands still.
"""


def assignments(
    model: model_pb2.Model, addresses: Sequence[str], bounds: Sequence[int], **changes: Any
) -> list[dispatch_service_pb2.Assignment]:
    """One assignment for each rank of instance i1, cut at `bounds`, reached at `addresses`."""
    peers = [
        dispatch_service_pb2.Peer(rank=rank, node_id=f"n{rank}", address=address)
        for rank, address in enumerate(addresses)
    ]
    values = {"context_tokens": 128, "concurrent_sequences": 1, **changes}
    return [
        dispatch_service_pb2.Assignment(
            instance_id="i1",
            rank=rank,
            shard=model_pb2.Shard(rank=rank, node_id=f"n{rank}", first_layer=first, end_layer=end),
            model=model,
            peers=peers,
            **values,
        )
        for rank, (first, end) in enumerate(pairwise((0, *bounds, len(model.layers))))
    ]


@dataclass
class Child:
    """One shard's process, and ways to speak to it."""

    process: asyncio.subprocess.Process
    address: str
    channel: Any
    watched: list[shard_service_pb2.WatchResponse] = field(default_factory=list)

    @property
    def shard(self) -> Any:
        return shard_service_pb2_grpc.ShardServiceStub(self.channel)

    @property
    def runner(self) -> Any:
        return runner_service_pb2_grpc.RunnerServiceStub(self.channel)

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    async def load(self, assignment: dispatch_service_pb2.Assignment, folder: Path) -> list[model_pb2.ShardStatus]:
        """Every status told until the shard runs or has failed."""
        request = shard_service_pb2.LoadRequest(assignment=assignment, model_path=str(folder))
        return [response.status async for response in self.shard.Load(request)]

    async def watch(self) -> None:
        async for response in self.shard.Watch(shard_service_pb2.WatchRequest()):
            self.watched.append(response)

    async def failed(self) -> model_pb2.ShardStatus:
        """The status in which the shard has failed."""
        async with asyncio.timeout(FAILED_SECONDS_MAX):
            async for response in self.shard.Watch(shard_service_pb2.WatchRequest()):
                status: model_pb2.ShardStatus = response.status
                if status.phase == model_pb2.SHARD_PHASE_FAILED:
                    return status
        raise AssertionError("the watch ended")


@dataclass
class Answer:
    """All that a generation gave."""

    text: str
    token_ids: list[int]
    summary: runner_service_pb2.GenerationSummary


@dataclass
class Ring:
    """The children of one instance."""

    children: list[Child]

    async def generate(self, **request: Any) -> Answer:
        """The whole answer of the first rank."""
        text, token_ids, summary = "", [], None
        async for response in self.children[0].runner.Generate(generate_request(**request)):
            text += response.text
            token_ids += response.token_ids
            summary = response.summary if response.HasField("summary") else None
        assert summary is not None
        return Answer(text, token_ids, summary)


def generate_request(
    tokens: Sequence[int] = (), text: str = "", instance_id: str = "i1", **sampling: Any
) -> runner_service_pb2.GenerateRequest:
    request = runner_service_pb2.GenerateRequest(
        instance_id=instance_id, sampling=runner_service_pb2.SamplingParameters(**sampling)
    )
    if tokens:
        request.tokens.token_ids.extend(tokens)
    else:
        request.text = text
    return request


@asynccontextmanager
async def child(
    folder: Path,
    rank: int,
    threads: int = 1,
    weights: str = "float32",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[Child]:
    """A started process for `rank` of instance i1, its socket in `folder`, `environment` added to its own."""
    socket = folder / f"{rank}.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.runner.shard", "--socket", str(socket), "--instance", "i1"),
        *("--rank", str(rank), "--threads", str(threads), "--weights", weights),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        env={**os.environ, **environment},
    )
    channel = rpc.channel(f"unix:{socket}")
    try:
        async with asyncio.timeout(START_SECONDS_MAX):
            await channel.channel_ready()
        yield Child(process, f"unix:{socket}", channel)
    finally:
        await channel.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def children(
    ranks: int, threads: int = 1, environment: Mapping[str, str] = MappingProxyType({})
) -> AsyncIterator[list[Child]]:
    """Started processes that know of no assignment yet."""
    with tempfile.TemporaryDirectory(prefix="ullage-") as sockets:
        started = [child(Path(sockets), rank, threads, environment=environment) for rank in range(ranks)]
        entered = await asyncio.gather(*(one.__aenter__() for one in started))
        try:
            yield entered
        finally:
            await asyncio.gather(*(one.__aexit__(None, None, None) for one in started))


@asynccontextmanager
async def running(
    folder: Path, model: model_pb2.Model, *bounds: int, threads: int = 1, **changes: Any
) -> AsyncIterator[Ring]:
    """A ring that runs `model` from `folder`, cut at `bounds`."""
    async with children(len(bounds) + 1, threads) as started:
        addresses = [one.address for one in started]
        cut = assignments(model, addresses, bounds, **changes)
        loads = [one.load(assignment, folder) for one, assignment in zip(started, cut, strict=True)]
        for statuses in await asyncio.gather(*loads):
            assert statuses[-1].phase == model_pb2.SHARD_PHASE_RUNNING, statuses[-1]
        yield Ring(started)
