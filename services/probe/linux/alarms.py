"""The kernel's own word that memory is pressed, which need not wait for the next reading.

Rules this module lives by:
- A stall trigger watches the process's own cgroup, or the machine where that has none: 15 % of 2 s in which some
  work waited. Windows of whole 2 s are all that an ordinary user may have.
- A v2 cgroup's memory.events is watched too: it changes when the cgroup is held at a limit or runs out of memory. Of
  those above it memory.events.local is, which says so of their own limits.
- A v1 cgroup announces by eventfd: memory.pressure_level, when 60 % of the pages that the kernel would take back there
  cannot be had (medium), and memory.oom_control, when it runs out. Mostly only root may ask for that.
- An alarm only has the memory read at once, and says that it rang; what that means is judged with the reading.
- A kernel that offers none of these leaves the reading at its period. What cannot be watched is counted once.
- What has rung rests for a moment: a cgroup that is reclaimed from rings hundreds of times a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from services.probe.failures import Failures

STALL_TRIGGER: Final = b"some 300000 2000000\0"
"""Microseconds of stalls, in a window of microseconds."""

REST_SECONDS: Final = 0.05
"""Half of what a rise may take to the master, since what rings again meanwhile waits for so long."""

_EVENTS_BYTES_MAX: Final = 4096

_PRESSURE_LEVEL: Final = "memory.pressure_level"
_OOM_CONTROL: Final = "memory.oom_control"


class Alarms:
    """Watches for pressure, and wakes who asked for it."""

    def __init__(
        self,
        stall_files: Sequence[Path],
        event_files: Sequence[Path],
        failures: Failures,
        v1_folder: Path | None = None,
    ) -> None:
        """The first of `stall_files` that takes a trigger is watched, every one of `event_files`, and a v1 cgroup."""
        self._stall_files = stall_files
        self._event_files = event_files
        self._v1_folder = v1_folder
        self._failures = failures
        self._watches: list[_Watch] = []
        self._stalled = False
        self._hard_to_reclaim = False

    def watch(self, wake: Callable[[], object]) -> None:
        """Call `wake` on the running event loop at every alarm, until closed."""
        for path in self._stall_files:
            if self._watch(path, partial(_Stalls, path), wake):
                break
        for path in self._event_files:
            self._watch(path, partial(_Changes, path), wake)
        if self._v1_folder is not None:
            for announced in ((_PRESSURE_LEVEL, "medium"), (_OOM_CONTROL, "")):
                self._watch(self._v1_folder, partial(_Announced, self._v1_folder, *announced), wake)

    def stalled(self) -> bool:
        """Whether the stall trigger rang since this was last asked."""
        rang, self._stalled = self._stalled, False
        return rang

    def hard_to_reclaim(self) -> bool:
        """Whether a v1 cgroup announced, since this was last asked, that little can be taken back in it."""
        announced, self._hard_to_reclaim = self._hard_to_reclaim, False
        return announced

    def close(self) -> None:
        """Watch no more."""
        while self._watches:
            self._end(self._watches[-1])

    def _watch(self, path: Path, begin: Callable[[], _Watch], wake: Callable[[], object]) -> bool:
        """Watch what `begin` gives, for `path`; whether that can be."""
        try:
            watch = begin()
        except FileNotFoundError:
            return False
        except OSError as error:
            self._failures.add(f"alarm {path}", error)
            return False
        self._watches.append(watch)
        self._listen(watch, wake)
        return True

    def _listen(self, watch: _Watch, wake: Callable[[], object]) -> None:
        if watch in self._watches:
            asyncio.get_running_loop().add_reader(watch.fd, self._ring, watch, wake)

    def _ring(self, watch: _Watch, wake: Callable[[], object]) -> None:
        try:
            watch.answer()
        except OSError:
            self._end(watch)  # Its cgroup was removed.
            return
        self._stalled = self._stalled or isinstance(watch, _Stalls)
        self._hard_to_reclaim = self._hard_to_reclaim or (isinstance(watch, _Announced) and watch.is_of_pressure)
        loop = asyncio.get_running_loop()
        loop.remove_reader(watch.fd)
        try:
            wake()
        finally:
            loop.call_later(REST_SECONDS, self._listen, watch, wake)

    def _end(self, watch: _Watch) -> None:
        asyncio.get_running_loop().remove_reader(watch.fd)
        watch.close()
        self._watches.remove(watch)


class _Watch(Protocol):
    """One way of the kernel's to say something."""

    fd: int
    """Readable when it does."""

    def answer(self) -> None:
        """Make it silent until the next time. Raises OSError where it is no more."""
        ...

    def close(self) -> None: ...


class _Urgent:
    """A file that answers with POLLPRI. asyncio's selectors know nothing of that, so an epoll of its own watches it."""

    def __init__(self, path: Path, flags: int) -> None:
        self.file = os.open(path, flags | os.O_CLOEXEC)
        self.epoll = select.epoll()
        self.fd = self.epoll.fileno()

    def close(self) -> None:
        self.epoll.close()
        os.close(self.file)


class _Stalls(_Urgent):
    """The stall trigger of a pressure file. Being asked whether it rang is what resets it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(self.file, STALL_TRIGGER)
            self.epoll.register(self.file, select.EPOLLPRI)
        except OSError:
            self.close()
            raise

    def answer(self) -> None:
        # Empty where asyncio's asking has reset it already; it rang all the same.
        if any(event & select.EPOLLERR for _, event in self.epoll.poll(0)):
            raise OSError("the cgroup is gone")


class _Changes(_Urgent):
    """A file whose counters change; reading it is what makes it silent until they change again."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, os.O_RDONLY)
        try:
            self.answer()
            self.epoll.register(self.file, select.EPOLLPRI)
        except OSError:
            self.close()
            raise

    def answer(self) -> None:
        self.epoll.poll(0)
        if not os.pread(self.file, _EVENTS_BYTES_MAX, 0):
            raise OSError("the cgroup is gone")


class _Announced:
    """What a v1 cgroup announces of one of its files, by an eventfd that it was told."""

    def __init__(self, folder: Path, file: str, argument: str) -> None:
        self.is_of_pressure = file == _PRESSURE_LEVEL
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            announcing = os.open(folder / file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                (folder / "cgroup.event_control").write_text(f"{self.fd} {announcing} {argument}".strip())
            finally:
                os.close(announcing)
        except OSError:
            self.close()
            raise

    def answer(self) -> None:
        with contextlib.suppress(BlockingIOError):  # It was for nothing.
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)
