"""What of the old samples is kept: enough to say what the cluster was at any minute, and why it decided as it did.

Rules this module lives by:
- Only samples go: what was decided, and what came of it, is kept for ever.
- Every decision can be made again: for each of them the last samples before the state it was made on stay. Of memory
  two, since what a shard has settled to is reckoned from the last two readings of its node.
- The same holds for the end of the range, so that what follows finds the state it followed.
- Pure: what goes depends on the events and the cuts alone, and to do it twice is to do it once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from services.log_format import KIND_NUMBERS
from ullage.v1 import event_pb2

MINUTE_NS: Final = 60_000_000_000

SAMPLE_KINDS: Final = frozenset(KIND_NUMBERS[kind] for kind in ("memory_sampled", "system_sampled", "link_measured"))
"""The kinds of which old ones may go; the table's trigger says the same."""

DECISION_KINDS: Final = frozenset(KIND_NUMBERS[kind] for kind in ("instance_placed", "placement_refused"))

Subject: TypeAlias = tuple[str, ...]
"""What a sample is one of many of."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How long samples are kept."""

    samples_seconds: float = 2 * 3600
    """All of them for so long; then one a minute."""
    minutes_seconds: float = 7 * 24 * 3600
    """And these for so long."""


DEFAULT: Final = Policy()


def kept_from(now_ns: int, seconds: float) -> int:
    """The moment so long before `now_ns`; where that is before all moments of a log, the first of them."""
    return max(0, now_ns - round(seconds * 1e9))


def subject(fact: event_pb2.Fact) -> Subject:
    """What a sample is about."""
    match fact.WhichOneof("fact"):
        case "memory_sampled":
            return "memory", fact.memory_sampled.node_id
        case "system_sampled":
            return "system", fact.system_sampled.node_id
        case "link_measured":
            return "link", fact.link_measured.link.from_node_id, fact.link_measured.link.to_node_id
        case other:
            raise ValueError(f"{other} is no sample")


def decided_at(fact: event_pb2.Fact) -> int:
    """The sequence of the state a decision was made on."""
    if fact.HasField("instance_placed"):
        return fact.instance_placed.placement.decided_at_sequence
    return fact.placement_refused.refusal.decided_at_sequence


class Thinning:
    """One pass over a range's samples, from its end to its beginning."""

    def __init__(self, last: int, decisions: Collection[int], minutes_from_ns: int) -> None:
        """`decisions` are the sequences decided at; samples recorded before `minutes_from_ns` are not kept."""
        self._pending = sorted({last, *(at for at in decisions if at < last)})
        self._minutes_from_ns = minutes_from_ns
        self._needed: Counter[Subject] = Counter()
        self._minutes: dict[Subject, int] = {}

    def surplus(self, samples: Iterable[tuple[int, int, Subject]]) -> Iterator[int]:
        """The sequences that go, of samples given by sequence, time and subject, the latest first."""
        for sequence, recorded_at_ns, what in samples:
            if self._pending and sequence <= self._pending[-1]:
                while self._pending and sequence <= self._pending[-1]:
                    self._pending.pop()
                self._needed.clear()
            needed = self._needed[what] < (2 if what[0] == "memory" else 1)
            self._needed[what] += 1
            minute = recorded_at_ns // MINUTE_NS
            of_minute = recorded_at_ns >= self._minutes_from_ns and self._minutes.get(what) != minute
            if needed or of_minute:
                self._minutes[what] = minute
            else:
                yield sequence
