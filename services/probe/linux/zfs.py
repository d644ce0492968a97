"""ZFS's cache, which is no page cache: the kernel counts it as used although it shrinks when asked.

It is the machine's. A container that lxcfs tells of its own memory sees it too, and holds nothing of it.

name                            type data
c_min                           4    1073741824
size                            4    12884901888
"""

from __future__ import annotations

import re
from typing import Final

_LINE: Final = re.compile(rb"^(c_min|size)\s+\d+\s+(\d{1,18})\s*$", re.MULTILINE)


def parse(text: bytes) -> int | None:
    """The bytes it gives back, down to its minimum; None where `text` does not say both. Never raises."""
    figures = dict(_LINE.findall(text))
    if len(figures) < 2:
        return None
    return max(0, int(figures[b"size"]) - int(figures[b"c_min"]))
