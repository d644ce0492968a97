"""What loading a part of a model costs, and what a runner costs that runs nothing: from the system's own counters."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.model_folder import read_manifest
from tests.runner.shard import ring

RUNNER_BYTES_MAX = 100 << 20


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="reads the counters of /proc")
async def test_a_third_of_the_layers_reads_and_holds_a_third_of_their_bytes(smollm2_folder: Path) -> None:
    model = read_manifest(smollm2_folder)
    first, end = 10, 20
    stored_bytes = sum(layer.weight.stored_bytes for layer in model.layers[first:end])
    held_bytes = sum(layer.weight.parameters * 4 for layer in model.layers[first:end])

    async with ring.children(3) as started:
        middle = psutil.Process(started[1].process.pid)
        before = middle.io_counters().read_chars, middle.memory_info().rss
        cut = ring.assignments(model, [one.address for one in started], (first, end))
        await asyncio.gather(*(one.load(part, smollm2_folder) for one, part in zip(started, cut, strict=True)))
        read_bytes = middle.io_counters().read_chars - before[0]
        grown_bytes = middle.memory_info().rss - before[1]

    assert read_bytes == pytest.approx(stored_bytes, rel=0.1)
    assert grown_bytes == pytest.approx(held_bytes, rel=0.1)


def test_a_runner_that_runs_nothing_takes_no_more_than_a_hundred_mebibytes(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    runner = subprocess.Popen(
        [
            *(sys.executable, "-m", "services.runner", "--master", "127.0.0.1:1", "--listen", "127.0.0.1:0"),
            *("--state-dir", str(tmp_path), "--models-dir", str(tmp_path), "--ready-file", str(ready)),
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        process = psutil.Process(runner.pid)
        for _ in range(600):
            if ready.exists():
                break
            psutil.wait_procs([process], timeout=0.1)
        assert ready.exists()
        assert process.memory_info().rss <= RUNNER_BYTES_MAX
        assert process.children() == []
    finally:
        runner.terminate()
        assert runner.wait(60) == 0
