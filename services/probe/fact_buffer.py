"""The facts a probe has said and the master has not yet made durable, in order and bounded.

When it is full, the oldest memory sample goes first and the oldest system sample next; the newest of each
and every announcement stay. What is dropped leaves a gap in the numbers, which the master takes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from typing import Final

from ullage.v1 import event_pb2, telemetry_service_pb2

FACTS_MAX: Final = 4096
"""Half an hour of a probe at its own pace, in some 4 MiB."""

_DROPPED_IN_TURN: Final = ("memory_sampled", "system_sampled")


class FactBuffer:
    """Numbers facts 1, 2, 3 ... and keeps them until they are acknowledged."""

    def __init__(self, facts_max: int = FACTS_MAX) -> None:
        self._facts_max = facts_max
        self._observations: OrderedDict[int, telemetry_service_pb2.Observation] = OrderedDict()
        self._samples: dict[str, deque[int]] = {kind: deque() for kind in _DROPPED_IN_TURN}
        self._last_sequence = 0
        self.acknowledged_sequence = 0
        self.dropped_facts = 0

    def __len__(self) -> int:
        """How many facts are kept."""
        return len(self._observations)

    def add(self, fact: event_pb2.Fact) -> None:
        """Keep `fact` as the newest, dropping an older one if need be."""
        if len(self._observations) >= self._facts_max:
            self._drop()
        self._last_sequence += 1
        self._observations[self._last_sequence] = telemetry_service_pb2.Observation(
            source_sequence=self._last_sequence, fact=fact
        )
        samples = self._samples.get(fact.WhichOneof("fact") or "")
        if samples is not None:
            samples.append(self._last_sequence)

    def oldest(self, count: int) -> list[telemetry_service_pb2.Observation]:
        """The first `count` facts that are kept, in order."""
        return list(islice(self._observations.values(), count))

    def acknowledge(self, sequence: int) -> None:
        """Let go of everything up to `sequence`: it is durable."""
        self.acknowledged_sequence = max(self.acknowledged_sequence, sequence)
        self._discard_until(sequence)

    def give_up(self, sequence: int) -> int:
        """Let go of everything up to `sequence`, which the master will never take; how many that was."""
        before = len(self._observations)
        self._discard_until(sequence)
        given_up = before - len(self._observations)
        self.dropped_facts += given_up
        return given_up

    def _discard_until(self, sequence: int) -> None:
        while self._observations and next(iter(self._observations)) <= sequence:
            self._observations.popitem(last=False)
        for samples in self._samples.values():
            while samples and samples[0] <= sequence:
                samples.popleft()

    def _drop(self) -> None:
        for kind in _DROPPED_IN_TURN:
            samples = self._samples[kind]
            if len(samples) > 1:
                del self._observations[samples.popleft()]
                self.dropped_facts += 1
                return
