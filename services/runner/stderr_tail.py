"""The last lines a process wrote, for whoever has to tell why it ended."""

from __future__ import annotations

from collections import deque
from typing import Final

LINES_MAX: Final = 20
LINE_BYTES_MAX: Final = 8 * 1024
"""What is kept of a line; a progress bar without a newline would otherwise grow for ever."""


class StderrTail:
    """The last LINES_MAX lines of what it is fed."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._partial = b""

    def feed(self, written: bytes) -> list[str]:
        """Take what was written next; returns the lines it completed."""
        *whole, partial = (self._partial + written).split(b"\n")
        self._partial = partial[:LINE_BYTES_MAX]
        lines = [_text(line) for line in whole]
        self._lines.extend(lines)
        return lines

    def lines(self) -> list[str]:
        """The last lines, oldest first, with the one that was never ended."""
        partial = [_text(self._partial)] if self._partial else []
        return [*self._lines, *partial][-LINES_MAX:]


def _text(line: bytes) -> str:
    return line[:LINE_BYTES_MAX].decode(errors="replace").rstrip("\r")
