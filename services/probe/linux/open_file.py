"""A small file of /proc or /sys that is kept open and read again and again from its start.

Opening costs as much as reading, and the kernel makes the content anew at every read from offset 0.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from services.probe.failures import Failures

_BYTES_MAX: Final = 16 * 1024
"""Twice the longest memory.stat seen; /proc/meminfo has 1.5 KiB."""

_NOT_OPEN: Final = -1


class OpenFile:
    """One file, opened at its first reading and again at the next one after a failure."""

    def __init__(self, path: Path, failures: Failures) -> None:
        self._path = path
        self._failures = failures
        self._fd = _NOT_OPEN

    def read(self) -> bytes | None:
        """What the file holds now, up to 16 KiB; None when it cannot be read, which is counted."""
        try:
            if self._fd == _NOT_OPEN:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._fd, _BYTES_MAX, 0)
        except OSError as error:
            self._failures.add(str(self._path), error)
            self.close()
            return None

    def close(self) -> None:
        """Let go of the file; another `read` opens it again."""
        if self._fd != _NOT_OPEN:
            os.close(self._fd)
            self._fd = _NOT_OPEN


def existing(path: Path, failures: Failures) -> OpenFile | None:
    """The file where this kernel has it, None where it has not: nothing is wrong about that."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        failures.add(str(path), error)
        return None
    return OpenFile(path, failures)


def whole_text(path: Path, failures: Failures) -> str:
    """A file that is read once, "" where this kernel has none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        failures.add(str(path), error)
        return ""
