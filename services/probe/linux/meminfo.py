"""/proc/meminfo: the lines a reading needs, found by name; the file has fifty others."""

from __future__ import annotations

from typing import Final, NamedTuple

_BYTES_MAX: Final = 2**63
"""A larger figure is a negative one that was written as unsigned."""


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
    text = b"\n" + text
    active, inactive = _bytes(text, b"\nActive(file):"), _bytes(text, b"\nInactive(file):")
    return Meminfo(
        total_bytes=_bytes(text, b"\nMemTotal:"),
        available_bytes=_bytes(text, b"\nMemAvailable:"),
        free_bytes=_bytes(text, b"\nMemFree:"),
        file_backed_bytes=None if active is None or inactive is None else active + inactive,
        swap_total_bytes=_bytes(text, b"\nSwapTotal:"),
        swap_free_bytes=_bytes(text, b"\nSwapFree:"),
        huge_pages_bytes=_bytes(text, b"\nHugetlb:"),
    )


def _bytes(text: bytes, key: bytes) -> int | None:
    start = text.find(key)
    if start < 0:
        return None
    start += len(key)
    end = text.find(b"kB", start)
    if end < 0:
        return None  # Cut off within the number.
    try:
        # A line without a unit runs on into the next one here, and is no number.
        value = int(text[start:end]) * 1024
    except ValueError:
        return None
    return value if 0 <= value < _BYTES_MAX else None
