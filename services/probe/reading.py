"""One reading of a node's memory: what the OS said, and nothing concluded from it.

Rules this module lives by:
- What the OS did not say is None. Zero is a measurement.
- A Reading is within its bounds: what is free or available never exceeds its total. `bounded` sees to it.
"""

from __future__ import annotations

from typing import NamedTuple

from ullage.v1 import node_pb2


class Stall(NamedTuple):
    """Pressure stall information of one file: of the whole machine, or of one cgroup.

    The totals count microseconds since the kernel started, and are fresh at every read; the averages over
    10 s move every 2 s and lag.
    """

    some_total_us: int | None = None
    full_total_us: int | None = None
    some_avg10_pct: float | None = None
    full_avg10_pct: float | None = None


class Reading(NamedTuple):
    """What one reading of the memory gave. A frozen dataclass of this size takes four times as long to make."""

    source: node_pb2.MemorySource.ValueType
    ram_total_bytes: int | None = None
    ram_available_bytes: int | None = None
    ram_free_bytes: int | None = None
    file_backed_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_available_bytes: int | None = None
    wired_bytes: int | None = None
    cgroup_limit_bytes: int | None = None
    """The tightest limit on this process that is below the machine's memory; None where there is none."""
    cgroup_used_bytes: int | None = None
    """What is used of that limit, the file cache that goes when asked left out."""
    cgroup_available_bytes: int | None = None
    """The least room left in any cgroup above this process that has a limit."""
    host_stall: Stall | None = None
    cgroup_stall: Stall | None = None
    oom_events: int | None = None
    """Times this process's cgroup ran out of memory, since it was made."""
    limit_events: int | None = None
    """Times this process's cgroup was held at its limit, since it was made."""
    clamped: bool = False
    """Some figure was outside its bounds and was brought inside."""

    @property
    def total_bytes(self) -> int | None:
        """The memory this process may hope for: the machine's, or its tightest limit where that is less."""
        return bounded(self.ram_total_bytes, self.cgroup_limit_bytes)

    @property
    def available_bytes(self) -> int | None:
        """What of `total_bytes` can be had without swapping, as the kernel and the cgroups say."""
        return bounded(bounded(self.ram_available_bytes, self.cgroup_available_bytes), self.cgroup_limit_bytes)


def bounded(value: int | None, most: int | None) -> int | None:
    """`value`, or `most` where it exceeds that."""
    return most if value is not None and most is not None and value > most else value
