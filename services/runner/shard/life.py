"""The shard's life as others see it: its phase, its failure, and the requests it serves.

Phases go forward only, and the first failure is the one that counts: what breaks after it is its consequence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from ullage.v1 import event_pb2, model_pb2, shard_service_pb2

EVENTS_KEPT_MAX: Final = 1024
"""Requests started and finished that one slow watcher may be behind; older ones are dropped for it."""

WatchResponse = shard_service_pb2.WatchResponse


class Watcher:
    """One listener. Gets the newest status, not every one, and each request's events."""

    def __init__(self, status: model_pb2.ShardStatus) -> None:
        self._status: model_pb2.ShardStatus | None = status
        self._events: deque[WatchResponse] = deque(maxlen=EVENTS_KEPT_MAX)
        self._news = asyncio.Event()
        self._news.set()

    def tell_status(self, status: model_pb2.ShardStatus) -> None:
        self._status = status
        self._news.set()

    def tell(self, event: WatchResponse) -> None:
        self._events.append(event)
        self._news.set()

    async def next(self) -> list[WatchResponse]:
        """What is new since the last call, waiting until there is something."""
        await self._news.wait()
        self._news.clear()
        news = list(self._events)
        self._events.clear()
        if self._status is not None:
            news.insert(0, WatchResponse(status=self._status))
            self._status = None
        return news


class Life:
    """Where the shard is. Belongs to the event loop."""

    def __init__(self, instance_id: str, rank: int) -> None:
        self._status = model_pb2.ShardStatus(instance_id=instance_id, rank=rank, phase=model_pb2.SHARD_PHASE_STARTING)
        self._watchers: set[Watcher] = set()
        self._on_failure: list[Callable[[], None]] = []

    @property
    def status(self) -> model_pb2.ShardStatus:
        """A copy of the status now."""
        copy = model_pb2.ShardStatus()
        copy.CopyFrom(self._status)
        return copy

    @property
    def phase(self) -> model_pb2.ShardPhase.ValueType:
        return self._status.phase

    @property
    def has_failed(self) -> bool:
        return self._status.phase == model_pb2.SHARD_PHASE_FAILED

    @property
    def failure(self) -> model_pb2.ShardFailure:
        """What went wrong; empty while nothing has."""
        return self._status.failure

    def placed_on(self, node_id: str) -> None:
        """Learn which node this is."""
        self._status.node_id = node_id

    def advance(self, phase: model_pb2.ShardPhase.ValueType) -> None:
        """Go on to `phase`, unless the shard has failed."""
        if not self.has_failed and phase > self._status.phase:
            self._status.phase = phase
            self._status.ClearField("done_bytes")
            self._status.ClearField("total_bytes")
            self._status.waits_for_ranks = False
            self._tell_status()

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Say how far loading is."""
        if self._status.phase == model_pb2.SHARD_PHASE_LOADING:
            self._status.done_bytes, self._status.total_bytes = done_bytes, total_bytes
            self._tell_status()

    def wait_for_ranks(self) -> None:
        """Say that all that is missing is on other ranks."""
        self._status.waits_for_ranks = True
        self._tell_status()

    def fail(self, message: str, *, blamed_rank: int | None = None) -> None:
        """Fail, for good. `blamed_rank` is the rank at fault where it is another."""
        if self.has_failed:
            return
        self._status.failure.CopyFrom(
            model_pb2.ShardFailure(phase=self._status.phase, message=message, blamed_rank=blamed_rank)
        )
        self._status.phase = model_pb2.SHARD_PHASE_FAILED
        self._tell_status()
        for listener in self._on_failure:
            listener()

    def on_failure(self, listener: Callable[[], None]) -> None:
        """Have `listener` called once the shard fails."""
        self._on_failure.append(listener)

    def generation_started(self, started: event_pb2.GenerationStarted) -> None:
        self._tell(WatchResponse(generation_started=started))

    def generation_finished(self, finished: event_pb2.GenerationFinished) -> None:
        self._tell(WatchResponse(generation_finished=finished))

    @contextmanager
    def watched(self) -> Iterator[Watcher]:
        """A watcher that is told the status now, and everything after."""
        watcher = Watcher(self.status)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    def _tell_status(self) -> None:
        for watcher in self._watchers:
            watcher.tell_status(self.status)

    def _tell(self, event: WatchResponse) -> None:
        for watcher in self._watchers:
            watcher.tell(event)
