"""The kernel's own word that memory is pressed, which need not wait for the next reading.

Rules this module lives by:
- A stall trigger watches the process's own cgroup, or the machine where that has none: 15 % of 2 s in which some
  work waited. Windows of whole 2 s are all that an ordinary user may have.
- A cgroup's memory.events is watched too: it changes when the cgroup is held at a limit or runs out of memory.
- An alarm only has the memory read at once, and says that it rang; what that means is judged with the reading.
- A kernel that offers neither leaves the reading at its period. What cannot be watched is counted once.

asyncio's selectors know nothing of POLLPRI, which these files answer with: so each is watched by an epoll of its
own, and that by asyncio. Being asked whether it rang is what resets a trigger.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from services.probe.failures import Failures

STALL_TRIGGER: Final = b"some 300000 2000000\0"
"""Microseconds of stalls, in a window of microseconds."""

_EVENTS_BYTES_MAX: Final = 4096


class Alarms:
    """Watches for pressure, and wakes who asked for it."""

    def __init__(self, stall_files: Sequence[Path], event_files: Sequence[Path], failures: Failures) -> None:
        """The first of `stall_files` that takes a trigger is watched, and every one of `event_files`."""
        self._stall_files = stall_files
        self._event_files = event_files
        self._failures = failures
        self._watched: list[tuple[select.epoll, int]] = []
        self._stalled = False

    def watch(self, wake: Callable[[], object]) -> None:
        """Call `wake` on the running event loop at every alarm, until closed."""
        for path in self._stall_files:
            if self._watch(path, wake, STALL_TRIGGER):
                break
        for path in self._event_files:
            self._watch(path, wake, None)

    def stalled(self) -> bool:
        """Whether the stall trigger rang since this was last asked."""
        rang, self._stalled = self._stalled, False
        return rang

    def close(self) -> None:
        """Watch no more."""
        while self._watched:
            self._close(*self._watched[-1])

    def _watch(self, path: Path, wake: Callable[[], object], trigger: bytes | None) -> bool:
        """Watch the file for stalls by `trigger`, or for changes; whether that can be."""
        watcher = select.epoll()
        fd = -1
        try:
            fd = os.open(path, os.O_CLOEXEC | (os.O_RDONLY if trigger is None else os.O_RDWR | os.O_NONBLOCK))
            # An event counts from the last reading of the file on, so there must have been one.
            os.pread(fd, _EVENTS_BYTES_MAX, 0) if trigger is None else os.write(fd, trigger)
            watcher.register(fd, select.EPOLLPRI)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                self._failures.add(f"alarm {path}", error)
            watcher.close()
            if fd >= 0:
                os.close(fd)
            return False
        self._watched.append((watcher, fd))
        loop = asyncio.get_running_loop()
        loop.add_reader(watcher.fileno(), partial(self._ring, watcher, fd, wake, stalls=trigger is not None))
        return True

    def _ring(self, watcher: select.epoll, fd: int, wake: Callable[[], object], *, stalls: bool) -> None:
        # Empty where asyncio's asking has reset the trigger already; it rang all the same.
        found = watcher.poll(0)
        if not stalls and self._is_gone(fd):
            self._close(watcher, fd)
            return
        if any(event & select.EPOLLERR for _, event in found) and stalls:
            self._close(watcher, fd)  # Its cgroup was removed.
            return
        self._stalled = self._stalled or stalls
        wake()

    def _is_gone(self, fd: int) -> bool:
        """Whether the file can be read no more; reading it is what makes it quiet until the next event."""
        try:
            return not os.pread(fd, _EVENTS_BYTES_MAX, 0)
        except OSError:
            return True

    def _close(self, watcher: select.epoll, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(watcher.fileno())
        watcher.close()
        os.close(fd)
        self._watched.remove((watcher, fd))
