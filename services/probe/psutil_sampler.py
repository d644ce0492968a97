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
        return conclude(memory, self._failures.guard("psutil.swap_memory", psutil.swap_memory))


def conclude(memory: object, swap: object) -> Reading:
    """The reading that psutil's two answers make, either of which may be None."""
    total = _size(memory, "total")
    if not total:
        return Reading(source=node_pb2.MEMORY_SOURCE_PSUTIL)
    said = _size(memory, "available"), _size(memory, "free")
    available, free = (None if size is None else min(max(size, 0), total) for size in said)
    swap_total, swap_free = _size(swap, "total"), _size(swap, "free")
    return Reading(
        source=node_pb2.MEMORY_SOURCE_PSUTIL,
        ram_total_bytes=total,
        ram_available_bytes=available,
        ram_free_bytes=free,
        wired_bytes=_size(memory, "wired"),
        swap_total_bytes=swap_total,
        swap_available_bytes=None if swap_free is None else bounded(max(swap_free, 0), swap_total),
        clamped=(available, free) != said,
    )


def _size(figures: object, name: str) -> int | None:
    """A figure by its name; None where this system has none, or no number for it."""
    size = getattr(figures, name, None)
    return size if isinstance(size, int) else None
