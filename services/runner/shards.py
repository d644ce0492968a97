"""The shards of a runner: made to be those that are wanted, and found by whoever calls for one.

Rules this module lives by:
- What runs and is wanted is left alone, whoever says so and however often.
- The machine's threads are divided among the shards there are when one starts; a running one keeps its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from services.runner.reconcile import Key, steps
from services.runner.supervisor import ShardSupervisor, Workshop
from ullage.v1 import dispatch_service_pb2, model_pb2


class Shards:
    """Every shard this runner has started and was not yet told to forget."""

    def __init__(self, shop: Workshop, threads: int) -> None:
        self._shop = shop
        self._threads = threads
        self._shards: dict[Key, ShardSupervisor] = {}
        self._started = 0
        self._overdrawn: dict[str, model_pb2.ShardStatus] = {}
        self._closed = False

    def reconcile(self, wanted: Mapping[Key, dispatch_service_pb2.Assignment], reasons: Mapping[Key, str]) -> None:
        """Start what is wanted and not there, stop what is there and not wanted, for the reason given if one is."""
        if self._closed:
            return
        for key in [key for key, shard in self._shards.items() if shard.status.phase == model_pb2.SHARD_PHASE_UNLOADED]:
            # It ended as the master wished. One that wants it has an older copy of its log, and means it.
            del self._shards[key]
        todo = steps(wanted, {key: shard.ended for key, shard in self._shards.items()})
        for key in todo.forget:
            del self._shards[key]
        for key in todo.stop:
            self._shards[key].stop(why=reasons.get(key, ""))
        running = sum(not shard.ended for shard in self._shards.values()) - len(todo.stop)
        threads = max(1, self._threads // max(1, running + len(todo.start)))
        for key in todo.start:
            self._start(wanted[key], threads)

    def _start(self, assignment: dispatch_service_pb2.Assignment, threads: int) -> None:
        self._started += 1
        key = assignment.instance_id, assignment.rank
        self._shards[key] = ShardSupervisor(assignment, threads, self._started, self._shop)

    def find(self, instance_id: str, rank: int) -> ShardSupervisor | None:
        """The shard that lives here, or None."""
        shard = self._shards.get((instance_id, rank))
        return None if shard is None or shard.ended else shard

    def of_instance(self, instance_id: str) -> list[ShardSupervisor]:
        """The instance's shards that live here, in order of rank."""
        return [shard for key, shard in sorted(self._shards.items()) if key[0] == instance_id and not shard.ended]

    def note_overdrawn(self, overdrawn: dispatch_service_pb2.OverdrawnShards) -> None:
        """Take the master's word for which ranks, here and elsewhere, hold more than they were promised."""
        self._overdrawn = {status.instance_id: status for status in overdrawn.shards}

    def overdrawn(self, instance_id: str) -> model_pb2.ShardStatus | None:
        """A rank of the instance that holds more than it was promised, or None: one here, or one the master named."""
        here = (shard.status for shard in self.of_instance(instance_id))
        return next((status for status in here if status.HasField("over_grant_bytes")), None) or self._overdrawn.get(
            instance_id
        )

    def statuses(self) -> list[model_pb2.ShardStatus]:
        """Every shard's status, in order of instance and rank."""
        return [shard.status for _, shard in sorted(self._shards.items())]

    async def close(self, failure: str) -> None:
        """End every shard, FAILED with `failure`, and start no more."""
        self._closed = True
        for shard in self._shards.values():
            shard.stop(failure)
        await _all_ended(self._shards.values())


async def _all_ended(shards: Iterable[ShardSupervisor]) -> None:
    await asyncio.gather(*(shard.wait() for shard in shards))
