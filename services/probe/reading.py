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


class Pages(NamedTuple):
    """What Darwin's pages are used for, in bytes. The first four and the compressor are all that is not wired."""

    free_bytes: int | None = None
    """Without the speculative ones, which vm_stat shows apart."""
    active_bytes: int | None = None
    inactive_bytes: int | None = None
    speculative_bytes: int | None = None
    wired_bytes: int | None = None
    purgeable_bytes: int | None = None
    """Thrown away when asked; part of the anonymous ones."""
    file_backed_bytes: int | None = None
    """File cache in whatever queue, the speculative ones too: Darwin's "external"."""
    anonymous_bytes: int | None = None
    """Memory of programs: Darwin's "internal"."""
    compressor_bytes: int | None = None
    """RAM the compressor holds."""
    compressed_bytes: int | None = None
    """What it stands for: more than the RAM there is, at times."""
    swapped_out_bytes: int | None = None
    """Written to swap since the machine started."""

    @property
    def reclaimable_bytes(self) -> int | None:
        """Free, file-backed and purgeable: what Apple calls fully reclaimable, without compressing anything."""
        return added(self.free_bytes, self.file_backed_bytes, self.purgeable_bytes)

    @property
    def unwired_bytes(self) -> int | None:
        """All that is not wired, the compressor's own part too."""
        return added(self.uncompressed_bytes, self.compressor_bytes)

    @property
    def uncompressed_bytes(self) -> int | None:
        """All that is neither wired nor the compressor's: the kernel's measure of how well it is."""
        return added(self.free_bytes, self.active_bytes, self.inactive_bytes, self.speculative_bytes)

    @property
    def surplus_bytes(self) -> int | None:
        """File-backed and anonymous less the queues they lie in: exactly 0 in every true reading of one moment."""
        held = added(self.file_backed_bytes, self.anonymous_bytes)
        queued = added(self.active_bytes, self.inactive_bytes, self.speculative_bytes)
        return None if held is None or queued is None else held - queued


class Darwin(NamedTuple):
    """What only Darwin says."""

    kernel_level: node_pb2.PressureLevel.ValueType | None = None
    """The kernel's own level; UNKNOWN where it said something that is none, None where it could not be asked."""
    pages: Pages = Pages()
    usable_bytes: int | None = None
    """The memory less what the firmware keeps for itself."""
    is_copy: bool = False
    """The kernel told the wired pages and the compressor's as it did the time before: they say nothing of now."""


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
    """Events that say that this process's cgroup or one above it ran out of memory, since they were made."""
    limit_events: int | None = None
    """Times this process's cgroup was held at its limit or at one above it, since they were made."""
    stall_alarm: bool = False
    """The kernel's own trigger fired since the last reading: work stalled for long enough within its window."""
    reclaim_alarm: bool = False
    """This process's v1 cgroup announced since the last reading that little of its memory can be taken back."""
    arc_bytes: int | None = None
    """What ZFS's cache gives back when asked, which is not in what the kernel calls available."""
    huge_pages_bytes: int | None = None
    """The pool of huge pages: neither free nor anybody's to have."""
    commit_limit_bytes: int | None = None
    commit_available_bytes: int | None = None
    """What may still be promised of RAM and page file: Windows refuses more, whatever is free."""
    memory_low: bool | None = None
    """Windows has signalled that physical memory runs out."""
    device_limit_bytes: int | None = None
    """The most that the device lets a process use, None where nobody said."""
    device_limit_assumed: bool = False
    own_bytes: int | None = None
    """Resident in the processes of this node's own shards; part of what is used."""
    darwin: Darwin | None = None
    clamped: bool = False
    """Some figure was outside its bounds and was brought inside."""
    coarse: bool = False
    """Some figure stands for a better one that could not be read."""

    @property
    def total_bytes(self) -> int | None:
        """The memory this process may hope for: the machine's, or its tightest limit where that is less."""
        return bounded(self.ram_total_bytes, self.cgroup_limit_bytes)

    @property
    def available_bytes(self) -> int | None:
        """What of `total_bytes` can be had without swapping, as the kernel, its caches and the limits say."""
        available = self.ram_available_bytes
        if available is not None and self.arc_bytes:
            available = bounded(available + self.arc_bytes, self.ram_total_bytes)
        if self.cgroup_limit_bytes is not None:
            available = bounded(bounded(available, self.cgroup_available_bytes), self.cgroup_limit_bytes)
        return bounded(available, self.commit_available_bytes)


def bounded(value: int | None, most: int | None) -> int | None:
    """`value`, or `most` where it exceeds that."""
    return most if value is not None and most is not None and value > most else value


def added(*parts: int | None) -> int | None:
    """The sum of `parts`, None where one is unknown."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
