"""A clock that a test owns."""

from __future__ import annotations

import asyncio


class FakeClock:
    """Time that stands still until it is moved."""

    def __init__(self) -> None:
        self._monotonic = 1000.0
        self._now_ns = 1_790_000_000_000_000_000
        self._moved = asyncio.Event()

    def monotonic(self) -> float:
        return self._monotonic

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass, by both clocks."""
        self._monotonic += seconds
        self._now_ns += round(seconds * 1e9)
        self._moved.set()

    def set_wall(self, now_ns: int) -> None:
        """Set the machine's clock, as an operator or NTP may; monotonic time does not notice."""
        self._now_ns = now_ns

    async def sleep(self, seconds: float) -> None:
        wake = self._monotonic + seconds
        while self._monotonic < wake:
            self._moved.clear()
            await self._moved.wait()
