"""What Windows says of its memory: physical pages, and the commit charge that it never lets exceed its limit.

    commit limit     = RAM + page files: all that may be promised to programs
    commit available = commit limit - what is promised already

Rules this module lives by:
- A program that asks for memory is refused by the commit charge, whatever is free: a model needs both. Windows
  counts a promise when it is made, and not when it is used.
- Physical available is free, zeroed and standby pages: what goes to whoever asks.
- The signal that memory is low comes at some 64 MiB: nothing but the end.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from services.probe.reading import Reading, bounded
from ullage.v1 import node_pb2

SIZE_BYTES: Final = 104

# size, commit total limit peak, physical total available, system cache, kernel total paged nonpaged, page size,
# handles processes threads
_STRUCT: Final = struct.Struct("<I4x10Q3I4x")
_BYTES_MAX: Final = 2**63


class Performance(NamedTuple):
    """PERFORMANCE_INFORMATION of a 64-bit Windows, in bytes."""

    commit_bytes: int
    commit_limit_bytes: int
    physical_bytes: int
    physical_available_bytes: int


def parse(buffer: bytes) -> Performance | None:
    """What the structure says; None where it is another or makes no sense. Never raises."""
    if len(buffer) != SIZE_BYTES:
        return None
    size, commit, limit, _, physical, available, _, _, _, _, page, *_ = _STRUCT.unpack(buffer)
    if size != SIZE_BYTES or page not in {4096, 8192, 16384, 65536} or not physical:
        return None
    sizes = [pages * page for pages in (commit, limit, physical, available)]
    return Performance(*sizes) if max(sizes) < _BYTES_MAX else None


def conclude(found: Performance | None, *, low: bool | None) -> Reading:
    """The reading that makes; `low` is Windows' own signal, None where it cannot be asked."""
    if found is None:
        return Reading(node_pb2.MEMORY_SOURCE_WINDOWS_COMMIT, memory_low=low)
    available = bounded(found.physical_available_bytes, found.physical_bytes)
    return Reading(
        node_pb2.MEMORY_SOURCE_WINDOWS_COMMIT,
        ram_total_bytes=found.physical_bytes,
        ram_available_bytes=available,
        ram_free_bytes=available,
        commit_limit_bytes=found.commit_limit_bytes,
        commit_available_bytes=max(0, found.commit_limit_bytes - found.commit_bytes),
        memory_low=low,
        clamped=available != found.physical_available_bytes or found.commit_bytes > found.commit_limit_bytes,
    )
