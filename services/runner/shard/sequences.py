"""The sequences a shard works on, each with its cache: alone, or side by side with others in one batch.

What is computed side by side is kept side by side, so that a step of a batch copies nothing. Who joins and who
leaves is said by the rows of each step, the same on every rank, and only then are caches moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from services.runner.shard.prefixes import Prefix
from ullage.v1 import runner_service_pb2

Caches = list[Any]
"""An entry for each of the shard's layers."""


@dataclass(eq=False)
class Batch:
    """Sequences side by side: row i of every cache is that of `members[i]`."""

    members: list[OneSequence]
    caches: Caches

    def keep(self, members: Sequence[OneSequence]) -> None:
        """Leave only `members`, in this order."""
        rows = [self.members.index(each) for each in members]
        for layer, cache in enumerate(self.caches):
            self.caches[layer] = _of_rows(cache, rows)
        self.members = list(members)

    def take_out(self, member: OneSequence) -> Caches:
        """The caches of `member`, who leaves: layer by layer, so that only one layer's is there twice at a time."""
        row = self.members.index(member)
        staying = [place for place in range(len(self.members)) if place != row]
        taken: Caches = []
        for layer, cache in enumerate(self.caches):
            own = cache.extract(row)
            mx.eval(own.state)
            taken.append(own)
            self.caches[layer] = _of_rows(cache, staying) if staying else None
        self.members.remove(member)
        return taken

    def add(self, members: Sequence[OneSequence]) -> None:
        """Take in `members`, who are alone, after those who are here."""
        for mine, theirs in zip(self.caches, _merged(members), strict=True):
            mine.extend(theirs)
            mx.eval(mine.state)
        self.members += members


@dataclass(eq=False)
class OneSequence:
    """One sequence. It has caches while it is alone, else a batch that holds them."""

    sampling: runner_service_pb2.SamplingParameters
    caches: Caches
    batch: Batch | None = None
    tokens: int = 0
    """How many have been taken so far."""
    seen: set[int] = field(default_factory=set)
    """Which tokens were taken, where sampling looks back at them."""


class Sequences:
    """All of a shard. Belongs to the thread that computes."""

    def __init__(self, new_caches: Callable[[], Caches]) -> None:
        self._new_caches = new_caches
        self._open: dict[str, OneSequence] = {}

    def begun(
        self, generation_id: str, sampling: runner_service_pb2.SamplingParameters, prefix: Prefix | None = None
    ) -> OneSequence:
        """The sequence with caches of its own; a new one is opened, to be sampled by `sampling`.

        With `prefix` it begins with these tokens of another open one, which it takes the place of.
        """
        if prefix is not None:
            caches = self._cut(prefix)
            self._open[generation_id] = OneSequence(sampling, caches, tokens=prefix.tokens)
        elif generation_id not in self._open:
            self._open[generation_id] = OneSequence(sampling, self._new_caches())
        return self.alone(generation_id)

    def _cut(self, prefix: Prefix) -> Caches:
        """The caches of an open sequence, which is no more, cut to its beginning."""
        cut = self.alone(prefix.sequence_id)
        del self._open[prefix.sequence_id]
        for cache in cut.caches:
            cache.trim(cut.tokens - prefix.tokens)
        return cut.caches

    def alone(self, generation_id: str) -> OneSequence:
        """An open sequence with caches of its own."""
        found = self._open[generation_id]
        _take_out(found)
        return found

    def together(self, generation_ids: Sequence[str]) -> Batch:
        """These sequences, all open, side by side in this order; others that were with them leave."""
        wanted = [self._open[each] for each in generation_ids]
        batch = wanted[0].batch
        if batch is not None and batch.members == wanted:
            return batch
        for each in set(batch.members if batch else ()).difference(wanted):
            _take_out(each)
        joining = [each for each in wanted if each.batch is not batch or batch is None]
        for each in joining:
            _take_out(each)
        if batch is None:
            batch = Batch(joining, list(_merged(joining)))
        elif joining:
            batch.add(joining)
        for each in joining:
            each.batch, each.caches = batch, []
        if batch.members != wanted:
            batch.keep(wanted)
        return batch

    def close(self, generation_id: str) -> bool:
        """Free the sequence's caches; False when it is not open."""
        closed = self._open.pop(generation_id, None)
        if closed is None:
            return False
        _leave(closed)
        return True


def _take_out(sequence: OneSequence) -> None:
    """Give a sequence in a batch caches of its own."""
    batch, sequence.batch = sequence.batch, None
    if batch is not None:
        sequence.caches = batch.take_out(sequence)


def _leave(sequence: OneSequence) -> None:
    batch, sequence.batch = sequence.batch, None
    if batch is None:
        return
    staying = [each for each in batch.members if each is not sequence]
    if staying:
        batch.keep(staying)
    else:
        batch.members, batch.caches = [], []


def _of_rows(cache: Any, rows: Sequence[int]) -> Any:
    """Of sequences side by side those of `rows`, in this order. What `cache` holds of the others is given back."""
    if hasattr(cache, "max_size"):
        # The runtime's own way leaves room for the longest who was ever there, up to the window, whatever the context.
        apart = [cache.extract(row) for row in rows]
        kept = type(apart[0]).merge(apart)
    else:
        cache.filter(mx.array(list(rows)))
        kept = cache
    # At once: the memory of those who leave is given back, whenever those who stay go on.
    mx.eval(kept.state)
    return kept


def _merged(members: Sequence[OneSequence]) -> Iterator[Any]:
    """The caches of `members` side by side, layer by layer, so that only one layer's is there twice at a time."""
    for layer, first in enumerate(members[0].caches):
        side_by_side = type(first).merge([each.caches[layer] for each in members])
        mx.eval(side_by_side.state)
        for each in members:
            each.caches[layer] = None
        yield side_by_side
