"""The facts a runner has to tell: numbered when first sent, kept until the master has them on its disk.

Rules this module lives by:
- A number is given once and never to another fact, so that a fact sent twice is stored once.
- While a fact waits to be sent, a newer one about the same thing takes its place: of a shard, only the newest
  status matters. A shard's end is its last status.
- What waits is bounded: of the requests served while the master is away, the oldest are given up.
- A master that has less than it once acknowledged has an older copy of its log: it is told the newest again of each
  thing, or it would wait for ever for what it was told before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from itertools import islice
from typing import Final

import structlog

from ullage.v1 import event_pb2, model_pb2, telemetry_service_pb2

HELLO_SEQUENCE: Final = 1
"""The source_sequence of a boot's announcement, which its hello carries; facts are numbered after it."""

UNACKNOWLEDGED_MAX: Final = 1024
"""Facts under way at once; the rest wait, and may be replaced by newer ones."""

WAITING_MAX: Final = 10_000
"""Facts that wait: hours of requests with the master away, a few MiB."""

KEPT_MAX: Final = 1000
"""Things whose newest fact is kept when the master has it: more shards than a copy of a log is behind, some 300 KiB."""

_ENDED: Final = frozenset({model_pb2.SHARD_PHASE_FAILED, model_pb2.SHARD_PHASE_UNLOADED})

log = structlog.get_logger()


class Outbox:
    """Facts on their way to the master."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, event_pb2.Fact] = {}
        self._unacknowledged: deque[telemetry_service_pb2.Observation] = deque()
        self._newest: dict[Hashable, event_pb2.Fact] = {}
        """Of each thing, also once the master has it."""
        self._sent = 0
        self._last_sequence = HELLO_SEQUENCE
        self._acknowledged_sequence = 0
        self._added = 0
        self.arrived = asyncio.Event()
        """Set when there is something to send."""

    def add(self, fact: event_pb2.Fact) -> None:
        """Take a fact to be told, in place of an older one about the same thing."""
        self._added += 1
        subject = _subject(fact)
        if subject is None:
            subject = self._added
        else:
            self._keep(subject, fact)
        self._waiting.pop(subject, None)
        self._waiting[subject] = fact
        if len(self._waiting) > WAITING_MAX:
            self._give_up_oldest()
        self.arrived.set()

    def _keep(self, subject: Hashable, fact: event_pb2.Fact) -> None:
        self._newest.pop(subject, None)
        self._newest[subject] = fact
        if len(self._newest) > KEPT_MAX:
            # A shard that runs may have had nothing to tell for days; one that ended is the first to be forgotten.
            ended = (kept for kept, said in self._newest.items() if said.shard_status_changed.status.phase in _ENDED)
            del self._newest[next(ended, next(iter(self._newest)))]

    def _give_up_oldest(self) -> None:
        oldest = next((subject for subject in self._waiting if isinstance(subject, int)), next(iter(self._waiting)))
        lost = self._waiting.pop(oldest)
        log.error("fact given up: too many wait for the master", kind=lost.WhichOneof("fact"), waiting=WAITING_MAX)

    def batch(self) -> list[telemetry_service_pb2.Observation]:
        """What is to be sent now, in order; it counts as sent until `rewind`."""
        while self._waiting and len(self._unacknowledged) < UNACKNOWLEDGED_MAX:
            fact = self._waiting.pop(next(iter(self._waiting)))
            self._last_sequence += 1
            self._unacknowledged.append(
                telemetry_service_pb2.Observation(source_sequence=self._last_sequence, fact=fact)
            )
        batch = list(islice(self._unacknowledged, self._sent, None))
        self._sent = len(self._unacknowledged)
        self.arrived.clear()
        return batch

    def acknowledge(self, source_sequence: int) -> None:
        """Forget what is durable: everything up to `source_sequence`. Where that was more, tell the newest again."""
        if source_sequence < self._acknowledged_sequence:
            log.warning("the master's log is an older one: told again", things=len(self._newest))
            self._waiting = {**self._newest, **self._waiting}
        self._acknowledged_sequence = source_sequence
        while self._unacknowledged and self._unacknowledged[0].source_sequence <= source_sequence:
            self._unacknowledged.popleft()
            self._sent = max(0, self._sent - 1)
        if self._waiting:
            self.arrived.set()

    def rewind(self) -> None:
        """Have everything that is not acknowledged sent again: the connection was lost."""
        self._sent = 0
        self.arrived.set()

    @property
    def empty(self) -> bool:
        """The master has everything."""
        return not self._waiting and not self._unacknowledged


def _subject(fact: event_pb2.Fact) -> Hashable:
    """What a fact is about, where a newer one says all that an older one did; else None."""
    match fact.WhichOneof("fact"):
        case "shard_status_changed":
            status = fact.shard_status_changed.status
            return "shard", status.instance_id, status.rank
        case "runner_announced":
            return ("runner",)
        case "link_measured":
            return "link", fact.link_measured.link.to_node_id
        case _:
            return None
