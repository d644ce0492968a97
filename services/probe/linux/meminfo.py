"""/proc/meminfo: the lines a reading needs, found by name; the file has fifty others."""

from __future__ import annotations

from typing import Final, NamedTuple

_BYTES_MAX: Final = 2**63
"""A larger figure is a negative one that was written as unsigned."""

_KEYS: Final = (
    b"\nMemTotal:",
    b"\nMemAvailable:",
    b"\nMemFree:",
    b"\nActive(file):",
    b"\nInactive(file):",
    b"\nSwapTotal:",
    b"\nSwapFree:",
    b"\nHugetlb:",
)


class Meminfo(NamedTuple):
    """What the file says, in bytes; None for a line that is missing or is no number."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    free_bytes: int | None = None
    file_backed_bytes: int | None = None
    """Page cache of files, active and inactive: without tmpfs, which "Cached" counts too."""
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    huge_pages_bytes: int | None = None
    """The pool of huge pages, used or not."""


def parse(text: bytes) -> Meminfo:
    """What `text` says. Never raises: what cannot be understood is None."""
    total, available, free, active, inactive, swap_total, swap_free, huge_pages = _sizes(b"\n" + text)
    file_backed = None if active is None or inactive is None else active + inactive
    return Meminfo(total, available, free, file_backed, swap_total, swap_free, huge_pages)


def _sizes(text: bytes) -> list[int | None]:
    """The sizes of `_KEYS`, in their order. One loop: a function for each key takes half as long again."""
    sizes: list[int | None] = []
    for key in _KEYS:
        start = text.find(key)
        end = text.find(b"kB", start) if start >= 0 else -1
        size = None
        if end >= 0:  # Else the line is missing, or cut off within the number.
            try:
                # A line without a unit runs on into the next one here, and is no number.
                size = int(text[start + len(key) : end]) * 1024
            except ValueError:
                size = None
        sizes.append(size if size is not None and 0 <= size < _BYTES_MAX else None)
    return sizes
