"""Which of many nodes can hold a model whose layers differ: the roomiest of each form, in sets and in chains.

The boundaries a set can reach are the union, over each of its nodes, of what that node adds to the boundaries the
others reach; that is exact for sets of up to EXACT_NODES_MAX nodes. Larger ones stand in chains.

Rules this module lives by:
- More memory or another node never turns a yes into a no. Among nodes of one form only the place in the order of
  their room decides who is tried, and with more memory or another node every place holds at least as much room.
- Nothing depends on the order in which nodes are given but through `preference`, which is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Final

from services.master.allocator.demand import Form
from services.master.allocator.exact import EXACT_NODES_MAX
from services.master.allocator.problem import Members, Problem
from services.master.allocator.ranges import Candidate, boundaries

ENDPOINT_PLACES: Final = 3
"""How many of the roomiest nodes of each form are tried as the ends of a chain."""


@dataclass
class Chains:
    """The sets of a problem's candidates that can hold the model, whatever way leads from one to the next."""

    problem: Problem
    _ends: dict[int, int] = field(default_factory=dict)
    """The boundaries that a set of nodes, as bits, can reach from the start with a layer for each of them."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Who may get layers."""
        return self.problem.candidates

    def arranged(self, *, most: bool) -> Members | None:
        """An order of the fewest nodes, or of the `most` found, that holds the model; None when there is none."""
        if most:
            return self._chain(most=True) or self._set(most=True)
        return self._set(most=False) or self._chain(most=False)

    def _set(self, *, most: bool) -> Members | None:
        sizes = range(self.problem.size_min, min(self.problem.size_max, EXACT_NODES_MAX) + 1)
        for size in reversed(sizes) if most else sizes:
            if self._roomiest_bytes(size) < self.problem.least_bytes:
                continue
            found = next(filter(self._holds, self._roomiest_sets(size)), None)
            if found is not None:
                return self._order(found)
        return None

    def _holds(self, members: Members) -> bool:
        """Together, with at least one layer each, they can hold the model."""
        if len(members) == 1:
            return self.candidates[members[0]].alone
        if sum(self.candidates[i].room_bytes for i in members) < self.problem.least_bytes:
            return False
        mask = _mask(members)
        return any(self._reached(mask ^ 1 << i) & self.candidates[i].last_starts for i in members)

    def _order(self, members: Members) -> Members:
        """An order in which they can hold the model, for members that can: as preferred if possible."""
        if len(members) == 1 or self._passes(members):
            return members
        mask = _mask(members)
        for last in reversed(members):
            ends = self._reached(mask ^ 1 << last) & self.candidates[last].last_starts
            if ends:
                return (*self._order_to(mask ^ 1 << last, ends), last)
        raise ValueError("these nodes cannot hold the model")

    def _chain(self, *, most: bool) -> Members | None:
        """An order of more than EXACT_NODES_MAX nodes, the fewest or the `most` found, that can hold the model."""
        size_max = self.problem.size_max
        if size_max <= EXACT_NODES_MAX or not self._enough_layers():
            return None
        best: Members | None = None
        for first, last in product(self._chain_ends, repeat=2):
            if first == last:
                continue
            found = self._chain_between(first, last, most=most)
            if found and (best is None or (len(found) > len(best) if most else len(found) < len(best))):
                best = found
        return best

    def _roomiest_sets(self, size: int) -> Iterator[Members]:
        """For each way to take `size` nodes from the forms, the roomiest of each.

        Any set that can hold the model is matched by one of these, place by place, with at least its room.
        """
        free = size - len(self.problem.required)
        for counts in product(*(range(min(len(block), free) + 1) for block in self._blocks)):
            if sum(counts) == free:
                taken = [i for block, count in zip(self._blocks, counts, strict=True) for i in block[:count]]
                yield tuple(sorted((*self.problem.required, *taken)))

    @cached_property
    def _blocks(self) -> list[Members]:
        """The candidates that need not get layers, by form, the roomiest first; only those that can matter."""
        blocks: dict[Form, list[int]] = {}
        for i, candidate in enumerate(self.candidates):
            if not candidate.must:
                blocks.setdefault(candidate.demand.form, []).append(i)
        roomiest = {form: sorted(block, key=self._by_room)[: self.problem.layers] for form, block in blocks.items()}
        return [tuple(roomiest[form]) for form in sorted(roomiest)]

    def _roomiest_bytes(self, size: int) -> int:
        return sum(self._rooms[:size])

    @cached_property
    def _rooms(self) -> list[int]:
        return sorted((candidate.room_bytes for candidate in self.candidates), reverse=True)

    def _by_room(self, i: int) -> tuple[int, str]:
        return -self.candidates[i].room_bytes, self.candidates[i].node_id

    @cached_property
    def _chain_ends(self) -> Members:
        roomiest = [i for block in self._blocks for i in block[:ENDPOINT_PLACES]]
        return (*roomiest, *self.problem.required)

    def _enough_layers(self) -> bool:
        """A bound that costs little: were every layer as small as the smallest, there would be room."""
        if self._roomiest_bytes(self.problem.size_max) < self.problem.least_bytes:
            return False
        placeable = 0
        for candidate in self.candidates:
            room = candidate.room_bytes - candidate.demand.working_bytes
            placeable += max(0, room) // candidate.demand.smallest_layer_bytes
        return placeable >= self.problem.layers

    def _reached(self, mask: int) -> int:
        """The boundaries before the end that exactly these nodes can reach from the start."""
        ends = self._ends.get(mask)
        if ends is None:
            ends = 0
            for i in boundaries(mask):
                rest = mask ^ 1 << i
                candidate = self.candidates[i]
                ends |= candidate.ends_from(self._reached(rest)) if rest else candidate.first_ends
            self._ends[mask] = ends
        return ends

    def _passes(self, order: Members) -> bool:
        ends = self.candidates[order[0]].first_ends
        for i in order[1:-1]:
            ends = self.candidates[i].ends_from(ends)
        return bool(ends & self.candidates[order[-1]].last_starts)

    def _order_to(self, mask: int, ends: int) -> Members:
        """An order in which exactly these nodes end at one of `ends`, which they can."""
        for i in reversed(tuple(boundaries(mask))):
            rest = mask ^ 1 << i
            if not rest:
                return (i,)
            starts = self.candidates[i].starts_to(ends, self._reached(rest))
            if starts:
                return (*self._order_to(rest, starts), i)
        raise ValueError("these nodes cannot end there")

    def _chain_between(self, first: int, last: int, *, most: bool) -> Members | None:
        """The chain from `first` to `last` through the other nodes, in the order of their blocks."""
        middle = [i for block in self._blocks for i in block] + list(self.problem.required)
        middle = [i for i in middle if i not in {first, last}]
        rows = self._rows(first, middle)
        sizes = range(self.problem.size_min - 1, self.problem.size_max)
        for size in reversed(sizes) if most else sizes:
            ends = rows[-1][size] & self.candidates[last].last_starts
            if ends:
                return (*self._chain_to(first, middle, rows, size, ends), last)
        return None

    def _rows(self, first: int, middle: Sequence[int]) -> list[list[int]]:
        """After each node of `middle`, the boundaries reached by chains of each size."""
        row = [0] * (self.problem.size_max + 1)
        row[1] = self.candidates[first].first_ends
        rows = [row]
        for i in middle:
            candidate = self.candidates[i]
            kept = [0] * len(row) if candidate.must else row
            row = [kept[0]] + [
                kept[n] | (candidate.ends_from(row[n - 1]) if row[n - 1] else 0) for n in range(1, len(row))
            ]
            rows.append(row)
        return rows

    def _chain_to(self, first: int, middle: Sequence[int], rows: list[list[int]], size: int, ends: int) -> Members:
        chosen: list[int] = []
        for place in range(len(middle), 0, -1):
            i, before = middle[place - 1], rows[place - 1]
            skipped = 0 if self.candidates[i].must else before[size] & ends
            if skipped:
                ends = skipped
                continue
            chosen.append(i)
            ends = self.candidates[i].starts_to(ends, before[size - 1])
            size -= 1
        return (first, *reversed(chosen))


def _mask(members: Members) -> int:
    return sum(1 << i for i in members)
