"""A lock file beside the log: one master writes it, and a second one is told who does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import IO

if sys.platform == "win32":
    import msvcrt

    def _try_lock(file: IO[str]) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _try_lock(file: IO[str]) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class LogLockedError(Exception):
    """Another process writes this log; the message names it."""


class LogLock:
    """The right to write a log, from `__init__` until `release` or the end of the process, however it ends."""

    def __init__(self, log_path: Path) -> None:
        """Take the lock. Raises LogLockedError when another process has it."""
        path = log_path.with_name(log_path.name + ".lock")
        self._file = path.open("a+")
        try:
            _try_lock(self._file)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise LogLockedError(
                f"another master (pid {holder}) writes {log_path}: stop it, or give this one another log with --log"
            ) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let another process write the log. The file stays: removing it would race with whoever opens it."""
        self._file.close()
