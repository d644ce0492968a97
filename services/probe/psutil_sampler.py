"""The sampler for every system that has none of its own: what psutil gives, and no stall information."""

from __future__ import annotations

import psutil

from services.probe.failures import Failures
from services.probe.reading import Reading, bounded
from ullage.v1 import node_pb2


class PsutilSampler:
    """Reads the memory through psutil."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures

    def read(self) -> Reading:
        """The memory now. Never raises: psutil fails on whole releases of macOS, and is then absent."""
        memory = self._failures.guard("psutil.virtual_memory", psutil.virtual_memory)
        swap = self._failures.guard("psutil.swap_memory", psutil.swap_memory)
        if memory is None or memory.total <= 0:
            return Reading(source=node_pb2.MEMORY_SOURCE_PSUTIL)
        available, free = (bounded(max(value, 0), memory.total) for value in (memory.available, memory.free))
        return Reading(
            source=node_pb2.MEMORY_SOURCE_PSUTIL,
            ram_total_bytes=memory.total,
            ram_available_bytes=available,
            ram_free_bytes=free,
            wired_bytes=getattr(memory, "wired", None),
            swap_total_bytes=None if swap is None else swap.total,
            swap_available_bytes=None if swap is None else bounded(max(swap.free, 0), swap.total),
            clamped=(available, free) != (memory.available, memory.free),
        )
