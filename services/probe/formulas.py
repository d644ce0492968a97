"""Where each figure of a MemorySample comes from, in words, so that a person can compare it with other tools."""

from __future__ import annotations

from typing import Final

from ullage.v1 import node_pb2

_DARWIN: Final = {
    "ram_total_bytes": "hw.memsize",
    "ram_available_bytes": "free + file-backed + purgeable pages: what can be had without compressing",
    "ram_free_bytes": "vm_stat's Pages free, without the speculative ones; next to none on a Mac that is well",
    "wired_bytes": "pages that can be neither compressed nor swapped, a model on the GPU among them",
    "compressed_bytes": "RAM the compressor occupies, not what it stands for",
    "purgeable_bytes": "what programs let go of when asked; part of anonymous",
    "file_backed_bytes": "cache of files, the speculative pages too",
    "anonymous_bytes": "memory of programs; Activity Monitor shows it less the purgeable part",
    "swap_available_bytes": "of the swap files there are now; more are made on demand",
    "device_limit_bytes": "iogpu.wired_limit_mb, or 85 % of the memory where nobody set it",
    "strict_available_bytes": "least of available - reserve and unwired - 2.5 x compressed (darwin/estimator.py)",
    "balanced_available_bytes": "strict, and what compressing up to a quarter of programs' memory gives",
    "ceiling_available_bytes": "total - wired - reserve, within the device's limit",
    "pressure_pct": "the compressor's share of all that is not wired: 50 is the kernel's WARNING, 66 its CRITICAL",
}

_LINUX: Final = {
    "ram_total_bytes": "MemTotal, or the tightest cgroup limit below it",
    "ram_available_bytes": "MemAvailable + ARC above its minimum, within the room of every cgroup limit",
    "ram_free_bytes": "MemFree: no measure of anything, caches fill it",
    "file_backed_bytes": "Active(file) + Inactive(file): the page cache without tmpfs",
    "swap_total_bytes": "SwapTotal; unknown under a cgroup's limit, where the machine's is not to be had",
    "swap_available_bytes": "SwapFree",
    "cgroup_limit_bytes": "the least of memory.max and memory.high (v1: limit_in_bytes) up to the mount",
    "cgroup_used_bytes": "usage - inactive_file - active_file: the cache of files goes when asked, tmpfs does not",
    "arc_bytes": "ZFS's size - c_min",
    "huge_pages_bytes": "Hugetlb: the pool of huge pages, neither free nor available",
    "stall_some_pct": "share of the last 2 s in which some task waited (PSI total; avg10 at a first reading)",
    "stall_full_pct": "share in which all tasks did",
}

_WINDOWS: Final = {
    "ram_total_bytes": "PhysicalTotal",
    "ram_available_bytes": "the less of PhysicalAvailable and what may still be committed",
    "commit_limit_bytes": "RAM and page files: all that may be promised to programs",
    "commit_available_bytes": "limit - what is promised already; programs are refused by this",
}

_PSUTIL: Final = {
    "ram_total_bytes": "psutil.virtual_memory().total",
    "ram_available_bytes": "psutil's available, which means something else on every system",
}

_ALL: Final = {
    "own_bytes": "resident in the processes of this node's shards; part of what is used",
    "strict_available_bytes": "available - W, 10 % of the total in 1 to 8 GiB, a quarter at most: nothing stalls",
    "balanced_available_bytes": "available - K, 5 % of the total in 0.5 to 4 GiB, an eighth at most: nothing swaps",
    "ceiling_available_bytes": "available",
    "pressure_pct": "50 with W left, 80 with K, 100 with none; or 5 x some stalls up to 75, or 4 x full stalls",
}

_SOURCES: Final = {
    node_pb2.MEMORY_SOURCE_PROCFS: ("/proc/meminfo, /proc/pressure/memory and the cgroup's files", _LINUX),
    node_pb2.MEMORY_SOURCE_PSUTIL: ("psutil, since this system has no sampler of its own", _PSUTIL),
    node_pb2.MEMORY_SOURCE_SYSCTL: ("sysctl and host_statistics64, asked through libSystem", _DARWIN),
    node_pb2.MEMORY_SOURCE_VM_STAT: ("the commands sysctl and vm_stat, since the library did not answer", _DARWIN),
    node_pb2.MEMORY_SOURCE_MACMON: ("macmon, since nothing else answered: total - used", _DARWIN),
    node_pb2.MEMORY_SOURCE_WINDOWS_COMMIT: ("GetPerformanceInfo and the low-memory notification", _WINDOWS),
}


def source_words(source: node_pb2.MemorySource.ValueType) -> str:
    """What was asked, "" for a source this release does not know."""
    return _SOURCES[source][0] if source in _SOURCES else ""


def formulas(sample: node_pb2.MemorySample) -> dict[str, str]:
    """How each figure was reached, by the name of its field; an override and CRITICAL say so."""
    words = {**_ALL, **(_SOURCES[sample.source][1] if sample.source in _SOURCES else {})}
    if node_pb2.MEMORY_FLAG_OVERRIDDEN in sample.flags:
        words |= dict.fromkeys(_FIGURES, "the operator's figure, within the total")
    if node_pb2.MEMORY_FLAG_CRITICAL_ZEROED in sample.flags:
        words |= dict.fromkeys(_FIGURES, "0 under CRITICAL, whatever is left")
    return words


_FIGURES: Final = ("strict_available_bytes", "balanced_available_bytes", "ceiling_available_bytes")
