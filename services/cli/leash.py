"""Ends the services of a command that was killed before it could end them itself.

Run as a process of its own, in its own session, with a pipe as stdin: the command writes "+PID" for each process it
starts and "-PID" for each it has seen end. The pipe closes when the command ends, however it ends; whatever is
left then is asked to stop with SIGTERM, and killed after a grace. Works wherever pipes do, unlike a signal on the
parent's death, and asks nothing of the services.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from typing import Final

GRACE_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.05


def held(lines: Iterable[str]) -> set[int]:
    """The processes named by `lines` that are still running when the lines end."""
    pids: set[int] = set()
    for line in lines:
        pid = int(line[1:])
        if line.startswith("+"):
            pids.add(pid)
        else:
            pids.discard(pid)
    return pids


def end(pids: set[int]) -> None:
    """Stop `pids`: SIGTERM first, SIGKILL for those that are still there after the grace."""
    left = {pid for pid in pids if _signalled(pid, signal.SIGTERM)}
    deadline = time.monotonic() + GRACE_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        left = {pid for pid in left if _signalled(pid, 0)}
    for pid in left:
        _signalled(pid, signal.SIGKILL)


def _signalled(pid: int, number: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


if __name__ == "__main__":
    end(held(sys.stdin))
