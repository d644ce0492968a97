"""sysctl: single figures of macOS by name, through libSystem, and as the command prints them. Not run on hardware.

Rules this module lives by:
- A slot for each name is made once; a call costs a microsecond, and is not limited as host_statistics64 is.
- A name this kernel does not have, or whose value has another size than expected, is unknown and not 0.
- The pressure level is 1, 2 or 4 and is not listed by `sysctl -a`; `vm.memory_pressure` is something else, the
  number of pages that are wanted.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from services.probe.darwin.pages import PAGE_SIZES
from services.probe.reading import bounded
from ullage.v1 import node_pb2

LEVEL: Final = "kern.memorystatus_vm_pressure_level"
TOTAL: Final = "hw.memsize"
USABLE: Final = "hw.memsize_usable"
PAGE_SIZE: Final = "hw.pagesize"
SWAP: Final = "vm.swapusage"
WIRED_LIMIT_MB: Final = "iogpu.wired_limit_mb"
CHIP: Final = "machdep.cpu.brand_string"
MODEL: Final = "hw.model"

PAGE_COUNTS: Final = {
    "vm.page_free_count": "free",
    "vm.page_speculative_count": "speculative",
    "vm.page_purgeable_count": "purgeable",
    "vm.page_pageable_external_count": "file_backed",
    "vm.page_pageable_internal_count": "anonymous",
}
"""Those a released kernel has: neither the wired ones nor the compressor's."""

NAMES: Final = (LEVEL, TOTAL, USABLE, PAGE_SIZE, WIRED_LIMIT_MB, SWAP, *PAGE_COUNTS)

_SWAP_STRUCT: Final = struct.Struct("<QQQIi")
_BYTES_MAX: Final = 2**63
_LINE: Final = re.compile(rb"^([a-z0-9_.]{1,64}):[ \t]*([^\r\n]{0,200})\r?$", re.MULTILINE)
_SWAP_TEXT: Final = re.compile(rb"total = (\d{1,12}[.,]\d{2})M\s+used = (\d{1,12}[.,]\d{2})M")

_LEVELS: Final = {
    1: node_pb2.PRESSURE_LEVEL_NORMAL,
    2: node_pb2.PRESSURE_LEVEL_WARNING,
    4: node_pb2.PRESSURE_LEVEL_CRITICAL,
}


class Swap(NamedTuple):
    """What of the swap files that exist is used. They grow on demand."""

    total_bytes: int | None = None
    available_bytes: int | None = None


def level(value: int | None) -> node_pb2.PressureLevel.ValueType | None:
    """The kernel's level: UNKNOWN for a number that is none, None for no number."""
    return None if value is None else _LEVELS.get(value, node_pb2.PRESSURE_LEVEL_UNKNOWN)


def number(value: bytes) -> int | None:
    """An integer of 4 or 8 bytes as the kernel writes it; None for any other size, and for a negative one."""
    if len(value) not in {4, 8}:
        return None
    read = int.from_bytes(value, "little", signed=True)
    return read if read >= 0 else None


def swap(value: bytes) -> Swap:
    """The structure behind vm.swapusage: total, available and used bytes, page size, encrypted."""
    if len(value) != _SWAP_STRUCT.size:
        return Swap()
    total, available, *_ = _SWAP_STRUCT.unpack(value)
    return Swap(total, bounded(available, total)) if total < _BYTES_MAX else Swap()


class Printed(NamedTuple):
    """What the command printed: the integers by name, and the swap."""

    numbers: dict[str, int]
    swap: Swap


def parse(text: bytes) -> Printed:
    """Lines of "name: value", in whatever order; what is not understood is left out. Never raises.

    Sizes of swap are in MiB with two decimals, after a comma where the machine's language has one.
    """
    values = dict(_LINE.findall(text))
    numbers = {
        name.decode(): int(value) for name, value in values.items() if value.isdigit() and 0 <= int(value) < _BYTES_MAX
    }
    found = _SWAP_TEXT.search(values.get(SWAP.encode(), b""))
    if found is None:
        return Printed(numbers, Swap())
    total, used = (int(float(size.replace(b",", b".")) * 2**20) for size in found.groups())
    return Printed(numbers, Swap(total, max(0, total - used)))


def command(names: Sequence[str] = NAMES) -> tuple[str, ...]:
    """One process for all names; those the kernel lacks go to stderr, and make the exit status 1."""
    return ("/usr/sbin/sysctl", *names)


def page_counts(numbers: dict[str, int]) -> dict[str, int]:
    """The page counts among `numbers`, by the names of Pages' fields."""
    return {field: numbers[name] for name, field in PAGE_COUNTS.items() if name in numbers}


def page_size_bytes(numbers: dict[str, int]) -> int | None:
    """The size of the pages that are counted, None where it is none that a Mac has."""
    size = numbers.get(PAGE_SIZE)
    return size if size in PAGE_SIZES else None


class _Slot:
    """One name, with room for its value, ready to be asked."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name.encode()
        self._size = size
        self.value = ctypes.create_string_buffer(size)
        self.length = ctypes.c_size_t()
        self.pointer, self.length_pointer = ctypes.byref(self.value), ctypes.byref(self.length)

    def reset(self) -> None:
        """The length goes in and comes out: it must be set before every call."""
        self.length.value = self._size


class Sysctl:
    """The figures of this Mac, asked by name."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library` is libSystem."""
        self._call = library.sysctlbyname
        self._call.restype = ctypes.c_int
        self._slots = {name: _Slot(name, 8) for name in NAMES if name != SWAP}
        self._swap = _Slot(SWAP, _SWAP_STRUCT.size)

    def numbers(self) -> dict[str, int]:
        """Every figure this kernel has, by name."""
        return dict(self._known())

    def _known(self) -> Iterator[tuple[str, int]]:
        for name, slot in self._slots.items():
            if (read := number(self._ask(slot))) is not None:
                yield name, read

    def swap(self) -> Swap:
        """What of the swap is used."""
        return swap(self._ask(self._swap))

    def text(self, name: str) -> str | None:
        """A figure that is a text, such as the model; None where the kernel has none."""
        value = self._ask(_Slot(name, 256)).partition(b"\0")[0]
        return value.decode("utf-8", "replace") or None

    def _ask(self, slot: _Slot) -> bytes:
        slot.reset()
        if self._call(slot.name, slot.pointer, slot.length_pointer, None, 0) != 0:
            return b""
        return slot.value.raw[: slot.length.value]
