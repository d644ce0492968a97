"""`sysctl` and `vm_stat` as commands, for a Mac whose library does not answer. They never keep the probe waiting.

A thread runs them while somebody keeps asking, and what they said last is the answer until it is too old. A
command that hangs is killed; one that fails is counted. Each speaks the C locale.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence
from typing import Final

from services.clock import Clock
from services.probe.darwin import sysctl, vm_stat
from services.probe.darwin.sampler import Seen
from services.probe.failures import Failures

COMMAND_SECONDS_MAX: Final = 2.0
AGE_SECONDS_MAX: Final = 5.0
"""What is older counts no more: three runs have failed meanwhile."""

_OUTPUT_BYTES_MAX: Final = 64 * 1024


class Commands:
    """Answers from what the commands said last."""

    def __init__(
        self,
        clock: Clock,
        failures: Failures,
        *,
        sysctl_command: Sequence[str] = sysctl.command(),
        vm_stat_command: Sequence[str] = vm_stat.COMMAND,
        seconds_max: float = COMMAND_SECONDS_MAX,
    ) -> None:
        self._clock = clock
        self._failures = failures
        self._sysctl_command = sysctl_command
        self._vm_stat_command = vm_stat_command
        self._seconds_max = seconds_max
        self._said: Seen = Seen({})
        self._said_at_s = -AGE_SECONDS_MAX
        self._running: threading.Thread | None = None

    def read(self) -> Seen:
        """What they said within the last seconds, and nothing before they have; runs them again meanwhile."""
        if self._running is None or not self._running.is_alive():
            self._running = threading.Thread(target=self.ask, name="vm_stat", daemon=True)
            # Where there may be no more threads, what was said last has to do.
            self._failures.guard("vm_stat", self._running.start)
        return self._said if self._clock.monotonic() - self._said_at_s <= AGE_SECONDS_MAX else Seen({})

    def ask(self) -> None:
        """Run both, and keep what they say. Takes as long as they may."""
        numbers, swap = sysctl.parse(self._output(self._sysctl_command))
        pages = vm_stat.parse(self._output(self._vm_stat_command), sysctl.page_size_bytes(numbers))
        if numbers or pages is not None:
            self._said, self._said_at_s = Seen(numbers, swap, pages), self._clock.monotonic()

    def _output(self, command: Sequence[str]) -> bytes:
        """What it prints, whatever its status: sysctl fails for one name and prints the others."""
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=self._seconds_max,
                check=False,
                env={**os.environ, "LC_ALL": "C"},
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            self._failures.add(command[0], error)
            return b""
        if not ended.stdout:
            self._failures.add(command[0], RuntimeError(f"it printed nothing and exited with {ended.returncode}"))
        return ended.stdout[:_OUTPUT_BYTES_MAX]
