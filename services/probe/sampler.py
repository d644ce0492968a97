"""Where readings come from, and which source this machine has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final, Protocol

from services.probe.failures import Failures
from services.probe.linux.sampler import LinuxSampler
from services.probe.psutil_sampler import PsutilSampler
from services.probe.reading import Reading

MACHINE_ROOT: Final = Path("/")


class Sampler(Protocol):
    """Reads the memory of one machine."""

    def read(self) -> Reading:
        """The memory now, within microseconds. Never raises: what the OS does not say is absent."""
        ...


def choose(root: Path, failures: Failures) -> Sampler:
    """The sampler for this machine, or for the recorded tree at `root`, which any machine can read."""
    if sys.platform == "linux" or root != MACHINE_ROOT:
        return LinuxSampler(root, failures)
    return PsutilSampler(failures)
