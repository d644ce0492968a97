"""host_statistics64(HOST_VM_INFO64): the pages of macOS by use, in one structure. Not run on hardware.

Rules this module lives by:
- The count is of 4-byte integers, goes in and comes out. 38 cover all that is read here; a kernel that knows more
  fields gives 38 all the same, and one that knows fewer says so. Asking for more than it knows writes a line into
  the kernel's log at every call.
- macOS 27 betas refuse 38 after some calls (-307) and write the count they want: it is tried once.
- Others than Apple's own programs are told the same thing again for the rest of a second when they have asked too
  often, all of them together 2 to 10 times. Nothing marks such a copy, but it is one to the last counter: faults go
  on at any moment on any machine.
- "free" includes the speculative pages here, and does not in vm_stat.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from services.probe.darwin.pages import PAGE_SIZES, from_counts
from services.probe.reading import Pages

HOST_VM_INFO64: Final = 4
COUNT_WANTED: Final = 38
_ARRAY_TOO_LARGE: Final = -307
_BUFFER_BYTES: Final = 4096

# free active inactive wire, 9 counters of 8 bytes, purgeable speculative, decompressions compressions swapins
# swapouts, compressor throttled external internal, stored in the compressor
_STRUCT: Final = struct.Struct("<4I 9Q 2I 4Q 4I Q")

_DISAGREEMENT_PCT: Final = 1
"""File-backed and anonymous pages are those in the queues, to a page; the rest is for copies made while they move."""


def parse(buffer: bytes, count: int, page_size_bytes: int) -> Pages | None:
    """What the kernel wrote, `count` integers of it. Never raises.

    None where there are fewer integers than are read, the size of a page is none, or the parts contradict the
    whole: the fields of a newer macOS then lie elsewhere.
    """
    if count < COUNT_WANTED or len(buffer) < _STRUCT.size or page_size_bytes not in PAGE_SIZES:
        return None
    fields = _STRUCT.unpack_from(buffer)
    free, active, inactive, wired = fields[:4]
    purgeable, speculative = fields[13:15]
    swapped_out = fields[18]
    compressor, _, external, internal, stored = fields[19:]
    pages = from_counts(
        {
            "free": free - speculative,
            "active": active,
            "inactive": inactive,
            "speculative": speculative,
            "wired": wired,
            "purgeable": purgeable,
            "file_backed": external,
            "anonymous": internal,
            "compressor": compressor,
            "compressed": stored,
            "swapped_out": swapped_out,
        },
        page_size_bytes,
    )
    return pages if _agrees(pages) else None


def _agrees(pages: Pages) -> bool:
    surplus, queued = pages.surplus_bytes, pages.uncompressed_bytes
    return surplus is not None and queued is not None and abs(surplus) * 100 <= queued * _DISAGREEMENT_PCT


class Told(NamedTuple):
    """What the kernel said."""

    pages: Pages
    is_copy: bool
    """It said the same before: these are the pages of then, up to a second ago."""


class HostStatistics:
    """The call, with its buffer and port made once. A port that is asked for at each call is leaked at each."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library` is libSystem. Raises AttributeError where it has no such call."""
        library.mach_host_self.restype = ctypes.c_uint32
        self._call: Callable[..., int] = library.host_statistics64
        self._host = ctypes.c_uint32(library.mach_host_self())
        self._buffer = (ctypes.c_uint32 * (_BUFFER_BYTES // 4))()
        self._count = ctypes.c_uint32()
        page_size = ctypes.c_size_t()
        library.host_page_size(self._host, ctypes.byref(page_size))
        self.page_size_bytes = page_size.value
        """Of the pages that the kernel counts, also where this process is translated (Rosetta) and has smaller ones."""
        self._answer = b""

    def read(self) -> Told:
        """The pages now. Raises OSError with the kernel's code, or ValueError for an answer that is no such thing."""
        code = self._ask(COUNT_WANTED)
        if code == _ARRAY_TOO_LARGE and COUNT_WANTED < self._count.value <= len(self._buffer):
            code = self._ask(self._count.value)
        if code != 0:
            raise OSError(code, f"host_statistics64 answers {code}")
        before, self._answer = self._answer, bytes(self._buffer)
        pages = parse(self._answer, self._count.value, self.page_size_bytes)
        if pages is None:
            raise ValueError(f"host_statistics64 gave {self._count.value} integers that do not agree")
        return Told(pages, self._answer == before)

    def _ask(self, count: int) -> int:
        self._count.value = count
        return self._call(self._host, HOST_VM_INFO64, ctypes.byref(self._buffer), ctypes.byref(self._count))
