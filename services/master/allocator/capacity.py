"""How many layers nodes hold together, counted and not tried: the answer where layers are alike, a bound elsewhere.

Where every layer takes the same, a set holds the model when the layers that its first, its last and its inner nodes
hold add up. Counting each layer as the largest, a yes is a yes for any layers; counting each as the smallest, a no
is a no.

Rules this module lives by:
- More memory or another node never turns a yes into a no: it is a sum, and every pair of ends is looked at.
- It says nothing of nodes that are asked for by name, nor of ways that are missing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from services.master.allocator.demand import NEEDED_BYTES_MAX, Demand
from services.master.allocator.problem import Members

ROOM_BYTES_MAX: Final = 2**60
"""More than any node has; larger claims count as this, so that sums of some columns never overflow."""

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]
Pairs = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Capacity:
    """The layers that nodes hold, each layer counted as one size."""

    rooms: Counts
    demands: Sequence[Demand]
    forms: Counts
    """Which of the demands is each node's."""
    size_min: int
    size_max: int
    smallest: bool = False
    """Count every layer as the smallest, for what cannot be; else as the largest, for what surely can."""

    @property
    def exact(self) -> bool:
        """A no is a no as well."""
        return all(demand.alike for demand in self.demands)

    def holds(self) -> bool:
        """Some set of nodes holds the model."""
        return self.alone() is not None or self._size(most=False) is not None

    def alone(self) -> int | None:
        """The first node that holds the whole model, if one may."""
        if self.size_min > 1:
            return None
        needed = self._by_form([demand.alone_bytes for demand in self.demands])
        able = np.flatnonzero(self.rooms >= needed)
        return int(able[0]) if able.size else None

    def arranged(self, *, most: bool) -> Members | None:
        """The fewest nodes, or the most, that hold it: the first rank first, the last last, the roomiest between."""
        alone = self.alone()
        size = None if alone is not None and not most else self._size(most=most)
        if size is None:
            return None if alone is None else (alone,)
        together = self._together(size)
        first, last = (int(each) for each in np.unravel_index(int(together.argmax()), together.shape))
        inner = [i for i in self._order.tolist() if i not in {first, last}][: size - 2]
        return (first, *inner, last)

    def _size(self, *, most: bool) -> int | None:
        """How many nodes, two or more; None where no number does.

        A node more holds a layer more, so whoever can do it with fewer can do it with more, as long as there is a
        node that holds an inner layer and is not an end already: but for the two largest sizes.
        """
        low, high = max(2, self.size_min), min(self.size_max, self._useful + 2)
        largest = next((size for size in range(high, max(low, high - 2) - 1, -1) if self._reaches(size)), None)
        if most or largest is None:
            return largest
        return low + bisect_left(range(low, largest), True, key=self._reaches)  # noqa: FBT003 - the first yes

    def _reaches(self, size: int) -> bool:
        return bool(self._together(size).max() >= self.demands[0].layers)

    def _together(self, size: int) -> Pairs:
        """The layers held by each pair of a first and a last node with the roomiest others, -1 where that cannot be."""
        inner, held, sums = size - 2, self._inner, self._sums
        nearer = np.minimum(self._places[:, None], self._places)
        farther = np.maximum(self._places[:, None], self._places)
        ends_held = np.where(nearer == self._places[:, None], held[:, None], held[None, :])
        both_held = held[:, None] + held[None, :]
        with_one, with_two = sums[inner + 1] - ends_held, sums[inner + 2] - both_held
        others = np.where(nearer >= inner, sums[inner], np.where(farther > inner, with_one, with_two))
        left = self._useful - (held > 0)[:, None] - (held > 0)[None, :]
        possible = (self._first > 0)[:, None] & (self._last > 0)[None, :] & (left >= inner)
        np.fill_diagonal(possible, val=False)
        return np.where(possible, self._first[:, None] + self._last[None, :] + others, -1)

    @cached_property
    def _order(self) -> Counts:
        """The nodes by the layers they hold between two others, the most first."""
        return np.lexsort((np.arange(len(self._inner)), -self._inner))

    @cached_property
    def _places(self) -> Counts:
        """Each node's place in that order."""
        places = np.empty(len(self._order), dtype=np.int64)
        places[self._order] = np.arange(len(self._order))
        return places

    @cached_property
    def _sums(self) -> Counts:
        """The inner layers held by so many of the roomiest."""
        sums = np.concatenate([[0], np.cumsum(self._inner[self._order])])
        return np.concatenate([sums, sums[-1:], sums[-1:]])

    @cached_property
    def _useful(self) -> int:
        """How many nodes hold an inner layer."""
        return int((self._inner > 0).sum())

    @cached_property
    def _first(self) -> Counts:
        return np.minimum(self._counts([demand.first_bytes for demand in self.demands]), self.demands[0].layers - 1)

    @cached_property
    def _last(self) -> Counts:
        return np.minimum(self._counts([demand.last_bytes for demand in self.demands]), self.demands[0].layers - 1)

    @cached_property
    def _inner(self) -> Counts:
        return self._counts([demand.working_bytes for demand in self.demands])

    def _counts(self, beside: Sequence[int]) -> Counts:
        sizes = [each.smallest_layer_bytes if self.smallest else each.largest_layer_bytes for each in self.demands]
        held = np.maximum(0, self.rooms - self._by_form(beside)) // self._by_form(sizes)
        return np.asarray(np.minimum(held, self.demands[0].layers))

    def _by_form(self, figures: Sequence[int]) -> Counts:
        by_form: Counts = np.array([min(each, NEEDED_BYTES_MAX) for each in figures], dtype=np.int64)
        return by_form.take(self.forms)
