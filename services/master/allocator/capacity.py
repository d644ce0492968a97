"""How many layers nodes hold together, counted and not tried: the answer where layers are alike, a bound elsewhere.

Where every layer takes the same, a set holds the model when the layers that its first, its last and its inner nodes
hold add up. Counting each layer as the largest, a yes is a yes for any layers; counting each as the smallest, a no
is a no.

Rules this module lives by:
- More memory or another node never turns a yes into a no: it is a sum, and every pair of ends is looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.master.allocator.problem import Members, Problem
from services.master.allocator.ranges import Candidate

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Capacity:
    """The layers that a problem's candidates hold, each layer counted as one size."""

    problem: Problem
    smallest: bool = False
    """Count every layer as the smallest, for what cannot be; else as the largest, for what surely can."""

    @property
    def counts(self) -> bool:
        """A sum of counts says something: no node is asked for by name, and every node reaches every other."""
        return not self.problem.required and self.problem.hops.open

    @property
    def exact(self) -> bool:
        """A no is a no as well."""
        return self.counts and all(candidate.demand.alike for candidate in self.problem.candidates)

    def holds(self) -> bool:
        """Some set of more than one node holds the model."""
        return self._size(most=False) is not None

    def arranged(self, *, most: bool) -> Members | None:
        """The fewest nodes, or the most, that hold it: the first rank first, the last last, the roomiest between."""
        size = self._size(most=most)
        if size is None:
            return None
        first, last = np.unravel_index(int(self._together(size).argmax()), (len(self._first), len(self._first)))
        inner = [int(i) for i in self._order if i not in {first, last}][: size - 2]
        return (int(first), *inner, int(last))

    def _size(self, *, most: bool) -> int | None:
        """How many nodes, or None.

        A node more holds a layer more, so whoever can do it with fewer can do it with more, as long as there is a
        node that holds an inner layer and is not an end already: but for the two largest sizes.
        """
        low, high = max(2, self.problem.size_min), min(self.problem.size_max, len(self._useful) + 2)
        largest = next((size for size in range(high, max(low, high - 2) - 1, -1) if self._reaches(size)), None)
        if most or largest is None:
            return largest
        return low + bisect_left(range(low, largest), True, key=self._reaches)  # noqa: FBT003 - the first yes

    def _reaches(self, size: int) -> bool:
        return bool(self._together(size).max() >= self.problem.layers)

    def _together(self, size: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """The layers held by each pair of a first and a last node with the roomiest others, -1 where that cannot be."""
        inner = size - 2
        ordered = self._inner[self._order]
        sums = np.concatenate([[0], np.cumsum(ordered), np.full(2, ordered.sum())])
        place = np.empty(len(ordered), dtype=np.int64)
        place[self._order] = np.arange(len(ordered))
        one, two = np.minimum(place[:, None], place), np.maximum(place[:, None], place)
        low, high = self._inner[self._order][one], self._inner[self._order][two]
        others = np.where(
            one >= inner,
            sums[inner],
            np.where(two >= inner + 1, sums[inner + 1] - low, sums[inner + 2] - low - high),
        )
        useful = len(self._useful) - (self._inner > 0)[:, None] - (self._inner > 0)[None, :]
        possible = (self._first > 0)[:, None] & (self._last > 0)[None, :] & (useful >= inner)
        np.fill_diagonal(possible, val=False)
        return np.where(possible, self._first[:, None] + self._last[None, :] + others, -1)

    @cached_property
    def _order(self) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """The candidates by the layers they hold between two others, the most first."""
        return np.lexsort((np.arange(len(self._inner)), -self._inner))

    @cached_property
    def _useful(self) -> Counts:
        return np.flatnonzero(self._inner)

    @cached_property
    def _first(self) -> Counts:
        return self._counts([candidate.demand.first_bytes for candidate in self.problem.candidates], ends=True)

    @cached_property
    def _last(self) -> Counts:
        return self._counts([candidate.demand.last_bytes for candidate in self.problem.candidates], ends=True)

    @cached_property
    def _inner(self) -> Counts:
        return self._counts([candidate.demand.working_bytes for candidate in self.problem.candidates], ends=False)

    def _counts(self, beside: Sequence[int], *, ends: bool) -> Counts:
        most = self.problem.layers - 1 if ends else self.problem.layers
        pairs = zip(self.problem.candidates, beside, strict=True)
        return np.array([min(most, max(0, self._count(candidate, taken))) for candidate, taken in pairs], dtype=np.int64)

    def _count(self, candidate: Candidate, beside_bytes: int) -> int:
        demand = candidate.demand
        layer = demand.smallest_layer_bytes if self.smallest else demand.largest_layer_bytes
        return (candidate.room_bytes - beside_bytes) // layer
