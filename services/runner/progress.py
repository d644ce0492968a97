"""How far a shard has come, and what of that the master was told.

Rules this module lives by:
- A phase is told when it is entered; what changes within it at most twice a second, when `tell_changes` is called.
- Phases only go forward. The end is told once, and nothing after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from services.clock import Clock
from services.runner.grant import over_grant_bytes
from services.runner.reconcile import Key
from ullage.v1 import event_pb2, model_pb2

RESIDENT_STEP_BYTES: Final = 1 << 20
"""A change of a process's memory that is worth a fact."""

ENDED_PHASES: Final = frozenset({model_pb2.SHARD_PHASE_FAILED, model_pb2.SHARD_PHASE_UNLOADED})

log = structlog.get_logger()


class Progress:
    """A shard's status, from STARTING on."""

    def __init__(
        self, key: Key, node_id: str, granted_bytes: int, clock: Clock, tell: Callable[[event_pb2.Fact], None]
    ) -> None:
        """`granted_bytes` is the shard's promise, 0 where there is none."""
        self._key = key
        self._granted_bytes = granted_bytes
        self._node_id = node_id
        self._clock = clock
        self._tell = tell
        self._told = model_pb2.ShardStatus()
        self._stepped_at = clock.monotonic()
        self.status = self._status(model_pb2.SHARD_PHASE_STARTING)
        self._tell_now()

    @property
    def ended(self) -> bool:
        return self.status.phase in ENDED_PHASES

    @property
    def still_seconds(self) -> float:
        """How long ago the shard last took a step: a new phase, or more bytes done."""
        return self._clock.monotonic() - self._stepped_at

    def step(self) -> None:
        """Count what just happened as a step."""
        self._stepped_at = self._clock.monotonic()

    def take(self, said: model_pb2.ShardStatus) -> bool:
        """Note what the process says of itself; True when it entered another phase, which is to be told."""
        if said.phase < self.status.phase or said.phase in ENDED_PHASES:
            log.warning("a shard says a phase out of order", shard=self._key, phase=said.phase)
            return False
        entered = said.phase != self.status.phase
        if entered or said.done_bytes != self.status.done_bytes:
            self.step()
        status = self._status(said.phase)
        if said.HasField("total_bytes"):
            status.done_bytes, status.total_bytes = said.done_bytes, said.total_bytes
        status.waits_for_ranks = said.waits_for_ranks
        if self.status.HasField("resident_bytes"):
            status.resident_bytes = self.status.resident_bytes
        if self.status.HasField("over_grant_bytes"):
            status.over_grant_bytes = self.status.over_grant_bytes
        self.status = status
        return entered

    def fetched(self, done_bytes: int, total_bytes: int) -> None:
        """Note how far the fetching of the model is, which comes before the process is started."""
        if (done_bytes, total_bytes) != (self.status.done_bytes, self.status.total_bytes):
            self.step()
        self.status.done_bytes, self.status.total_bytes = done_bytes, total_bytes

    def measured(self, resident_bytes: int | None) -> None:
        """Note what memory the process holds, None when that is unknown now."""
        if resident_bytes is None:
            return
        self.status.resident_bytes = resident_bytes
        over_bytes = over_grant_bytes(resident_bytes, self._granted_bytes)
        if over_bytes is None:
            self.status.ClearField("over_grant_bytes")
        else:
            self.status.over_grant_bytes = over_bytes

    def enter(self) -> None:
        """Tell the phase that was entered."""
        self._tell_now()

    def tell_changes(self) -> None:
        """Tell what changed within the phase, if that is worth a fact."""
        grown_bytes = abs(self.status.resident_bytes - self._told.resident_bytes)
        if self.status.HasField("over_grant_bytes") != self._told.HasField("over_grant_bytes"):
            self._tell_overdraft()
        elif self.status.done_bytes != self._told.done_bytes or grown_bytes >= RESIDENT_STEP_BYTES:
            self._tell_now()

    def _tell_overdraft(self) -> None:
        instance_id, rank = self._key
        say = log.warning if self.status.HasField("over_grant_bytes") else log.info
        event = "shard over its grant" if self.status.HasField("over_grant_bytes") else "shard within its grant again"
        resident_bytes = self.status.resident_bytes
        say(event, instance=instance_id, rank=rank, resident=resident_bytes, granted=self._granted_bytes)
        self._tell_now()

    def end(self, failure: model_pb2.ShardFailure | None) -> None:
        """Tell that the process is gone and its memory given back: FAILED with `failure`, or UNLOADED."""
        if failure is None:
            status = self._status(model_pb2.SHARD_PHASE_UNLOADED)
        else:
            status = self._status(model_pb2.SHARD_PHASE_FAILED)
            status.failure.CopyFrom(failure)
            status.failure.phase = failure.phase or self.status.phase
        if self.status.HasField("resident_bytes"):
            status.returned_bytes = self.status.resident_bytes
        status.resident_bytes = 0
        self.status = status
        self._tell_now()

    def _status(self, phase: model_pb2.ShardPhase.ValueType) -> model_pb2.ShardStatus:
        instance_id, rank = self._key
        return model_pb2.ShardStatus(instance_id=instance_id, rank=rank, node_id=self._node_id, phase=phase)

    def _tell_now(self) -> None:
        self._told = model_pb2.ShardStatus()
        self._told.CopyFrom(self.status)
        self._tell(event_pb2.Fact(shard_status_changed=event_pb2.ShardStatusChanged(status=self._told)))
