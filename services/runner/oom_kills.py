"""How many processes the kernel has killed for want of memory, on this machine and in its containers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_COUNTERS: Final = Path("/proc/vmstat")


def oom_kills() -> int | None:
    """The count since the machine's start, None where the kernel does not tell."""
    try:
        lines = _COUNTERS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
