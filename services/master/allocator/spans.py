"""What it costs nodes to hold the layers from one boundary to another, for all boundaries and nodes at once.

Rules this module lives by:
- A range that does not fit costs infinitely much; bytes are compared as whole numbers before that, never as floats.
- Everything takes rows of costs, one for each way to have come to the boundaries, and gives rows of costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.master.allocator.ranges import Candidate

Costs = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Boundaries = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Nodes = np.ndarray[tuple[int, ...], np.dtype[np.intp]]
Bools = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class Spans:
    """The costs of nodes, each a row of these arrays; `inner` ones between two others."""

    sums: Costs
    """The cost of the first i layers."""
    first: Costs
    """As the first of several, up to each boundary."""
    tails: Costs
    """As the last of several, of all layers from each boundary on, with the head."""
    alone: Costs
    least_head: float
    """What the head costs at least."""
    lows: Boundaries
    """For each boundary, the lowest from which the layers up to it fit between two others."""
    highs: Boundaries
    """The highest such; below the lowest where there is none."""
    bottleneck: bool
    """The longest stage or hop counts, not their sum."""

    def join(self, left: Costs, right: Costs | float) -> Costs:
        """What both together cost."""
        joined: Costs = np.maximum(left, right) if self.bottleneck else left + right
        return joined

    def inner(self, base: Costs, nodes: Nodes) -> Costs:
        """The rows of `base` with one range of layers more, each on the node that `nodes` says."""
        if self.bottleneck:
            return self._longest(base, nodes)
        sums = self.sums[nodes]
        tables = [base - sums]
        while (width := 1 << (len(tables) - 1)) <= self._widest // 2:
            tables.append(np.minimum(tables[-1][:, :-width], tables[-1][:, width:]))
        table = np.concatenate([*tables, np.full((len(base), 1), np.inf)], axis=1)
        left, right = self._windows
        rows = np.arange(len(base))[:, None]
        least: Costs = np.minimum(table[rows, left[nodes]], table[rows, right[nodes]]) + sums
        return least

    def finish(self, base: Costs, nodes: Nodes) -> Costs:
        """The rows of `base` with all the layers that are left, and the head."""
        least: Costs = self.join(base, self.tails[nodes]).min(axis=1)
        return least

    def finish_start(self, base: Costs, node: int) -> int:
        """Where the last range begins at the least cost, in one row."""
        return int(self.join(base, self.tails[node]).argmin())

    def start_of(self, base: Costs, node: int, end: int) -> int:
        """Where an inner range that ends at `end` begins at the least cost, in one row."""
        low, high = int(self.lows[node, end]), int(self.highs[node, end]) + 1
        stages = self.sums[node, end] - self.sums[node, low:high]
        return low + int(self.join(base[low:high], stages).argmin())

    def ahead_beside(self, within: Bools) -> Costs:
        """For each row of `within`, the least that all layers from each boundary on cost on nodes that are not in it.

        A bound, as if layers could be split: the fastest take as much as any one range of theirs, or all the same time.
        """
        paces, works, left = self._paced
        if self.bottleneck:
            together = np.where(within, 0.0, 1.0 / paces).sum(axis=1)[:, None]
            return np.where(together > 0, left / np.where(together > 0, together, 1.0), np.inf)
        most = np.where(within, 0.0, works)[:, self._by_pace]
        before = np.cumsum(most, axis=1) - most
        taken = np.clip(left - before[:, :, None], 0.0, most[:, :, None])
        seconds: Costs = (taken * paces[self._by_pace, None]).sum(axis=1) + self.least_head
        # A little less than all is all, however it was rounded.
        seconds[left * (1 - 1e-9) > most.sum(axis=1)[:, None]] = np.inf
        return seconds

    @cached_property
    def _paced(self) -> tuple[Costs, Costs, Costs]:
        """What a unit of work costs each node at least, how much work it can take, and how much is left from where.

        The work is the layers', each as much as it costs the first node; nodes of another form cost otherwise.
        """
        work = self.sums[0]
        each = np.maximum(np.diff(work), np.finfo(np.float64).tiny)
        paces = np.maximum((np.diff(self.sums, axis=1) / each).min(axis=1), np.finfo(np.float64).tiny)
        inner = np.where(self.lows <= self.highs, work - work[np.minimum(self.lows, len(work) - 1)], 0.0)
        first = np.where(np.isfinite(self.first), work, 0.0)
        last = np.where(np.isfinite(self.tails), work[-1] - work, 0.0)
        return paces, np.maximum(np.maximum(inner, first), last).max(axis=1), work[-1] - work

    @cached_property
    def _by_pace(self) -> Nodes:
        return np.argsort(self._paced[0], kind="stable")

    def _longest(self, base: Costs, nodes: Nodes) -> Costs:
        """As `inner` where the longest stage counts: every start that fits is looked at."""
        longest = np.empty_like(base)
        for node in np.unique(nodes):
            rows = np.flatnonzero(nodes == node)
            starts, stages = self._starts[node], self._stages[node]
            longest[rows] = np.maximum(base[rows][:, starts], stages).min(axis=2)
        return longest

    @cached_property
    def _starts(self) -> Boundaries:
        """For each node and boundary as many starts as any range has; beyond those that fit whichever there are."""
        starts = self.lows[:, :, None] + np.arange(self._widest)
        within: Boundaries = np.minimum(starts, self.sums.shape[1] - 1)
        return within

    @cached_property
    def _stages(self) -> Costs:
        """The costs of the ranges from these starts; infinite where they do not fit."""
        nodes = np.arange(len(self.sums))[:, None, None]
        fits = self.lows[:, :, None] + np.arange(self._widest) <= self.highs[:, :, None]
        return np.where(fits, self.sums[:, :, None] - self.sums[nodes, self._starts], np.inf)

    @cached_property
    def _widest(self) -> int:
        return max(1, int((self.highs - self.lows).max()) + 1)

    @cached_property
    def _windows(self) -> tuple[Boundaries, Boundaries]:
        """For each boundary two columns of the table of minima of `inner`, which together cover its starts."""
        starts, columns = [0], self.sums.shape[1]
        while (width := 1 << (len(starts) - 1)) <= self._widest // 2:
            starts.append(starts[-1] + columns)
            columns -= width
        nothing = starts[-1] + columns
        powers = np.frexp(np.maximum(1, self.highs - self.lows + 1))[1] - 1
        offsets, there = np.array(starts)[powers], self.lows <= self.highs
        left = np.where(there, offsets + self.lows, nothing)
        return left, np.where(there, offsets + self.highs + 1 - (1 << powers), nothing)


def spans(candidates: Sequence[Candidate], *, timed: bool, bottleneck: bool, limit: float) -> Spans:
    """The costs of candidates: seconds for a token, or nothing where only what fits counts.

    For `bottleneck`, no stage that takes longer than `limit` is of interest.
    """
    columns = candidates[0].layers + 1
    boundaries = np.arange(columns)
    sums = np.array([each.second_sums if timed else np.zeros(columns) for each in candidates])
    heads = np.array([each.head_seconds if timed else 0.0 for each in candidates])
    rest = sums[:, -1:] + heads[:, None] - sums
    first_low, first_high = (
        _column([each.first_low for each in candidates]),
        _column([each.first_high for each in candidates]),
    )
    last_low, last_high = (
        _column([each.last_low for each in candidates]),
        _column([each.last_high for each in candidates]),
    )
    lows, highs = (np.array(ends) for ends in zip(*map(_inner_starts, candidates), strict=True))
    if bottleneck and limit < np.inf:
        # Sums ascend, so the starts from which a range takes no longer than the limit follow each other.
        quick = [np.searchsorted(row, row - limit) for row in sums]
        lows = np.maximum(lows, np.array(quick))
    return Spans(
        sums=sums,
        first=np.where((boundaries >= first_low) & (boundaries <= first_high), sums, np.inf),
        tails=np.where((boundaries >= last_low) & (boundaries <= last_high), rest, np.inf),
        alone=np.where([each.alone for each in candidates], rest[:, 0], np.inf),
        least_head=float(heads.min()),
        lows=lows,
        highs=highs,
        bottleneck=bottleneck,
    )


def _column(figures: Sequence[int]) -> Boundaries:
    return np.array(figures)[:, None]


def _inner_starts(candidate: Candidate) -> tuple[Boundaries, Boundaries]:
    """For each boundary the lowest and the highest start of a range between two others that ends there."""
    ends = np.arange(candidate.layers + 1)
    # The first start from which so many layers fit: how far one gets never falls with the start.
    lows = np.maximum(1, np.searchsorted(candidate.farthest, ends))
    highs = ends - 1
    if candidate.layers_fixed is not None:
        highs = ends - candidate.layers_fixed
        lows = np.where(lows <= highs, highs, ends)
    lows[0], highs[0] = 1, 0
    lows[-1], highs[-1] = 1, 0
    return lows, highs
