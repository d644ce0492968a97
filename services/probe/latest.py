"""The samples taken last, for whoever asks on the spot or watches."""

from __future__ import annotations

import asyncio

from ullage.v1 import node_pb2


class Latest:
    """Holds one memory and one system sample, and wakes those who wait for the next."""

    def __init__(self) -> None:
        self.memory: node_pb2.MemorySample | None = None
        self.system: node_pb2.SystemSample | None = None
        self._closed = False
        self._next = asyncio.Event()

    def publish(self, memory: node_pb2.MemorySample) -> None:
        """Make `memory` the latest."""
        self.memory = memory
        self._wake()

    def close(self) -> None:
        """End every watch: nothing more is taken."""
        self._closed = True
        self._wake()

    async def next_memory(self) -> node_pb2.MemorySample | None:
        """The next sample that is taken, None when nothing more is. What is taken meanwhile is missed."""
        if not self._closed:
            await self._next.wait()
        return None if self._closed else self.memory

    def _wake(self) -> None:
        self._next.set()
        self._next = asyncio.Event()
