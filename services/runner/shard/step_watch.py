"""Whether a step gets on, however long it takes: by what its process does meanwhile.

Rules this module lives by:
- A step takes processor time, or waits for pages from the disk. One that does neither is stuck.
- A step takes at most some multiple of what the trial at the end of loading took. One that takes more goes in circles.
- Both are counted in what the process itself got: a busy machine makes a step slow, and is no fault of it.
- Where a GPU computes the process is idle meanwhile, and only the time on the clock tells.
"""

from __future__ import annotations

import resource
import time
from typing import Final, NamedTuple

LOOK_SECONDS: Final = 0.5
IDLE_LOOKS_MAX: Final = 7
"""Looks and not seconds, for a process that was stopped has done nothing either, and may go on."""

IDLE_SHARE_MAX: Final = 0.05
"""Of one core: what a process takes whose step is stuck. Heartbeats and gRPC's own threads go on."""

TRIALS_MAX: Final = 10
"""How many times the trial's effort a step may take, in an empty context."""

ALLOWED_SECONDS_MIN: Final = 5.0


class Effort(NamedTuple):
    """What a process has done, up to some moment."""

    at: float
    """By a monotonic clock."""
    processor_seconds: float
    pages_read: int
    """From the disk, for memory that was not there."""


def effort() -> Effort:
    """What this process has done, up to now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Effort(time.monotonic(), used.ru_utime + used.ru_stime, used.ru_majflt)


def allowed_seconds(trial_seconds: float, *, context_tokens: int, hidden_size: int) -> float:
    """What a step may take, where the trial took `trial_seconds`.

    With a full context each token is also multiplied with all before it: as much again as by the weights, for
    every four rows as wide as the model.
    """
    return max(ALLOWED_SECONDS_MIN, TRIALS_MAX * trial_seconds * (1 + context_tokens / (4 * hidden_size)))


class StepWatch:
    """Judges one process by looks at it, LOOK_SECONDS apart."""

    def __init__(self, *, on_cpu: bool) -> None:
        self._on_cpu = on_cpu
        self._seen: Effort | None = None
        self._idle_looks = 0

    def hindrance(self, began: Effort | None, now: Effort, allowed: float | None) -> str | None:
        """Why the step that began then will not end, or None: it may, or there is no step.

        `allowed` is from `allowed_seconds`, None while nothing is known yet.
        """
        if began is None:
            self._seen, self._idle_looks = None, 0
            return None
        before, self._seen = self._seen, now
        self._idle_looks = self._idle_looks + 1 if before is not None and _is_idle(before, now) else 0
        if self._on_cpu and self._idle_looks >= IDLE_LOOKS_MAX:
            return f"a step has done nothing for {IDLE_LOOKS_MAX * LOOK_SECONDS:g} s"
        spent = spent_seconds(began, now, on_cpu=self._on_cpu)
        if allowed is not None and spent > allowed:
            return f"a step has taken {spent:.0f} s, where {allowed:.0f} s are more than any should"
        return None


def spent_seconds(began: Effort, now: Effort, *, on_cpu: bool) -> float:
    """What was spent from then to now: on processors, or by the clock where those do not compute."""
    return now.processor_seconds - began.processor_seconds if on_cpu else now.at - began.at


def _is_idle(before: Effort, now: Effort) -> bool:
    used = now.processor_seconds - before.processor_seconds
    return used <= IDLE_SHARE_MAX * (now.at - before.at) and now.pages_read == before.pages_read
