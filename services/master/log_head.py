"""How far the log was acknowledged, in a file of its own beside it: what the log itself cannot know to be missing.

SQLite reads a WAL up to the first page that does not match, and says nothing of the rest; a database without its
WAL is only shorter. So the end is written down a second time after each commit. It is put on the platter now and
then, not at each commit: after a power cut it may say less than the log holds, never more.
"""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_FSYNC_COMMITS: Final = 1000
"""Commits between two fsyncs: about as often as the WAL is emptied."""


class Head(NamedTuple):
    """The end of the log, and the hash of the commit that made it."""

    sequence: int
    digest: bytes


def head_path(log_path: Path) -> Path:
    """Where the head of the log at `log_path` is kept."""
    return log_path.with_name(log_path.name + ".head")


def read_head(log_path: Path) -> Head | None:
    """What was last acknowledged; None where that was never written down, or cannot be read any more."""
    try:
        sequence, digest, crc = head_path(log_path).read_text().split()
        head = Head(int(sequence), bytes.fromhex(digest))
        return head if int(crc, 16) == _crc(head) else None
    except (OSError, ValueError):
        return None


def _crc(head: Head) -> int:
    return zlib.crc32(b"%d %s" % (head.sequence, head.digest))


class HeadFile:
    """The file, open for the one who writes the log."""

    def __init__(self, log_path: Path) -> None:
        """Open it, new where there is none."""
        self._file = os.open(head_path(log_path), os.O_RDWR | os.O_CREAT, 0o644)
        self._commits = 0

    def write(self, head: Head) -> None:
        """Note that everything up to `head` is acknowledged."""
        # One line of fixed width, so that a longer one never shows below it.
        line = b"%020d %s %08x\n" % (head.sequence, head.digest.hex().encode(), _crc(head))
        self._commits += 1
        # A full disk keeps this from being written, not the commit: it says less than the log holds, which it may.
        with suppress(OSError):
            os.pwrite(self._file, line, 0)
            if self._commits % _FSYNC_COMMITS == 0:
                os.fsync(self._file)

    def close(self) -> None:
        """Let go of it, on the platter."""
        with suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)
