"""What it costs a node to hold the layers from one boundary to another, for all boundaries at once.

Rules this module lives by:
- A range that does not fit costs infinitely much; bytes are compared as whole numbers before that, never as floats.
- Everything takes rows of costs, one for each way to have come to the boundaries, and gives rows of costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.master.allocator.ranges import Candidate

Costs = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Boundaries = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Span:
    """A node's costs; `inner` ones between two others."""

    layers: int
    sums: Costs
    """The cost of the first i layers."""
    head: float
    """What the last rank costs besides."""
    first: Costs
    """As the first of several, up to each boundary."""
    alone: float
    lows: Boundaries
    """For each boundary, the lowest from which the layers up to it fit between two others."""
    highs: Boundaries
    """The highest such; below the lowest where there is none."""
    last_low: int
    last_high: int

    def inner(self, base: Costs, *, bottleneck: bool) -> Costs:
        """The rows of `base` with one range of layers more."""
        if bottleneck:
            longest: Costs = np.maximum(base[:, :, None], self._stages[None]).min(axis=1)
            return longest
        tables = [base - self.sums]
        while (width := 1 << (len(tables) - 1)) <= self._widest // 2:
            tables.append(np.minimum(tables[-1][:, :-width], tables[-1][:, width:]))
        table = np.concatenate([*tables, np.full((len(base), 1), np.inf)], axis=1)
        left, right = self._windows
        least: Costs = np.minimum(table[:, left], table[:, right]) + self.sums
        return least

    def finish(self, base: Costs, *, bottleneck: bool) -> Costs:
        """The rows of `base` with all the layers that are left, and the head."""
        if self.last_low > self.last_high:
            return np.full(len(base), np.inf)
        starts = slice(self.last_low, self.last_high + 1)
        least: Costs = self._joined(base[:, starts], self._tail[starts], bottleneck=bottleneck).min(axis=1)
        return least

    def finish_start(self, base: Costs, *, bottleneck: bool) -> int:
        """Where the last range begins at the least cost, in one row."""
        starts = slice(self.last_low, self.last_high + 1)
        return self.last_low + int(self._joined(base[starts], self._tail[starts], bottleneck=bottleneck).argmin())

    def start_of(self, base: Costs, end: int, *, bottleneck: bool) -> int:
        """Where an inner range that ends at `end` begins at the least cost, in one row."""
        low, high = int(self.lows[end]), int(self.highs[end]) + 1
        stages = self.sums[end] - self.sums[low:high]
        return low + int(self._joined(base[low:high], stages, bottleneck=bottleneck).argmin())

    def _joined(self, base: Costs, stages: Costs, *, bottleneck: bool) -> Costs:
        joined: Costs = np.maximum(base, stages) if bottleneck else base + stages
        return joined

    @cached_property
    def _tail(self) -> Costs:
        """The cost of all layers from each boundary on, with the head."""
        return np.asarray(self.sums[-1] + self.head - self.sums)

    @cached_property
    def _stages(self) -> Costs:
        """The cost of a range by its start and end, infinite where it does not fit."""
        starts = np.arange(self.layers + 1)[:, None]
        fits = (starts >= self.lows) & (starts <= self.highs)
        return np.where(fits, self.sums[None, :] - self.sums[:, None], np.inf)

    @cached_property
    def _widest(self) -> int:
        return max(1, int((self.highs - self.lows).max()) + 1)

    @cached_property
    def _windows(self) -> tuple[Boundaries, Boundaries]:
        """For each boundary two columns of the table of minima of `inner`, which together cover its starts."""
        starts, columns = [0], self.layers + 1
        while (width := 1 << (len(starts) - 1)) <= self._widest // 2:
            starts.append(starts[-1] + columns)
            columns -= width
        nothing = starts[-1] + columns
        counts = np.maximum(1, self.highs - self.lows + 1)
        powers = np.frexp(counts)[1] - 1
        offsets, there = np.array(starts)[powers], self.lows <= self.highs
        left = np.where(there, offsets + self.lows, nothing)
        return left, np.where(there, offsets + self.highs + 1 - (1 << powers), nothing)


def span(candidate: Candidate, *, timed: bool) -> Span:
    """The costs of a candidate: seconds for a token, or nothing where only what fits counts."""
    layers = candidate.layers
    sums = candidate.second_sums if timed else np.zeros(layers + 1)
    head = candidate.head_seconds if timed else 0.0
    first = np.full(layers + 1, np.inf)
    first[candidate.first_low : candidate.first_high + 1] = sums[candidate.first_low : candidate.first_high + 1]
    lows, highs = _inner_starts(candidate)
    return Span(
        layers=layers,
        sums=sums,
        head=head,
        first=first,
        alone=float(sums[-1]) + head if candidate.alone else float("inf"),
        lows=lows,
        highs=highs,
        last_low=candidate.last_low,
        last_high=candidate.last_high,
    )


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
