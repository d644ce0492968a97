"""What happens, for those who follow it: told once, however many they are.

Rules this module lives by:
- Every subscriber's backlog is bounded; one that falls behind is cut off and told so.
- All who want the same share one object, and what is made of it to be sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from services import log_format
from services.master import errors
from ullage.v1 import event_pb2

SUBSCRIPTION_EVENTS_MAX: Final = 16_384
"""Events kept for one subscriber: a minute of a hundred nodes, some MiB."""

SUBSCRIPTION_BYTES_MAX: Final = 32 << 20
"""Bytes of facts kept for one subscriber: ten of the largest."""

T = TypeVar("T")


@dataclass(slots=True)
class Happened:
    """An event that was applied, for whoever subscribes."""

    row: log_format.Row
    fact: event_pb2.Fact
    _wire: bytes = b""

    @property
    def sequence(self) -> int:
        """Its place in the log."""
        return self.row.sequence

    @property
    def wire(self) -> bytes:
        """The serialised RecordedEvent: made once, for all who send it."""
        self._wire = self._wire or log_format.wire(self.row)
        return self._wire


class Happenings(list[Happened]):
    """Events that were applied together, in the order of the log: one object for all who are told of them."""

    def __init__(self, events: Iterable[Happened]) -> None:
        """Of `events`."""
        super().__init__(events)
        self.size_bytes = sum([len(event.row.payload) for event in self])
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[Happenings], T]) -> T:
        """What `make` makes of them, for all who come with the same key."""
        if key not in self._made:
            self._made[key] = make(self)
        made: T = self._made[key]
        return made


class Subscription:
    """What happens from its beginning on: iterate for lists of events, each already applied.

    Raises SubscriberTooSlow when its backlog overflowed, and Unavailable when the master stops.
    """

    def __init__(self, kinds: Collection[str] | None, sequence: int) -> None:
        self.kinds = None if kinds is None else frozenset(log_format.KIND_NUMBERS[kind] for kind in kinds)
        """The kinds of facts it wants, by number; None for all."""
        self._batches: deque[Happenings] = deque()
        self._events_queued = 0
        self._bytes_queued = 0
        self._arrived = asyncio.Event()
        self._end: errors.MasterError | None = None
        self._last_sequence = sequence

    def put(self, events: Happenings) -> None:
        """Queue `events`, or cut the subscription off when they are more than it may keep."""
        if self._end is not None:
            return
        too_many = self._events_queued + len(events) > SUBSCRIPTION_EVENTS_MAX
        # Whatever comes alone is taken: a commit may be larger than what is kept.
        too_large = self._batches and self._bytes_queued + events.size_bytes > SUBSCRIPTION_BYTES_MAX
        if too_many or too_large:
            self.end(errors.SubscriberTooSlow(self._last_sequence))
            self._batches.clear()
            return
        self._batches.append(events)
        self._events_queued += len(events)
        self._bytes_queued += events.size_bytes
        self._arrived.set()

    def end(self, error: errors.MasterError) -> None:
        """Let the reader have what is queued, then `error`."""
        self._end = self._end or error
        self._arrived.set()

    @property
    def empty(self) -> bool:
        """Everything that has happened was read."""
        return not self._batches

    async def arrived(self, timeout_seconds: float) -> bool:
        """Wait until there is something to read, or the end, for at most so long; False when there is not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._arrived.wait()
        # What came in the turn of the loop in which the time ran out is there all the same.
        return self._arrived.is_set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Happenings:
        while not self._batches:
            if self._end is not None:
                raise self._end
            self._arrived.clear()
            await self._arrived.wait()
        events = self._batches.popleft()
        self._events_queued -= len(events)
        self._bytes_queued -= events.size_bytes
        self._last_sequence = events[-1].sequence
        if not self._batches and self._end is None:
            self._arrived.clear()
        return events
