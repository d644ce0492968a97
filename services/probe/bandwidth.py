"""How fast this machine's memory is: a short copy, measured once at start in a process of its own, and kept.

    python -m services.probe.bandwidth        prints bytes read and written a second

A decode reads every weight for every token, so this bounds what a node can do. The copy takes 64 MiB and a
quarter of a second; where less than a gigabyte is available it is not tried.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from services.probe.failures import Failures
from ullage.v1 import node_pb2

MEASURE_SECONDS: Final = 0.25
ANSWER_SECONDS_MAX: Final = 60.0
ROUNDS_MIN: Final = 5
"""However long one takes: a machine that was busy with others in one round is not slow."""

AVAILABLE_BYTES_MIN: Final = 1 << 30
_ARRAY_BYTES: Final = 32 << 20
_THREADS_MAX: Final = 4
"""More than these hardly add: the memory is busy, not the cores."""


def measure(seconds: float = MEASURE_SECONDS) -> int:
    """Bytes read and written a second by copying, the best of the rounds within `seconds`, and of some at least."""
    import numpy as np  # noqa: PLC0415 - 16 MiB that the probe itself need not hold

    threads = min(_THREADS_MAX, os.cpu_count() or 1)
    sources = [np.ones(_ARRAY_BYTES // threads // 8) for _ in range(threads)]
    targets = [np.zeros_like(source) for source in sources]
    copied_bytes = 2 * sum(source.nbytes for source in sources)
    best, rounds = 0.0, 0
    with ThreadPoolExecutor(threads) as pool:
        end_s = time.perf_counter() + seconds
        while (started_s := time.perf_counter()) < end_s or rounds < ROUNDS_MIN:
            list(pool.map(np.copyto, targets, sources))
            rounds += 1
            best = max(best, copied_bytes / (time.perf_counter() - started_s))
    return int(best)


class Bandwidth:
    """The figure, once it is known."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._bytes_per_second: int | None = None
        self._roomy = asyncio.Event()

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Set the figure, and see from the sample's memory whether it may be measured."""
        if sample.memory.ram_available_bytes >= AVAILABLE_BYTES_MIN:
            self._roomy.set()
        if self._bytes_per_second is not None:
            sample.memory_bandwidth_bytes_per_second = self._bytes_per_second

    async def run(self) -> None:
        """Measure as soon as there is room, once."""
        await self._roomy.wait()
        try:
            self._bytes_per_second = await _ask()
        except (OSError, ValueError, RuntimeError) as error:
            self._failures.add("memory bandwidth", error)


async def _ask() -> int:
    """What another process measures. Raises OSError or ValueError where it says no number in time.

    RuntimeError where no thread may be started, which asyncio waits for the process with.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.probe.bandwidth",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(ANSWER_SECONDS_MAX):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    return int(output)


if __name__ == "__main__":
    print(measure())
