"""The best order and cut of every set of up to eight nodes at once, exactly.

Held and Karp's recursion, with the boundary reached as one more dimension: the least cost at which the ranks that
end with a certain node, began with a certain one and are a certain set hold the layers up to each boundary.

Rules this module lives by:
- Nothing is rounded, and all is looked at: layers of any bytes, ways that are missing or lead one way only. A row is
  left only where the other nodes, as if layers could be split among them, cannot make it one of the best sets.
- Of equal costs the nodes that stand first in the problem win, so the same nodes get the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from typing import Final, NamedTuple

import numpy as np

from services.master.allocator.problem import Members, Problem
from services.master.allocator.spans import Bools, Costs, Spans, spans

EXACT_NODES_MAX: Final = 8
"""Sets of up to so many nodes are decided exactly: the rows of the recursion double with each node more."""

NOT_EQUAL: Final = 1 + 1e-7
"""Costs that differ by a larger factor are not equal, however they came about and were rounded."""

Indices = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
Row = tuple[Members, int, int]
"""A set, the node it begins with, the node it ends with."""


class Best(NamedTuple):
    """The best that a set of nodes can do."""

    cost: float
    members: Members
    row: int
    """Its row among those of its size."""


class Ended(NamedTuple):
    """The sets of a size, each at its best."""

    costs: Costs
    """Infinite where a set cannot hold the model, or is not what is asked for."""
    rows: Indices


@dataclass(frozen=True, eq=False)
class Level:
    """The rows of all sets of one size: a set, the node it begins with, the node it ends with."""

    firsts: Indices
    lasts: Indices
    sources: Indices
    """For each row those of the size below without its last node."""
    without_last: Indices
    """For each row the place, among the sets of the size below, of its set without its last node."""
    members: list[Members]
    """The sets."""
    within: Bools
    """For each set, which nodes are in it."""
    rows: Indices
    """For each set, its rows."""


@lru_cache(maxsize=EXACT_NODES_MAX)
def levels(nodes: int) -> tuple[Level, ...]:
    """The rows for so many nodes, by the size of the set from 1 on."""
    singles = np.arange(nodes)
    alone: list[Members] = [(node,) for node in range(nodes)]
    nothing = np.empty((nodes, 0), dtype=np.intp)
    found = [Level(singles, singles, nothing, singles, alone, np.eye(nodes, dtype=np.bool_), singles[:, None])]
    places = {(members, members[0], members[0]): place for place, members in enumerate(alone)}
    for size in range(2, nodes + 1):
        rows = [
            (members, first, last)
            for last in range(nodes)
            for members in combinations(range(nodes), size)
            if last in members
            for first in members
            if first != last
        ]
        found.append(_level(rows, places, found[-1]))
        places = {row: place for place, row in enumerate(rows)}
    return tuple(found)


def _level(rows: list[Row], places: Mapping[Row, int], below: Level) -> Level:
    """The level with these rows, above one whose rows stand in `places`."""
    others = [(_without(members, last), first) for members, first, last in rows]
    sets = {members: place for place, members in enumerate(below.members)}
    sources = [[places[rest, first, node] for node in _befores(rest, first)] for rest, first in others]
    members = sorted({row[0] for row in rows})
    of_set: dict[Members, list[int]] = {each: [] for each in members}
    for place, row in enumerate(rows):
        of_set[row[0]].append(place)
    return Level(
        firsts=np.array([first for _, first, _ in rows]),
        lasts=np.array([last for *_, last in rows]),
        sources=np.array(sources),
        without_last=np.array([sets[rest] for rest, _ in others]),
        members=members,
        within=np.array([[node in each for node in range(below.within.shape[1])] for each in members]),
        rows=np.array(list(of_set.values())),
    )


def _without(members: Members, last: int) -> Members:
    return tuple(node for node in members if node != last)


def _befores(members: Members, first: int) -> Members:
    """The nodes that can stand last in a set that begins with `first`."""
    return _without(members, first) or (first,)


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
    """Sets that cost no more than another of interest over this are of interest too; 0 where all are."""
    limit: float = float("inf")
    """For `bottleneck`, a set with a longer stage is of no interest."""
    wanted: int = 1
    """How many of the best sets are of interest."""

    @cached_property
    def sets(self) -> list[Best]:
        """The sets of interest that can hold the model and respect the request, the least cost first."""
        worst = np.inf if self.size else self._worst_of_interest(self._finished)
        return sorted(
            Best(float(ended.costs[place]), level.members[place], int(ended.rows[place]))
            for level, ended in zip(self._levels, self._finished, strict=False)
            for place in np.flatnonzero((ended.costs <= worst) & np.isfinite(ended.costs)).tolist()
        )

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
    def _finished(self) -> list[Ended]:
        return self._solved[2]

    @cached_property
    def _solved(self) -> tuple[list[Costs], list[Costs], list[Ended]]:
        """For each size: what its rows cost up to each boundary, the same before their last node, and its sets."""
        reached: list[Costs] = [self._spans.first]
        bases: list[Costs] = []
        finished = [self._alone()]
        alone = self._levels[0]
        rows = self._worth_going_on(reached[0], alone, alone.lasts, finished)
        for level, below in zip(self._levels[1:], self._levels, strict=False):
            if not rows.size:
                break
            rows = np.flatnonzero(np.isin(level.sources, rows).any(axis=1))
            hop = self._onward[below.lasts[level.sources[rows]], level.lasts[rows, None]]
            before = self._spans.join(reached[-1][level.sources[rows]], hop[:, :, None]).min(axis=1)
            bases.append(_spread(before, rows, level))
            finished.append(self._ended(level, before, rows))
            worth = self._worth_going_on(before, below, level.without_last[rows], finished)
            rows = rows[worth]
            reached.append(_spread(self._spans.inner(before[worth], level.lasts[rows]), rows, level))
        return reached, bases, finished

    def _worth_going_on(self, reached: Costs, level: Level, places: Indices, finished: list[Ended]) -> Indices:
        """The rows of `reached` from which sets of interest may come, were others than their nodes to hold the rest.

        `places` says of each row which set of `level` its nodes are.
        """
        worst = self._worst_of_interest(finished)
        if worst == np.inf:
            return np.arange(len(reached))
        ahead = self._spans.join(self._spans.ahead_beside(level.within), self._least_hops)
        return np.flatnonzero(self._spans.join(reached, ahead[places]).min(axis=1) <= worst)

    def _worst_of_interest(self, finished: list[Ended]) -> float:
        """Larger sets that cost more are of no interest: enough cost less, or are smaller where that counts first."""
        costs = np.concatenate([ended.costs for ended in finished])
        if self.size > 0 and np.isfinite(costs).sum() >= self.wanted:
            return -np.inf
        if not self.timed or self.size or not self.tolerance or len(costs) < self.wanted:
            return np.inf
        return float(np.partition(costs, self.wanted - 1)[self.wanted - 1]) * NOT_EQUAL / self.tolerance

    @cached_property
    def _least_hops(self) -> float:
        """What the ways on to others and back cost at least."""
        return float(self._spans.join(self._onward.min(), self._back.min()))

    def _alone(self) -> Ended:
        level = self._levels[0]
        return Ended(self._respecting(level, self._spans.alone), level.lasts)

    def _ended(self, level: Level, before: Costs, rows: Indices) -> Ended:
        """The best row of each set of a size, of these rows."""
        lasts = level.lasts[rows]
        ended = self._spans.join(self._spans.finish(before, lasts), self._back[lasts, level.firsts[rows]])
        costs = _spread(ended, rows, level)
        best = costs[level.rows].argmin(axis=1)
        best_rows = np.take_along_axis(level.rows, best[:, None], axis=1)[:, 0]
        return Ended(self._respecting(level, costs[best_rows]), best_rows)

    def _respecting(self, level: Level, costs: Costs) -> Costs:
        """The costs of a level's sets, infinite where the request asks for other ones."""
        if len(level.members[0]) < self.problem.size_min:
            return np.full_like(costs, np.inf)
        return np.where(level.within[:, self.problem.required].all(axis=1), costs, np.inf)


def _spread(costs: Costs, rows: Indices, level: Level) -> Costs:
    """`costs` of some rows as those of all rows of the level; infinite for the others."""
    everyone = np.full((len(level.lasts), *costs.shape[1:]), np.inf)
    everyone[rows] = costs
    return everyone
