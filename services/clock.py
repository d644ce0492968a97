"""Time as a value that is passed in, so that tests can own it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What services know of time."""

    def monotonic(self) -> float:
        """Seconds from an unknown start, never going back: for ages and deadlines."""
        ...

    def now_ns(self) -> int:
        """Nanoseconds since 1970 by the machine's clock: for people, never for decisions."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when `seconds` have passed."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now_ns(self) -> int:
        return time.time_ns()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
