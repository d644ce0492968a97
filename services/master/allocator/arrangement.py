"""Which sets of nodes can hold a model, and in which order.

Up to EXACT_NODES_MAX nodes the answer is exact: the boundaries a set can reach are the union, over each of its
nodes, of what that node adds to the boundaries the others reach. Above, nodes stand in chains.

Rules this module lives by:
- More memory or another node never turns a yes into a no. Among nodes of one form only the place in the order of
  their room decides who is tried, and with more memory or another node every place holds at least as much room.
- Nothing depends on the order in which nodes are given but through `preference`, which is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from typing import Final

from services.master.allocator.demand import Form, least_bytes
from services.master.allocator.ranges import Candidate, boundaries

EXACT_NODES_MAX: Final = 8
"""Sets up to this size are decided exactly: 256 subsets of 8 nodes take some milliseconds."""

ENDPOINT_PLACES: Final = 3
"""How many of the roomiest nodes of each form are tried as the ends of a chain."""

Members = tuple[int, ...]
"""Indices of candidates."""


@dataclass(frozen=True)
class Problem:
    """Who may get layers, and how many of them shall."""

    candidates: tuple[Candidate, ...]
    """In the order in which they are preferred."""
    nodes_min: int = 1
    nodes_max: int | None = None

    @property
    def layers(self) -> int:
        """How many layers are to be placed; 0 without candidates."""
        return self.candidates[0].layers if self.candidates else 0

    @property
    def size_min(self) -> int:
        """The fewest nodes that respect the request."""
        return max(1, self.nodes_min, len(self.required))

    @property
    def size_max(self) -> int:
        """The most nodes that respect the request and get a layer each."""
        most = min(len(self.candidates), self.layers)
        return most if self.nodes_max is None else min(most, self.nodes_max)

    @cached_property
    def required(self) -> Members:
        """The candidates that must get layers."""
        return tuple(i for i, candidate in enumerate(self.candidates) if _must(candidate))

    @cached_property
    def least_bytes(self) -> int:
        """No set of nodes takes less."""
        return least_bytes(candidate.demand for candidate in self.candidates)


@dataclass
class Arrangements:
    """The sets of a problem's candidates that can hold the model."""

    problem: Problem
    _ends: dict[int, int] = field(default_factory=dict)
    """The boundaries that a set of nodes, as bits, can reach from the start with a layer for each of them."""

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Who may get layers."""
        return self.problem.candidates

    def sets(self, size: int) -> Iterator[Members]:
        """The sets of `size` nodes, at most EXACT_NODES_MAX, that can hold the model, the weightiest first.

        Not all of them where there are more candidates than can be tried, but one wherever there is one.
        """
        if not self.problem.size_min <= size <= min(self.problem.size_max, EXACT_NODES_MAX):
            return
        if self._roomiest_bytes(size) < self.problem.least_bytes:
            return
        found = False
        for members in self._preferred_sets(size):
            if self.holds(members):
                found = True
                yield members
        if not found and len(self.candidates) > EXACT_NODES_MAX:
            yield from (members for members in self._roomiest_sets(size) if self.holds(members))

    def holds(self, members: Members) -> bool:
        """Together, with at least one layer each, they can hold the model."""
        if len(members) == 1:
            return self.candidates[members[0]].alone
        if sum(self.candidates[i].room_bytes for i in members) < self.problem.least_bytes:
            return False
        mask = _mask(members)
        return any(self._reached(mask ^ 1 << i) & self.candidates[i].last_starts for i in members)

    def order(self, members: Members) -> Members:
        """An order in which they can hold the model, for members that can: as preferred if possible."""
        if len(members) == 1 or self._passes(members):
            return members
        mask = _mask(members)
        for last in reversed(members):
            ends = self._reached(mask ^ 1 << last) & self.candidates[last].last_starts
            if ends:
                return (*self._order_to(mask ^ 1 << last, ends), last)
        raise ValueError("these nodes cannot hold the model")

    def chain(self, *, most: bool) -> Members | None:
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

    def _preferred_sets(self, size: int) -> list[Members]:
        required = self.problem.required
        if len(required) > size:
            return []
        optional = [i for i in range(len(self.candidates)) if i not in required]
        shortlist = optional[: max(0, EXACT_NODES_MAX - len(required))]
        sets = [tuple(sorted(required + chosen)) for chosen in combinations(shortlist, size - len(required))]
        return sorted(sets, key=lambda members: (-sum(self.candidates[i].weight for i in members), members))

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
            if not _must(candidate):
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
            kept = [0] * len(row) if _must(candidate) else row
            row = [kept[0]] + [
                kept[n] | (candidate.ends_from(row[n - 1]) if row[n - 1] else 0) for n in range(1, len(row))
            ]
            rows.append(row)
        return rows

    def _chain_to(self, first: int, middle: Sequence[int], rows: list[list[int]], size: int, ends: int) -> Members:
        chosen: list[int] = []
        for place in range(len(middle), 0, -1):
            i, before = middle[place - 1], rows[place - 1]
            skipped = 0 if _must(self.candidates[i]) else before[size] & ends
            if skipped:
                ends = skipped
                continue
            chosen.append(i)
            ends = self.candidates[i].starts_to(ends, before[size - 1])
            size -= 1
        return (first, *reversed(chosen))


def _must(candidate: Candidate) -> bool:
    return candidate.required or candidate.layers_fixed is not None


def _mask(members: Members) -> int:
    return sum(1 << i for i in members)
