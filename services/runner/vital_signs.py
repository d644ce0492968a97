"""What a process shows from outside: whether it is stopped, idle, or at work though it does not answer.

A stopped process keeps its connections, and a busy one may be late with an answer: only the time it spends on a
processor tells one from the other.
"""

from __future__ import annotations

from typing import Final, NamedTuple

IDLE_SHARE_MAX: Final = 0.05
"""Of one core: what a process takes that waits for something. gRPC's own threads never sleep for long."""


LOOK_SECONDS_MAX: Final = 1.0
"""What one reading can tell of, twice the time between two. Whoever looks later than that was held up himself, and
knows nothing of the time before."""


class Reading(NamedTuple):
    """A process at one moment."""

    resident_bytes: int
    processor_seconds: float
    """All it has ever used."""
    is_stopped: bool


class VitalSigns:
    """How long a process has been stopped, and how long idle, by the readings taken of it."""

    def __init__(self, now: float) -> None:
        self._running_at = now
        self._busy_at = now
        self._seen_at = now
        self._processor_seconds = 0.0

    def see(self, reading: Reading, now: float) -> None:
        """Take the reading made at `now`, in seconds of a monotonic clock."""
        held_up_seconds = max(0.0, now - self._seen_at - LOOK_SECONDS_MAX)
        self._running_at += held_up_seconds
        self._busy_at += held_up_seconds
        if not reading.is_stopped:
            self._running_at = now
        used_seconds = reading.processor_seconds - self._processor_seconds
        if used_seconds > IDLE_SHARE_MAX * (now - self._seen_at):
            self._busy_at = now
        self._seen_at, self._processor_seconds = now, reading.processor_seconds

    @property
    def stopped_seconds(self) -> float:
        """For how long every reading has found it stopped."""
        return self._seen_at - self._running_at

    @property
    def idle_seconds(self) -> float:
        """For how long no reading has found it at work."""
        return self._seen_at - self._busy_at
