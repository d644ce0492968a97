"""The services a command runs as processes on this machine, which live no longer than the command.

- They are started in groups and stopped in the reverse order: SIGTERM, then SIGKILL after a grace.
- Each is in a session of its own, so that Ctrl-C reaches the command alone, and the order is kept.
- The first that ends by itself ends the command, with its name and its last lines.
- When the command is killed, the leash ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import tempfile
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from rich.text import Text

from services.cli.failure import CommandError
from services.cli.output import errors_console

READY_SECONDS_MAX: Final = 120.0
"""A runner measures its shard's overhead first, which imports MLX; on a busy machine that takes its time. More than a
runner itself waits for that, as it says better what it waited for."""

GRACE_SECONDS: Final = 5.0
DRAIN_SECONDS_MAX: Final = 5.0
"""How long the last lines of a process that has ended may take to arrive."""

POLL_SECONDS: Final = 0.05
TAIL_LINES: Final = 20
LINE_BYTES_MAX: Final = 2**20

_ROUTINE: Final = re.compile(r"\blevel=(debug|info)\b")
_COLOURS: Final = ("cyan", "magenta", "blue", "yellow", "green")


@dataclass(frozen=True)
class Service:
    """One service to start: `python -m services.MODULE ARGUMENTS`."""

    label: str
    module: str
    arguments: tuple[str, ...]


@dataclass
class _Running:
    service: Service
    process: asyncio.subprocess.Process
    ready_file: Path
    colour: str
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    reader: asyncio.Task[None] | None = None

    @property
    def address(self) -> str | None:
        """Where it listens, once it does."""
        return self.ready_file.read_text().strip() if self.ready_file.exists() else None


class Processes:
    """The processes of one command; leaving the context stops them all."""

    def __init__(self, *, verbose: bool) -> None:
        """With `verbose` every log line is shown, else warnings and worse."""
        self._verbose = verbose
        self._groups: list[list[_Running]] = []
        self._stopping = False
        self._leash: asyncio.subprocess.Process | None = None
        self._ready_files = tempfile.TemporaryDirectory(prefix="ullage-")

    async def __aenter__(self) -> Self:
        self._leash = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.cli.leash",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        for group in reversed(self._groups):
            await asyncio.gather(*(self._stop(running) for running in group))
        if self._leash is not None and self._leash.stdin is not None:
            self._leash.stdin.close()
            await self._leash.wait()
        self._ready_files.cleanup()

    async def start(self, services: Sequence[Service]) -> list[str]:
        """Start `services` at once and return their addresses when all listen.

        Raises CommandError when any process ends instead, or takes longer than its bound.
        """
        group: list[_Running] = []
        self._groups.append(group)
        for service in services:
            await self._spawn(service, group)
        deadline = asyncio.get_running_loop().time() + READY_SECONDS_MAX
        while asyncio.get_running_loop().time() < deadline:
            await self.check()
            addresses = [running.address for running in group]
            if all(addresses):
                return [address for address in addresses if address]
            await asyncio.sleep(POLL_SECONDS)
        slow = next(running for running in group if running.address is None)
        raise _failure(slow, f"did not listen within {READY_SECONDS_MAX:.0f} s")

    async def check(self) -> None:
        """Raise CommandError when a process has ended by itself."""
        for running in (running for group in self._groups for running in group):
            if running.process.returncode is not None:
                if running.reader is not None:
                    await asyncio.wait([running.reader], timeout=DRAIN_SECONDS_MAX)
                raise _failure(running, _ended(running.process.returncode))

    async def watch(self) -> None:
        """Wait until a process ends by itself, and raise CommandError then."""
        everyone = [running.process for group in self._groups for running in group]
        ends = [asyncio.ensure_future(process.wait()) for process in everyone]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        await self.check()

    async def _spawn(self, service: Service, group: list[_Running]) -> None:
        number = sum(len(group) for group in self._groups)
        ready_file = Path(self._ready_files.name) / str(number)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"services.{service.module}",
            *service.arguments,
            "--ready-file",
            str(ready_file),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=LINE_BYTES_MAX,
        )
        self._tell_leash(f"+{process.pid}")
        running = _Running(service, process, ready_file, _COLOURS[number % len(_COLOURS)])
        running.reader = asyncio.create_task(self._read(running))
        group.append(running)

    def _tell_leash(self, line: str) -> None:
        if self._leash is not None and self._leash.stdin is not None:
            self._leash.stdin.write(f"{line}\n".encode())

    async def _read(self, running: _Running) -> None:
        """Keep the process's last lines, and show those that matter."""
        stream = running.process.stdout
        while stream is not None:
            try:
                raw = await stream.readline()
            except ValueError:
                continue  # A line longer than the limit: not worth keeping.
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            running.tail.append(line)
            if self._verbose or not (self._stopping or _ROUTINE.search(line)):
                label = (f"{running.service.label:<14} ", running.colour)
                errors_console().print(Text.assemble(label, line), soft_wrap=True)

    async def _stop(self, running: _Running) -> None:
        process = running.process
        if process.returncode is None:
            process.terminate()
            ended = asyncio.ensure_future(process.wait())
            done, _ = await asyncio.wait([ended], timeout=GRACE_SECONDS)
            if not done:
                process.kill()
                await ended
        if running.reader is not None:
            await asyncio.wait([running.reader], timeout=DRAIN_SECONDS_MAX)
            running.reader.cancel()
        self._tell_leash(f"-{process.pid}")


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _failure(running: _Running, what: str) -> CommandError:
    lines = "".join(f"\n  {line}" for line in running.tail)
    last = f"; its last lines:{lines}" if lines else " without a word"
    return CommandError(f"{running.service.label} {what}{last}", reason="PROCESS_ENDED")


def run_until_asked_to_stop(work: Coroutine[None, None, None]) -> None:
    """Run `work` until it ends, or until SIGINT, SIGTERM or SIGHUP cancels it; more signals then change nothing."""

    async def cancellable() -> None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()

        def stop() -> None:
            if not asked.is_set():
                asked.set()
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancellable())
