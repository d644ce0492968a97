"""The child process of one shard: started with what is private to it, listened to, and surely ended.

Rules this module lives by:
- The child is its own process group, so that what it starts (a compiler, say) ends with it.
- Its stdin is a pipe that nobody writes to: it closes when this process dies, however it dies, and the child
  exits then. A shard never outlives its runner.
- Nothing it does to its outputs can stop it or us: stdout goes nowhere, stderr is always read.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil
import structlog

from services.runner.oom_kills import oom_kills
from services.runner.stderr_tail import StderrTail
from services.runner.vital_signs import Reading

KILL_SECONDS: Final = 5.0
"""For how long a killed process is waited for; it can be stuck in the kernel, and nothing more can be done."""

STDERR_SECONDS: Final = 1.0
"""For how long the rest of stderr is read after the end; a grandchild may hold it open."""

_THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")

_STOPPED: Final = frozenset({psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP})

log = structlog.get_logger()


class ShardProcess:
    """One child, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path) -> None:
        self._process = process
        self._folder = folder
        self._tail = StderrTail()
        self._oom_kills_before = oom_kills()
        self._killed_here = False
        self._reader = asyncio.create_task(self._read_stderr())
        self.exited = asyncio.create_task(process.wait())
        """Done when the process is gone."""

    @classmethod
    async def start(cls, command: Sequence[str], folder: Path, threads: int) -> ShardProcess:
        """Run `command` with `folder`, which is made for it and removed after it, as its place for temporary files.

        Raises OSError when it cannot be started.
        """
        await asyncio.to_thread(folder.mkdir, mode=0o700)
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(folder, threads),
            start_new_session=True,
        )
        return cls(process, folder)

    async def _read_stderr(self) -> None:
        stream = self._process.stderr
        assert stream is not None  # noqa: S101 - asked for in `start`
        while written := await stream.read(65536):
            for line in self._tail.feed(written):
                log.debug("shard says", pid=self.pid, line=line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, the negative of the signal that killed it, or None while it runs."""
        return self._process.returncode

    def end_words(self) -> str:
        """How it ended, in words, and who is likely to have killed it. Only once it has."""
        returncode = self._process.returncode
        assert returncode is not None  # noqa: S101 - asked for too early
        words = exit_words(returncode)
        if returncode == -signal.SIGKILL and not self._killed_here and oom_kills() != self._oom_kills_before:
            words += ": memory ran out, and the kernel killed a process then"
        return words

    def stderr_lines(self) -> list[str]:
        """The last lines it wrote to stderr."""
        return self._tail.lines()

    def reading(self) -> Reading | None:
        """The process now, None when it is gone or about to be."""
        return reading_of(self.pid)

    def kill(self) -> None:
        """Have it and all it started end at once, without waiting."""
        self._killed_here = True
        self._signal(signal.SIGKILL)

    async def end(self, grace_seconds: float) -> None:
        """Return when the process is gone: asked with SIGTERM, killed after the grace."""
        if self.returncode is None:
            self._signal(signal.SIGTERM)
            await asyncio.wait([self.exited], timeout=grace_seconds)
        # Also when it has ended by itself: something it started may be left.
        self._signal(signal.SIGKILL)
        _, stuck = await asyncio.wait([self.exited], timeout=KILL_SECONDS)
        if stuck:
            log.error("a shard's process does not end even when killed", pid=self.pid)
        await self._close()

    async def _close(self) -> None:
        await asyncio.wait([self._reader], timeout=STDERR_SECONDS)
        self._reader.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def _environment(folder: Path, threads: int) -> dict[str, str]:
    return {
        **os.environ,
        # MLX loads the kernels it compiles from here; a shared place would let others put code there.
        "TMPDIR": str(folder),
        # A crash inside native code then says where.
        "PYTHONFAULTHANDLER": "1",
        **dict.fromkeys(_THREAD_VARIABLES, str(threads)),
    }


def reading_of(pid: int) -> Reading | None:
    """The process `pid` now, None when it is gone.

    One that ends gives its memory back before it is seen to be gone, and holds none then: that is no news of what it
    held, nor of whether it is at work.
    """
    try:
        seen = psutil.Process(pid)
        with seen.oneshot():
            times = seen.cpu_times()
            stopped = seen.status() in _STOPPED
            resident_bytes = int(seen.memory_info().rss)
    except psutil.Error:
        return None
    return Reading(resident_bytes, times.user + times.system, stopped) if resident_bytes else None


def exit_words(returncode: int) -> str:
    """How a process ended, in words: "exit code 134 (SIGABRT)", "killed by SIGKILL"."""
    if returncode < 0:
        return f"killed by {_signal_name(-returncode)}"
    if returncode > 128 and (name := _signal_name(returncode - 128)).startswith("SIG"):
        return f"exit code {returncode} ({name})"
    return f"exit code {returncode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
