"""The best order and cut of every set of up to eight nodes at once, exactly.

Held and Karp's recursion, with the boundary reached as one more dimension: the least cost at which the ranks that
end with a certain node, began with a certain one and are a certain set hold the layers up to each boundary.

Rules this module lives by:
- Nothing is rounded and nothing is left out: layers of any bytes, ways that are missing or lead one way only.
- Of equal costs the nodes that stand first in the problem win, so the same nodes get the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from typing import Final, NamedTuple

import numpy as np

from services.master.allocator.problem import Members, Problem
from services.master.allocator.spans import Costs, Spans, spans

EXACT_NODES_MAX: Final = 8
"""Sets of up to so many nodes are decided exactly: the rows of the recursion double with each node more."""

Indices = np.ndarray[tuple[int, ...], np.dtype[np.intp]]


class Best(NamedTuple):
    """The best that a set of nodes can do."""

    cost: float
    members: Members
    row: int
    """Its row among those of its size."""


@dataclass(frozen=True, eq=False)
class Level:
    """The rows of all sets of one size: a set, the node it begins with, the node it ends with."""

    masks: Indices
    firsts: Indices
    lasts: Indices
    sources: Indices
    """For each row those of the size below without its last node."""


@lru_cache(maxsize=EXACT_NODES_MAX)
def levels(nodes: int) -> tuple[Level, ...]:
    """The rows for so many nodes, by the size of the set from 1 on."""
    singles = np.arange(nodes)
    found = [Level(1 << singles, singles, singles, np.empty((nodes, 0), dtype=np.intp))]
    places = {(1 << node, node, node): node for node in range(nodes)}
    for size in range(2, nodes + 1):
        rows = [
            (sum(1 << node for node in members), first, last)
            for last in range(nodes)
            for members in combinations(range(nodes), size)
            if last in members
            for first in members
            if first != last
        ]
        before = [
            [places[mask ^ 1 << last, first, node] for node in _befores(mask ^ 1 << last, first)]
            for mask, first, last in rows
        ]
        masks, firsts, lasts = np.array(rows).T
        found.append(Level(masks, firsts, lasts, np.array(before)))
        places = {row: place for place, row in enumerate(rows)}
    return tuple(found)


def _befores(mask: int, first: int) -> list[int]:
    """The nodes that can stand last in a set that begins with `first`."""
    others = [node for node in range(mask.bit_length()) if mask >> node & 1 and node != first]
    return others or [first]


@dataclass(frozen=True, eq=False)
class Exact:
    """The sets of a problem of at most EXACT_NODES_MAX candidates, each at its best."""

    problem: Problem
    timed: bool
    """Costs are seconds; else it only matters who can hold what."""
    bottleneck: bool = False
    """The longest stage or hop counts, not their sum."""
    size: int = 0
    """1 where fewer nodes are better before anything else, -1 where more are."""
    tolerance: float = 1.0
    """Sets that cost no more than the best over this are of interest too."""
    limit: float = float("inf")
    """For `bottleneck`, a set with a longer stage is of no interest."""

    @cached_property
    def sets(self) -> list[Best]:
        """The sets that can hold the model and respect the request, the least cost first.

        All of them but for sizes above which none can be better.
        """
        return sorted(best for level in self._finished for best in level)

    def order(self, best: Best) -> Members:
        """The order in which the set is at its best."""
        size = len(best.members)
        if size == 1:
            return best.members
        level, base = self._levels[size - 1], self._bases[size - 2]
        last = int(level.lasts[best.row])
        start = self._spans.finish_start(base[best.row], last)
        return (*self._order_to(size - 1, self._source(size, best.row, start), start), last)

    def cost(self, order: Members) -> float:
        """What this order costs at its best cut; infinite where it cannot hold the model or has no way."""
        if len(order) == 1:
            return float(self._spans.alone[order[0]])
        spans, last = self._spans, order[-1]
        reached = spans.first[order[0]][None]
        for before, node in pairwise(order[:-1]):
            reached = spans.inner(spans.join(reached, self._onward[before, node]), np.array([node]))
        base = spans.join(reached, self._onward[order[-2], last])
        return float(spans.join(spans.finish(base, np.array([last])), self._back[last, order[0]])[0])

    def _order_to(self, size: int, row: int, end: int) -> Members:
        level = self._levels[size - 1]
        last = int(level.lasts[row])
        if size == 1:
            return (last,)
        start = self._spans.start_of(self._bases[size - 2][row], last, end)
        return (*self._order_to(size - 1, self._source(size, row, start), start), last)

    def _source(self, size: int, row: int, boundary: int) -> int:
        """The row before `row` that reaches `boundary` at the least cost."""
        level = self._levels[size - 1]
        before = level.sources[row]
        hop = self._onward[self._levels[size - 2].lasts[before], level.lasts[row]]
        return int(before[self._spans.join(self._reached[size - 2][before, boundary], hop).argmin()])

    @cached_property
    def _levels(self) -> tuple[Level, ...]:
        return levels(len(self.problem.candidates))[: max(1, self.problem.size_max)]

    @cached_property
    def _spans(self) -> Spans:
        return spans(self.problem.candidates, timed=self.timed, bottleneck=self.bottleneck, limit=self.limit)

    @cached_property
    def _onward(self) -> Costs:
        return self._counted(self.problem.hops.onward)

    @cached_property
    def _back(self) -> Costs:
        return self._counted(self.problem.hops.back)

    def _counted(self, seconds: Costs) -> Costs:
        return seconds if self.timed else np.where(np.isfinite(seconds), 0.0, np.inf)

    @cached_property
    def _reached(self) -> list[Costs]:
        return self._solved[0]

    @cached_property
    def _bases(self) -> list[Costs]:
        return self._solved[1]

    @cached_property
    def _finished(self) -> list[list[Best]]:
        return self._solved[2]

    @cached_property
    def _solved(self) -> tuple[list[Costs], list[Costs], list[list[Best]]]:
        """For each size: what its rows cost up to each boundary, the same before their last node, and its sets."""
        reached = [self._spans.first]
        bases: list[Costs] = []
        finished = [self._alone() if self.problem.size_min == 1 else []]
        for size in range(2, len(self._levels) + 1):
            level, below = self._levels[size - 1], self._levels[size - 2]
            hop = self._onward[below.lasts[level.sources], level.lasts[:, None]]
            base = self._spans.join(reached[-1][level.sources], hop[:, :, None]).min(axis=1)
            bases.append(base)
            finished.append(self._ended(level, base) if size >= self.problem.size_min else [])
            if size < len(self._levels):
                reached.append(self._spans.inner(base, level.lasts))
                if self._no_better(reached[-1], finished):
                    break
        return reached, bases, finished

    def _no_better(self, reached: Costs, finished: list[list[Best]]) -> bool:
        """No set that goes on from what was `reached` can be better than the best that is finished."""
        costs = [best.cost for level in finished for best in level]
        if not costs or self.size < 0:
            return False
        ahead = 0.0 if self.bottleneck else self._least_ahead
        return self.size > 0 or bool((reached + ahead).min() * self.tolerance >= min(costs))

    @cached_property
    def _least_ahead(self) -> Costs:
        """What is spent at least from each boundary on: on the fastest node, over the quickest way."""
        return np.asarray(self._spans.ahead + self._onward.min() + self._back.min())

    def _alone(self) -> list[Best]:
        costs = enumerate(self._spans.alone.tolist())
        return [Best(cost, (i,), i) for i, cost in costs if cost < np.inf and self._required in {0, 1 << i}]

    @cached_property
    def _required(self) -> int:
        return _mask(self.problem.required)

    def _ended(self, level: Level, base: Costs) -> list[Best]:
        """The best row of each set of a size, where there is one that holds the model."""
        costs = self._spans.join(self._spans.finish(base, level.lasts), self._back[level.lasts, level.firsts])
        order = np.lexsort((np.arange(len(costs)), costs, level.masks))
        _, heads = np.unique(level.masks[order], return_index=True)
        best = order[heads]
        best = best[np.isfinite(costs[best]) & (level.masks[best] & self._required == self._required)]
        return [Best(float(costs[row]), _members(int(level.masks[row])), int(row)) for row in best]


def _mask(members: Sequence[int]) -> int:
    return sum(1 << i for i in members)


def _members(mask: int) -> Members:
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)
