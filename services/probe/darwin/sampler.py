"""The macOS sampler: sysctl and host_statistics64 by libSystem, the commands where these fail, macmon last.

psutil is never asked for memory: it fails on whole releases of macOS. Not run on hardware; `conclude` is what
was tested, on recorded output.
"""

from __future__ import annotations

import ctypes
from typing import Final, NamedTuple, Protocol

from services.probe.darwin import sysctl
from services.probe.darwin.estimator import device_limit_bytes
from services.probe.darwin.host_statistics import HostStatistics
from services.probe.darwin.pages import PAGE_SIZES, freshened, from_counts
from services.probe.darwin.sysctl import Swap, Sysctl
from services.probe.failures import Failures
from services.probe.reading import Darwin, Pages, Reading, bounded
from ullage.v1 import node_pb2

LIBRARY: Final = "/usr/lib/libSystem.B.dylib"


class Seen(NamedTuple):
    """What was read, however it was."""

    numbers: dict[str, int]
    """By the names of sysctl."""
    swap: Swap = Swap()
    pages: Pages | None = None
    is_copy: bool = False
    """The pages are those of the time before, up to a second old."""


class MacmonMemory(NamedTuple):
    """What macmon says of memory."""

    total_bytes: int
    used_bytes: int
    """Programs, wired and compressed: what Activity Monitor calls used."""
    swap: Swap = Swap()


class Source(Protocol):
    """A way to ask macOS."""

    def read(self) -> Seen:
        """What there is to say now, at once. Never raises."""
        ...


class Helper(Protocol):
    """A program beside the probe that knows the memory as well."""

    def memory(self) -> MacmonMemory | None:
        """What it said lately, None where it is missing, silent or old."""
        ...


class DarwinSampler:
    """Reads the memory of a Mac."""

    def __init__(self, library: Source | None, commands: Source, helper: Helper) -> None:
        """`library` is None where libSystem cannot be used; the commands are run only where something is missing."""
        self._library = library
        self._commands = commands
        self._helper = helper

    def read(self) -> Reading:
        """The memory now. Never raises: what cannot be read is absent, and was counted."""
        seen = Seen({}) if self._library is None else self._library.read()
        if is_whole(seen):
            return conclude(seen, node_pb2.MEMORY_SOURCE_SYSCTL, None)
        asked = self._commands.read()
        source = node_pb2.MEMORY_SOURCE_SYSCTL if seen.pages is not None else node_pb2.MEMORY_SOURCE_VM_STAT
        return conclude(_filled(seen, asked), source, self._helper.memory())


def is_whole(seen: Seen) -> bool:
    """Nothing is missing that the level or an estimator needs."""
    return seen.pages is not None and {sysctl.TOTAL, sysctl.LEVEL} <= seen.numbers.keys()


def _filled(seen: Seen, other: Seen) -> Seen:
    """`seen`, with what is missing taken from `other`."""
    return Seen(
        other.numbers | seen.numbers,
        other.swap if seen.swap.total_bytes is None else seen.swap,
        other.pages if seen.pages is None else seen.pages,
        seen.is_copy,
    )


def conclude(seen: Seen, source: node_pb2.MemorySource.ValueType, helper: MacmonMemory | None) -> Reading:
    """The reading that `seen` makes; `helper` stands in for the memory where no pages are known.

    Available is what can be had without compressing: free, file-backed and purgeable pages. The rest of the
    memory is what Activity Monitor calls used (programs - purgeable + wired + compressor), less what the
    firmware keeps. Where only the page counts of sysctl are known, wired and compressor are not; sysctl is not limited
    either, so it says of a copy what is so now.
    """
    counted = _counted(seen.numbers)
    pages = counted if seen.pages is None else freshened(seen.pages, counted) if seen.is_copy else seen.pages
    total, swap = seen.numbers.get(sysctl.TOTAL) or None, seen.swap
    available = pages.reclaimable_bytes
    if helper is not None and (available is None or total is None):
        total, available = helper.total_bytes, helper.total_bytes - helper.used_bytes
        swap = helper.swap if swap.total_bytes is None else swap
        source = node_pb2.MEMORY_SOURCE_MACMON
    limit, assumed = device_limit_bytes(seen.numbers.get(sysctl.WIRED_LIMIT_MB), total)
    kernel_level = sysctl.level(seen.numbers.get(sysctl.LEVEL))
    return Reading(
        source=source,
        ram_total_bytes=total,
        ram_available_bytes=bounded(available, total),
        ram_free_bytes=bounded(pages.free_bytes, total),
        file_backed_bytes=pages.file_backed_bytes,
        swap_total_bytes=swap.total_bytes,
        swap_available_bytes=swap.available_bytes,
        wired_bytes=pages.wired_bytes,
        device_limit_bytes=limit,
        device_limit_assumed=assumed,
        darwin=Darwin(kernel_level, pages, bounded(seen.numbers.get(sysctl.USABLE), total), seen.is_copy),
        clamped=available is not None and total is not None and available > total,
        coarse=pages.compressor_bytes is None,
    )


def _counted(numbers: dict[str, int]) -> Pages:
    """The page counts of sysctl, which a released kernel has not all."""
    size = sysctl.page_size_bytes(numbers)
    return Pages() if size is None else from_counts(sysctl.page_counts(numbers), size)


def system_library() -> ctypes.CDLL:
    """LibSystem. Raises OSError where there is none."""
    return ctypes.CDLL(LIBRARY, use_errno=True)


class Library:
    """libSystem: everything in some ten microseconds, and no process."""

    def __init__(self, library: ctypes.CDLL, failures: Failures) -> None:
        """`library` is libSystem. Raises AttributeError where it has not these calls."""
        self._sysctl = Sysctl(library)
        self._statistics = HostStatistics(library)
        self._failures = failures

    def read(self) -> Seen:
        """What there is to say now."""
        told = self._failures.guard("host_statistics64", self._statistics.read)
        numbers, swap = self._sysctl.numbers(), self._sysctl.swap()
        if self._statistics.page_size_bytes in PAGE_SIZES:
            # sysctl tells this process's own instead, and counts the kernel's.
            numbers[sysctl.PAGE_SIZE] = self._statistics.page_size_bytes
        return Seen(numbers, swap) if told is None else Seen(numbers, swap, told.pages, told.is_copy)
