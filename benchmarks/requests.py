"""Requests round a ring: what a hop costs them, many at once, and those that end early, left or their rank killed."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.answers import DECODED_TOKENS, ask, rate, request, token_seconds
from benchmarks.row import Row
from benchmarks.split import LAYERS, model_folder
from benchmarks.stack import WAIT_SECONDS, Stack, started
from services import rpc
from services.clock import SystemClock
from services.runner import links
from ullage.v1 import dispatch_service_pb2, model_pb2, runner_service_pb2_grpc

IN_FLIGHT: Final = (1, 2, 4, 8)
ROUNDS: Final = 2
LONG_PROMPT_TOKENS: Final = 512
HOP_LAYERS: Final = {1: (5,), 2: (2, 3)}
"""Of a model so small that hardly anything of a token's time is spent on computing it."""
HOP_TOKENS: Final = 50
HOP_ROUNDS: Final = 15
"""Many short ones, in turns: what is left of a difference is small beside what the machine does from one second on."""


def rows() -> Iterator[Row]:
    """All rows of the section."""
    with tempfile.TemporaryDirectory(prefix="ullage-bench-") as state:
        yield from asyncio.run(_hops(Path(state)))
        yield from asyncio.run(_measured(model_folder(), Path(state, "real")))


async def _hops(state: Path) -> list[Row]:
    """What it costs that a token passes from rank to rank, and what of that is the way between two runners."""
    from tests.runner.shard import tiny_weights  # noqa: PLC0415 - brings MLX, which other sections do without

    folder = tiny_weights.write(state / "models" / "tiny", eos_token_id=None)
    tiny_weights.prepared(folder)
    async with started(folder, state / "tiny", runners=max(HOP_LAYERS)) as stack:
        one, two = [await stack.place(HOP_LAYERS[shards], concurrent=1) for shards in (1, 2)]
        async with rpc.channel(stack.addresses[0]) as channel:
            stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
            hops = [await _hop_seconds(stub, one, two) for _ in range(HOP_ROUNDS)]
        peer = dispatch_service_pb2.Peer(node_id=stack.nodes[1], address=stack.addresses[1])
        link = await links.Links(stack.nodes[0], SystemClock()).measure(peer)
    hop_us, echo_us = statistics.median(hops) * 1e6, link.latency.ToNanoseconds() / 1000
    return [
        Row("requests", "a hop: a token over two ranks less one over one, halved", hop_us, "us", "lower", 1000.0),
        Row("requests", "an activation there and back between runners", echo_us, "us", "lower", 1000.0),
    ]


async def _hop_seconds(stub: Any, over_one: str, over_two: str) -> float:
    one, two = [await token_seconds(stub, instance_id, HOP_TOKENS) for instance_id in (over_one, over_two)]
    return (two - one) / 2


async def _measured(folder: Path, state: Path) -> list[Row]:
    async with started(folder, state, runners=2) as stack:
        instance_id = await stack.place(LAYERS[2], concurrent=max(IN_FLIGHT))
        async with rpc.channel(stack.addresses[0]) as channel:
            stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
            found = await _in_flight(stub, instance_id)
            found += await _reused(stub, instance_id)
            # After a prompt of that length: what one leaves to the next, and to the allocator of memory, stays.
            found.append(await _left(stack, stub, instance_id))
            found += await _killed(stack, stub, instance_id)
    return found


async def _in_flight(stub: Any, instance_id: str) -> list[Row]:
    """Tokens a second of so many requests together."""
    await ask(stub, instance_id, 8, 8)
    rates: defaultdict[int, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for in_flight in IN_FLIGHT:
            rates[in_flight].append(await rate(stub, instance_id, in_flight))
    medians = {in_flight: statistics.median(found) for in_flight, found in rates.items()}
    return [
        Row(
            "requests",
            f"{in_flight} requests in flight over 2 shards",
            medians[in_flight],
            "tokens/s",
            "higher",
            target,
            medians[1],
            "1 in flight",
        )
        for in_flight, target in ((2, 1.3), (4, 1.6), (8, 1.6))
    ]


async def _reused(stub: Any, instance_id: str) -> list[Row]:
    """A prompt that was just answered, asked again."""
    first = (await ask(stub, instance_id, LONG_PROMPT_TOKENS, 1)).summary
    again = (await ask(stub, instance_id, LONG_PROMPT_TOKENS, 1)).summary
    name = f"a prompt of {LONG_PROMPT_TOKENS} tokens, {again.reused_prompt_tokens} of them computed before"
    return [
        Row("requests", name, again.prefill_seconds, "s", "lower", 0.5, first.prefill_seconds, "none computed before")
    ]


async def _left(stack: Stack, stub: Any, instance_id: str) -> Row:
    """Seconds from a client's leaving in the middle of an answer to the memory of every rank being back."""
    ranks = _shards(stack)
    before = [rank.memory_info().rss for rank in ranks]
    call = stub.Generate(request(instance_id, LONG_PROMPT_TOKENS, DECODED_TOKENS), timeout=WAIT_SECONDS)
    await anext(aiter(call))
    held = [rank.memory_info().rss for rank in ranks]
    began = time.perf_counter()
    call.cancel()
    halfway = [(there + then) / 2 for there, then in zip(held, before, strict=True)]
    while any(rank.memory_info().rss > half for rank, half in zip(ranks, halfway, strict=True)):
        await asyncio.sleep(0.01)
        assert time.perf_counter() - began < WAIT_SECONDS
    seconds = time.perf_counter() - began
    return Row("requests", "client gone: every rank's memory back", seconds, "s", "lower", 1.0)


async def _killed(stack: Stack, stub: Any, instance_id: str) -> list[Row]:
    """Seconds from the second rank's death in the middle of an answer to the client's and to the master's knowing."""
    asked = asyncio.create_task(ask(stub, instance_id, 8, DECODED_TOKENS * 8))
    await asyncio.sleep(1.0)
    victim = next(shard for shard in _shards(stack) if _option(shard, "--rank") == "1")
    began = time.perf_counter()
    victim.kill()
    await asyncio.wait([asked])
    told_seconds = time.perf_counter() - began
    asked.exception()
    await stack.until(lambda: stack.instance(instance_id).state == model_pb2.INSTANCE_STATE_FAILED)
    failed_seconds = time.perf_counter() - began
    return [
        Row("requests", "peer killed in an answer: the client told", told_seconds, "s", "lower", 5.0),
        Row("requests", "peer killed in an answer: the instance FAILED", failed_seconds, "s", "lower", 5.0),
    ]


def _shards(stack: Stack) -> list[psutil.Process]:
    return [child for runner in stack.runners for child in psutil.Process(runner.pid).children()]


def _option(shard: psutil.Process, name: str) -> str:
    command = shard.cmdline()
    return command[command.index(name) + 1]
