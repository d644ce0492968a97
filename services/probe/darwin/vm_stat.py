"""What the command `vm_stat` prints: the pages of macOS by use, in words that are English on every machine.

    Mach Virtual Memory Statistics: (page size of 16384 bytes)
    Pages free:                                    50667.
    "Translation faults":                    15161588453.

A line is a name, the last colon, a number and a full stop; macOS 26 indents wider, and M5 has lines of its own.
The page size stands in the first line and nowhere else: 4096 bytes on Intel, 16384 on Apple silicon.
"""

from __future__ import annotations

import re
from typing import Final

from services.probe.darwin.pages import PAGE_SIZES, from_counts
from services.probe.reading import Pages

COMMAND: Final = ("/usr/bin/vm_stat",)

_PAGE_SIZE: Final = re.compile(rb"page size of (\d{4,6})\b")
_LINE: Final = re.compile(rb'^"?([A-Za-z][A-Za-z -]{0,60}?)"?:\s+(\d{1,19})\.?\s*$', re.MULTILINE)

_NAMES: Final = {
    b"Pages free": "free",
    b"Pages active": "active",
    b"Pages inactive": "inactive",
    b"Pages speculative": "speculative",
    b"Pages wired down": "wired",
    b"Pages purgeable": "purgeable",
    b"File-backed pages": "file_backed",
    b"Anonymous pages": "anonymous",
    b"Pages occupied by compressor": "compressor",
    # The size before compression: mistaken for RAM, it makes more than there is.
    b"Pages stored in compressor": "compressed",
    b"Swapouts": "swapped_out",
}


def parse(text: bytes, page_size_bytes: int | None = None) -> Pages | None:
    """What `text` says; `page_size_bytes` stands in for a first line that is missing. Never raises.

    None where the size of a page is unknown, since a guess would be four times wrong and look right, and where
    no line is understood.
    """
    found = _PAGE_SIZE.search(text)
    size = int(found[1]) if found is not None else page_size_bytes
    if size not in PAGE_SIZES:
        return None
    counts = {_NAMES[name]: int(count) for name, count in _LINE.findall(text) if name in _NAMES}
    return from_counts(counts, size) if counts else None
