"""Pressure stall information: /proc/pressure/memory, and memory.pressure of a cgroup.

    some avg10=0.00 avg60=0.00 avg300=0.00 total=0
    full avg10=0.00 avg60=0.00 avg300=0.00 total=0

"some" is the share of time in which at least one task waited for memory, "full" that in which all did.
"""

from __future__ import annotations

import re
from typing import Final

from services.probe.linux.open_file import OpenFile
from services.probe.reading import Stall

_LINE: Final = re.compile(rb"^(some|full) avg10=(\d{1,3}\.\d{1,6}) [^\n]*total=(\d{1,19})\r?$", re.MULTILINE)


def parse(text: bytes) -> Stall | None:
    """What `text` says; None when it holds neither line. Never raises."""
    some: tuple[float | None, int | None] = (None, None)
    full: tuple[float | None, int | None] = (None, None)
    for kind, average, total in _LINE.findall(text):
        values = min(float(average), 100.0), int(total)
        if kind == b"some":
            some = values
        else:
            full = values
    if some[1] is None and full[1] is None:
        return None
    return Stall(some_total_us=some[1], full_total_us=full[1], some_avg10_pct=some[0], full_avg10_pct=full[0])


class StallFile:
    """One such file, understood anew only where it says something new: while nothing stalls, it does not."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._text: bytes | None = None
        self._stall: Stall | None = None

    def read(self) -> Stall | None:
        """What it says now; None where it cannot be read, and where it says nothing."""
        text = self._file.read()
        if text != self._text:
            self._text = text
            self._stall = None if text is None else parse(text)
        return self._stall
