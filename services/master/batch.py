"""Facts on their way into the log, in columns: what is done to many of them at once costs least so.

Rules this module lives by:
- The payload is the fact's bytes as they were sent, where it was sent: it is never serialised again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress
from operator import lt
from typing import Final, NamedTuple
from zlib import crc32

from services import log_format
from ullage.v1 import event_pb2


class Batch(NamedTuple):
    """What one source said, in the order in which it said it; the columns are of one length."""

    source_sequences: Sequence[int]
    """Each fact's place in what the source says; 0 from the master itself, whose facts are not counted."""
    kinds: Sequence[int]
    payloads: Sequence[bytes]
    crcs: Sequence[int]
    """The checksum of each payload, reckoned where it came in: the one that is stored."""
    facts: Sequence[event_pb2.Fact]
    sampled_node_id: str | None = None
    """The node, where all facts are samples of this one's memory; None where nobody looked, or not all are."""

    def newer(self, last: int) -> Batch:
        """What of it is new of a source that said up to `last` before: what goes up from there, or is not counted."""
        numbers = self.source_sequences
        if not any(numbers) or (numbers[0] > last and all(map(lt, numbers, numbers[1:]))):
            return self
        kept = []
        for number in numbers:
            kept.append(number > last or not number)
            last = max(last, number)
        return Batch(
            list(compress(numbers, kept)),
            list(compress(self.kinds, kept)),
            list(compress(self.payloads, kept)),
            list(compress(self.crcs, kept)),
            list(compress(self.facts, kept)),
            self.sampled_node_id,
        )

    def cells(self, first: int, recorded_at_ns: int, source_number: int) -> list[int | bytes]:
        """The rows that store it, from the sequence `first` on, one after the other: column by column is cheapest."""
        count, width = len(self.facts), log_format.ROW_CELLS
        cells: list[int | bytes] = [0] * (count * width)
        cells[0::width] = range(first, first + count)
        cells[1::width] = [recorded_at_ns] * count
        cells[2::width] = self.kinds
        cells[3::width] = [source_number] * count
        cells[4::width] = self.source_sequences
        cells[5::width] = self.crcs
        cells[6::width] = self.payloads
        return cells


NOTHING: Final = Batch((), (), (), (), ())


def batch(numbered: Iterable[tuple[int, event_pb2.Fact]]) -> Batch:
    """Facts that have no bytes yet, each with its source_sequence."""
    numbers, facts = [], []
    for number, fact in numbered:
        numbers.append(number)
        facts.append(fact)
    kinds = [log_format.kind(fact) for fact in facts]
    payloads = [fact.SerializeToString() for fact in facts]
    return Batch(numbers, kinds, payloads, list(map(crc32, payloads)), facts)
