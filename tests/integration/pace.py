"""How long something took, as far as this machine let the processes of a test run, for what must happen within seconds.

A machine that others use as well takes processors away, for seconds at times. That is nobody's fault here, and a bound
that counted it would tell of the machine. On one of its own a second here is one by the clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

SLOWEST: Final = 12
"""A second here is never more than so many: what hangs is found on any machine."""


class Moment:
    """Now, when it is made."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._taken_seconds = _taken_by_the_host()
        self._waited_seconds = dict(_waited_for_others())

    def seconds_until(self, later: Moment) -> float:
        """What passed from this one to `later`, without the time in which this test waited for a processor."""
        passed = later._at - self._at
        waited = _more(later._waited_seconds, self._waited_seconds) + later._taken_seconds - self._taken_seconds
        return max(passed / SLOWEST, passed - waited)

    @property
    def age_seconds(self) -> float:
        """What has passed since."""
        return self.seconds_until(Moment())


def _more(later: Mapping[int, float], earlier: Mapping[int, float]) -> float:
    return sum(seconds - earlier.get(pid, 0.0) for pid, seconds in later.items())


def _waited_for_others() -> Iterator[tuple[int, float]]:
    """How long each process of this test was ready in all, and did not run; none where Linux does not say.

    By its first thread, which does what it is told: those that compute for an answer wait without holding anybody up.
    """
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        # Whoever ends meanwhile is left out.
        with suppress(OSError):
            _, waited_ns, _ = Path(f"/proc/{process.pid}/schedstat").read_text().split()
            yield process.pid, int(waited_ns) / 1e9


def _taken_by_the_host() -> float:
    """What a virtual machine was denied, of all its processors."""
    try:
        all_processors = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0.0
    steal_column = 8
    return int(all_processors[steal_column]) / os.sysconf("SC_CLK_TCK")
