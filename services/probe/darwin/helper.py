"""macmon as a process beside the probe: kept running, ended when it hangs, and done without when it is missing.

Rules this module lives by:
- What it said last counts while it is young; then it is as if it had said nothing.
- A run that says nothing that is understood for `SILENCE_SECONDS_MAX` is killed and started anew, after a wait that
  grows.
- Its end, its silence and its absence are counted, and logged once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from typing import Final

from services import rpc
from services.clock import Clock
from services.probe.darwin import macmon
from services.probe.darwin.macmon import LINE_BYTES_MAX, Macmon
from services.probe.darwin.sampler import MacmonMemory
from services.probe.failures import Failures
from ullage.v1 import node_pb2

COMMAND: Final = ("macmon", "pipe", "-i", "1000")
SILENCE_SECONDS_MAX: Final = 5.0
AGE_SECONDS_MAX: Final = 5.0
RESTART_SECONDS_MAX: Final = 60.0

_PLACES: Final = ("/opt/homebrew/bin", "/usr/local/bin", "/opt/local/bin")
"""Where it is installed; a service's PATH has none of these."""


class MacmonHelper:
    """Answers from what macmon said last."""

    def __init__(
        self,
        clock: Clock,
        failures: Failures,
        *,
        command: Sequence[str] = COMMAND,
        silence_seconds_max: float = SILENCE_SECONDS_MAX,
        restart_seconds_max: float = RESTART_SECONDS_MAX,
    ) -> None:
        self._clock = clock
        self._failures = failures
        self._command = command
        self._silence_seconds_max = silence_seconds_max
        self._restart_seconds_max = restart_seconds_max
        self._said = Macmon()
        self._said_at_s = -AGE_SECONDS_MAX

    def memory(self) -> MacmonMemory | None:
        """The memory it told lately."""
        return self._lately().memory

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Set what it told lately of the parts of the machine, and leave the rest of `sample` as it is."""
        said = self._lately()
        for field, value in (
            ("cpu_pct", said.cpu_pct),
            ("performance_cores_pct", said.performance_cores_pct),
            ("efficiency_cores_pct", said.efficiency_cores_pct),
            ("gpu_pct", said.gpu_pct),
            ("temperature_celsius", said.cpu_celsius),
            ("gpu_temperature_celsius", said.gpu_celsius),
            ("system_power_watts", said.system_watts),
            ("cpu_power_watts", said.cpu_watts),
            ("gpu_power_watts", said.gpu_watts),
            ("ane_power_watts", said.ane_watts),
        ):
            if value is not None:
                setattr(sample, field, value)

    def _lately(self) -> Macmon:
        return self._said if self._clock.monotonic() - self._said_at_s <= AGE_SECONDS_MAX else Macmon()

    async def run(self) -> None:
        """Keep it running until cancelled; end at once where it is not installed."""
        program = shutil.which(self._command[0]) or shutil.which(self._command[0], path=":".join(_PLACES))
        if program is None:
            self._failures.add("macmon", FileNotFoundError("not installed; power and temperatures are unknown"))
            return
        waits = rpc.backoff_seconds(first=min(1.0, self._restart_seconds_max), last=self._restart_seconds_max)
        while True:
            if await self._listen(program):
                waits = rpc.backoff_seconds(first=min(1.0, self._restart_seconds_max), last=self._restart_seconds_max)
            await self._clock.sleep(next(waits))

    async def _listen(self, program: str) -> bool:
        """One run of it, to its end; whether it said anything."""
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *self._command[1:],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=LINE_BYTES_MAX,
                start_new_session=True,  # A wrapper of it is ended with it.
            )
        except (OSError, RuntimeError) as error:  # No more processes, or threads for asyncio to wait for one with.
            self._failures.add("macmon", error)
            return False
        heard, heard_at_s = False, asyncio.get_running_loop().time()
        try:
            while process.stdout is not None and (line := await self._line(process.stdout, heard_at_s)):
                if self._keep(line):
                    heard, heard_at_s = True, asyncio.get_running_loop().time()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # What it still had to say is read: asyncio waits for a process until its pipe has come to its end.
            await process.communicate()
        self._failures.add("macmon", RuntimeError(f"it ended with {process.returncode}"))
        return heard

    async def _line(self, output: asyncio.StreamReader, heard_at_s: float) -> bytes:
        """The next line, b"" at the end, where a line never ends, or too long after one that was understood."""
        try:
            async with asyncio.timeout_at(heard_at_s + self._silence_seconds_max):
                # Lines that are there already are read in one turn of the loop, in which no time runs out.
                await asyncio.sleep(0)
                return await output.readline()
        except (TimeoutError, ValueError):
            return b""

    def _keep(self, line: bytes) -> bool:
        """Keep what `line` says; whether that was anything."""
        found = macmon.parse(line)
        if found:
            self._said, self._said_at_s = found[-1], self._clock.monotonic()
        return bool(found)
