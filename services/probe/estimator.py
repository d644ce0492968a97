"""What a node can give, under three estimators that trust it less and less.

With A the available memory and T the total of a Reading (MemAvailable and MemTotal, or the room and the limit
of the tightest cgroup where those are less), and W and K the bounds of `room` on the whole of T:

    ceiling  = A           all the kernel says can be had without swapping
    balanced = A - K       what leaves the node short of CRITICAL: nothing has to be swapped
    strict   = A - W       what leaves it NORMAL: nothing is even stalled

MemAvailable is free memory, less the kernel's own reserve, plus the file cache and the slabs that go when
asked, half of both kept back where they are small (mm/show_mem.c, si_mem_available). Linux compresses nothing
unless told to, so "bounded compression" is none here. On Windows A is the physical memory available, or what
may still be committed where that is less. macOS has no such figure; `darwin.estimator` has its formulas.

Rules this module lives by:
- strict <= balanced <= ceiling <= T, always.
- Under CRITICAL all three are 0: a measured zero, flagged. Under UNKNOWN they are absent.
- An operator's override stands in for all three on every path, within T, and is flagged. It does not lift
  CRITICAL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from services.probe.darwin import estimator as darwin
from services.probe.reading import Reading
from services.probe.room import critical_bound_bytes, warning_bound_bytes
from ullage.v1 import node_pb2

Flag: TypeAlias = node_pb2.MemoryFlag.ValueType


@dataclass(frozen=True, slots=True)
class Override:
    """The operator's figure: so many bytes, or a share of the total. One of the two is set."""

    size_bytes: int | None = None
    fraction: float | None = None

    def within(self, total_bytes: int | None) -> int | None:
        """The bytes it stands for on a node of `total_bytes`; None for a share of an unknown total."""
        if self.fraction is not None:
            return None if total_bytes is None else int(total_bytes * self.fraction)
        if self.size_bytes is None or total_bytes is None:
            return self.size_bytes
        return min(self.size_bytes, total_bytes)


class Estimate(NamedTuple):
    """What can be given, in bytes, and how that was reached; None where it is unknown."""

    strict_bytes: int | None
    balanced_bytes: int | None
    ceiling_bytes: int | None
    flags: tuple[Flag, ...] = ()


def estimate(reading: Reading, level: node_pb2.PressureLevel.ValueType, override: Override | None) -> Estimate:
    """What the node of `reading`, which is under `level`, can give."""
    given = None if override is None else override.within(reading.total_bytes)
    flags: tuple[Flag, ...] = () if given is None else (node_pb2.MEMORY_FLAG_OVERRIDDEN,)
    if level == node_pb2.PRESSURE_LEVEL_CRITICAL:
        return Estimate(0, 0, 0, (*flags, node_pb2.MEMORY_FLAG_CRITICAL_ZEROED))
    if given is not None:
        return Estimate(given, given, given, flags)
    if reading.darwin is not None:
        strict, balanced, ceiling, coarse = darwin.figures(reading, reading.darwin, level)
        return Estimate(strict, balanced, ceiling, (node_pb2.MEMORY_FLAG_ESTIMATED,) if coarse else ())
    total, available = reading.total_bytes, reading.available_bytes
    if not total or available is None:
        return Estimate(None, None, None)
    return Estimate(
        strict_bytes=max(0, available - warning_bound_bytes(total)),
        balanced_bytes=max(0, available - critical_bound_bytes(total)),
        ceiling_bytes=available,
    )
