"""/proc/meminfo: the lines a reading needs, found by name; the file has fifty others.

A kernel pads its numbers, so that from one reading to the next no line moves. `Parser` remembers where they lay, and
sees that they lie there still: that takes a third of the time of finding them.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

_BYTES_MAX: Final = 2**63
"""A larger figure is a negative one that was written as unsigned."""

KEYS: Final = (
    b"\nMemTotal:",
    b"\nMemFree:",
    b"\nMemAvailable:",
    b"\nActive(file):",
    b"\nInactive(file):",
    b"\nSwapTotal:",
    b"\nSwapFree:",
    b"\nHugetlb:",
)
"""What is read of the file, in the kernel's order. The last is missing where it was built without huge pages."""

_UNIT: Final = b"kB"


class Meminfo(NamedTuple):
    """What the file says, in bytes; None for a line that is missing or is no number."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    available_bytes: int | None = None
    file_backed_bytes: int | None = None
    """Page cache of files, active and inactive: without tmpfs, which "Cached" counts too."""
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    huge_pages_bytes: int | None = None
    """The pool of huge pages, used or not."""


def parse(text: bytes) -> Meminfo:
    """What `text` says. Never raises: what cannot be understood is None."""
    total, free, available, active, inactive, swap_total, swap_free, huge_pages = _sizes(b"\n" + text)
    file_backed = None if active is None or inactive is None else active + inactive
    return Meminfo(total, free, available, file_backed, swap_total, swap_free, huge_pages)


def _sizes(text: bytes) -> list[int | None]:
    """The sizes of `KEYS`, in their order."""
    sizes: list[int | None] = []
    for key in KEYS:
        start = text.find(key)
        end = text.find(_UNIT, start) if start >= 0 else -1
        size = None
        if end >= 0:  # Else the line is missing, or cut off within the number.
            try:
                # A line without a unit runs on into the next one here, and is no number.
                size = int(text[start + len(key) : end]) * 1024
            except ValueError:
                size = None
        sizes.append(size if size is not None and 0 <= size < _BYTES_MAX else None)
    return sizes


def is_containers(mountinfo: str) -> bool:
    """Whether a mount lies over /proc/meminfo, as lxcfs does it: then it tells of a container, not of the machine."""
    return any(line.split(" ")[4:5] == ["/proc/meminfo"] for line in mountinfo.splitlines())


class Parser:
    """`parse` for a file that is read again and again."""

    def __init__(self) -> None:
        self._layout: _Layout | None = None

    def parse(self, text: bytes) -> Meminfo:
        """What `text` says. Never raises: what cannot be understood is None."""
        found = None if self._layout is None else self._layout.read(text)
        if found is None:
            self._layout = _Layout.of(text)
            return parse(text)
        return found


class _Layout:
    """Where the lines of a file lie."""

    def __init__(self, form: str, keys: tuple[bytes, ...], length: int) -> None:
        self._struct = struct.Struct(form)
        self._keys = keys
        self._units = (_UNIT,) * len(keys)
        self._length = length

    @classmethod
    def of(cls, text: bytes) -> _Layout | None:
        """Where they lie in `text`, None where one but the last is missing, or they are in another order."""
        form, at = "<", 0
        keys: list[bytes] = []
        for key in KEYS:
            start = text.find(key, at) if keys else text.find(key[1:], 0, len(key) - 1)
            unit = text.find(_UNIT, start) if start >= 0 else -1
            if unit < 0:
                break
            keys.append(key if keys else key[1:])
            form += f"{start - at}x{len(keys[-1])}s{unit - start - len(keys[-1])}s{len(_UNIT)}s"
            at = unit + len(_UNIT)
        if len(keys) < len(KEYS) - 1 or (len(keys) < len(KEYS) and KEYS[-1] in text):
            return None
        return cls(form, tuple(keys), len(text))

    def read(self, text: bytes) -> Meminfo | None:
        """What `text` says, None where its lines lie elsewhere or one is no size."""
        if len(text) != self._length:
            return None
        fields = self._struct.unpack_from(text)  # A name, a number and a unit for each line.
        if fields[::3] != self._keys or fields[2::3] != self._units:
            return None
        try:
            sizes = [int(number) * 1024 for number in fields[1::3]]
        except ValueError:
            return None
        if min(sizes) < 0 or max(sizes) >= _BYTES_MAX:
            return None
        sizes[3:5] = (sizes[3] + sizes[4],)
        return Meminfo(*sizes)
