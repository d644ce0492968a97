"""libSystem of a Mac that is as a test says, called as ctypes calls it."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

from services.probe.reading import Pages

ARRAY_TOO_LARGE = -307


def packed(pages: Pages, page_size: int, count: int = 38, faults: int = 5) -> bytes:
    """The structure the kernel would write for `pages`, `count` integers long."""

    def counted(size: int | None) -> int:
        return (size or 0) // page_size

    free = counted(pages.free_bytes) + counted(pages.speculative_bytes)
    queues = map(counted, (pages.active_bytes, pages.inactive_bytes, pages.wired_bytes))
    purgeable, speculative = counted(pages.purgeable_bytes), counted(pages.speculative_bytes)
    swapped, compressor = counted(pages.swapped_out_bytes), counted(pages.compressor_bytes)
    external, internal = counted(pages.file_backed_bytes), counted(pages.anonymous_bytes)
    counters = (1, 2, 3, 4, faults, 6, 7, 8, 9)
    fields = (free, *queues, *counters, purgeable, speculative, 10, 11, 12, swapped, compressor, 13, external, internal)
    written = struct.pack("<4I9Q2I4Q4IQ", *fields, counted(pages.compressed_bytes))
    assert len(written) == 38 * 4
    return written + b"\xff" * (count - 38) * 4


class Call:
    """A function of ctypes: callable, told its types, and counted."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.argtypes: object = None
        self.restype: object = None
        self.calls = 0

    def __call__(self, *arguments: Any) -> int:
        self.calls += 1
        return int(self._function(*arguments))


class LibSystem:
    """A Mac. `integers` is how many the kernel has, `least` how many it wants to be asked for."""

    def __init__(self, written: bytes, numbers: dict[str, bytes], *, integers: int = 38, least: int = 0) -> None:
        self.written = written
        self.numbers = numbers
        self.integers = integers
        self.least = least
        self.asked: list[int] = []
        """The counts that were given with the calls of host_statistics64."""
        self.mach_host_self = Call(lambda: 7)
        self.host_page_size = Call(self._page_size)
        self.host_statistics64 = Call(self._statistics)
        self.sysctlbyname = Call(self._sysctl)

    def _page_size(self, _: object, size: Any) -> int:
        size._obj.value = 16384
        return 0

    def _statistics(self, _: object, flavor: int, buffer: Any, count: Any) -> int:
        assert flavor == 4
        self.asked.append(count._obj.value)
        if count._obj.value < self.least:
            count._obj.value = self.least
            return ARRAY_TOO_LARGE
        given = min(count._obj.value, self.integers)
        ctypes.memmove(buffer._obj, self.written, min(given * 4, len(self.written)))
        count._obj.value = given
        return 0

    def _sysctl(self, name: bytes, value: Any, length: Any, *_: object) -> int:
        said = self.numbers.get(name.decode())
        if said is None or length._obj.value < len(said):
            return -1
        value._obj.raw = said.ljust(len(value._obj), b"\0")
        length._obj.value = len(said)
        return 0
