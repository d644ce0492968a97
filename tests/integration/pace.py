"""How long something took, as far as this machine let its processes run, for what must happen within some seconds.

A machine that others use as well takes processors away, for seconds at times. That is nobody's fault here, and a bound
that counted it would tell of the machine. On one of its own a second here is one by the clock.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Final

SLOWEST: Final = 12
"""A second here is never more than so many: what hangs is found on any machine."""


class Moment:
    """Now, when it is made."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._waited_seconds = _waited_seconds()

    def seconds_until(self, later: Moment) -> float:
        """What passed from this one to `later`, without the time in which something waited for a processor."""
        passed = later._at - self._at
        return max(passed / SLOWEST, passed - (later._waited_seconds - self._waited_seconds))

    @property
    def age_seconds(self) -> float:
        """What has passed since."""
        return self.seconds_until(Moment())


def _waited_seconds() -> float:
    """In all, since this machine started; 0.0 where it does not say, and nothing is made allowance for then."""
    return _waited_for_others() + _taken_by_the_host()


def _waited_for_others() -> float:
    try:
        pressure = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return 0.0
    found = re.search(r"^some .*total=(\d+)", pressure, flags=re.MULTILINE)
    return 0.0 if found is None else int(found[1]) / 1e6


def _taken_by_the_host() -> float:
    """What a virtual machine was denied, of all its processors."""
    try:
        all_processors = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    steal_column = 8
    return int(all_processors[steal_column]) / os.sysconf("SC_CLK_TCK")
