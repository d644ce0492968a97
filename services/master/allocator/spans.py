"""What it costs a node to hold the layers from one boundary to another, for all boundaries at once.

Rules this module lives by:
- A range that does not fit costs infinitely much; bytes are compared as whole numbers before that, never as floats.
- Everything takes rows of costs, one for each way to have come to the boundaries, and gives rows of costs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.master.allocator.ranges import Candidate

Costs = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


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
    lows: tuple[int, ...]
    """For each boundary, the lowest from which the layers up to it fit between two others."""
    highs: tuple[int, ...]
    """The highest such; below the lowest where there is none."""
    last_low: int
    last_high: int

    def inner(self, base: Costs, *, bottleneck: bool) -> Costs:
        """The rows of `base` with one range of layers more."""
        if bottleneck:
            return np.maximum(base[:, :, None], self._stages[None]).min(axis=1)
        tables = [base - self.sums]
        while (width := 1 << (len(tables) - 1)) <= self._widest // 2:
            tables.append(np.minimum(tables[-1][:, :-width], tables[-1][:, width:]))
        table = np.concatenate([*tables, np.full((len(base), 1), np.inf)], axis=1)
        left, right = self._windows
        return np.minimum(table[:, left], table[:, right]) + self.sums

    def finish(self, base: Costs, *, bottleneck: bool) -> Costs:
        """The rows of `base` with all the layers that are left, and the head."""
        if self.last_low > self.last_high:
            return np.full(len(base), np.inf)
        starts = slice(self.last_low, self.last_high + 1)
        return self._joined(base[:, starts], self._tail[starts], bottleneck=bottleneck).min(axis=1)

    def finish_start(self, base: Costs, *, bottleneck: bool) -> int:
        """Where the last range begins at the least cost, in one row."""
        starts = slice(self.last_low, self.last_high + 1)
        return self.last_low + int(self._joined(base[starts], self._tail[starts], bottleneck=bottleneck).argmin())

    def start_of(self, base: Costs, end: int, *, bottleneck: bool) -> int:
        """Where an inner range that ends at `end` begins at the least cost, in one row."""
        low, high = self.lows[end], self.highs[end] + 1
        stages = self.sums[end] - self.sums[low:high]
        return low + int(self._joined(base[low:high], stages, bottleneck=bottleneck).argmin())

    def _joined(self, base: Costs, stages: Costs, *, bottleneck: bool) -> Costs:
        return np.maximum(base, stages) if bottleneck else base + stages

    @cached_property
    def _tail(self) -> Costs:
        """The cost of all layers from each boundary on, with the head."""
        return self.sums[-1] + self.head - self.sums

    @cached_property
    def _stages(self) -> Costs:
        """The cost of a range by its start and end, infinite where it does not fit."""
        starts = np.arange(self.layers + 1)[:, None]
        fits = (starts >= np.array(self.lows)) & (starts <= np.array(self.highs))
        return np.where(fits, self.sums[None, :] - self.sums[:, None], np.inf)

    @cached_property
    def _widest(self) -> int:
        return max(1, *(high - low + 1 for low, high in zip(self.lows, self.highs, strict=True)))

    @cached_property
    def _windows(self) -> tuple[np.ndarray[tuple[int], np.dtype[np.intp]], np.ndarray[tuple[int], np.dtype[np.intp]]]:
        """For each boundary two columns of the table of minima of `inner`, which together cover its starts."""
        offsets, columns = [0], self.layers + 1
        while (width := 1 << (len(offsets) - 1)) <= self._widest // 2:
            offsets.append(offsets[-1] + columns)
            columns -= width
        nothing = offsets[-1] + columns
        left, right = [], []
        for low, high in zip(self.lows, self.highs, strict=True):
            power = (high - low + 1).bit_length() - 1
            left.append(offsets[power] + low if low <= high else nothing)
            right.append(offsets[power] + high + 1 - (1 << power) if low <= high else nothing)
        return np.array(left), np.array(right)


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


def _inner_starts(candidate: Candidate) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each boundary the lowest and the highest start of a range between two others that ends there."""
    farthest, fixed = candidate.farthest, candidate.layers_fixed
    lows, highs = [1] * (candidate.layers + 1), [0] * (candidate.layers + 1)
    for end in range(2, candidate.layers):
        low = max(1, bisect_left(farthest, end))
        if fixed is None:
            lows[end], highs[end] = low, end - 1
        elif low <= end - fixed < end:
            lows[end] = highs[end] = end - fixed
    return tuple(lows), tuple(highs)
