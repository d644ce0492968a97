"""An order of nodes that holds the model where ways are missing, or where there are many and layers differ.

Every order is tried, first those that get farthest; what cannot lead to the end any more is left at once. That is
complete, and can take for ever: after so many steps it is given up, and the answer says that nothing was proved.

Rules this module lives by:
- A yes comes with its order. A no is a proof unless it says that it was given up.
- A ring leads back to where it began, so it lies within nodes that all reach each other, over others if need be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from services.master.allocator.problem import Members, Problem
from services.master.allocator.ranges import Candidate, boundaries

NODES_MAX: Final = 512
"""Among more nodes nothing is tried: to tell them apart alone takes too long."""

STEP_NODES: Final = 16
"""With so many nodes more a step takes as long as one more among few."""

RANKS_MAX: Final = 256
"""Longer orders are not tried: one call within the other for each rank, and the stack has an end."""


class Arrangement(NamedTuple):
    """Whether nodes can hold a model, and how."""

    order: Members | None
    proved: bool = True
    """Where there is no order: that there is none, and not only that none was found."""


class _GivenUpError(Exception):
    """More steps than a decision may take."""


@dataclass
class Routes:
    """The rings over a problem's candidates that hold the model."""

    problem: Problem
    _steps: int = 0
    _failed: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By first node, nodes used and last node: the boundaries from which there is no way on to the end."""

    def arranged(self) -> Arrangement:
        """An order that holds the model, if there is one."""
        if len(self.candidates) > NODES_MAX:
            return Arrangement(self._alone(), proved=False)
        try:
            return Arrangement(self._alone() or next(filter(None, map(self._ring, self._starts())), None))
        except _GivenUpError:
            return Arrangement(None, proved=False)

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Who may get layers."""
        return self.problem.candidates

    def _alone(self) -> Members | None:
        if self.problem.size_min > 1:
            return None
        able = (i for i, each in enumerate(self.candidates) if each.alone and self._required in {0, 1 << i})
        return next(((i,) for i in able), None)

    def _starts(self) -> Iterator[int]:
        """The nodes that can be first, the roomiest first."""
        if self.problem.size_max < 2:
            return
        able = [i for i, each in enumerate(self.candidates) if each.first_low <= each.first_high]
        yield from sorted(self._unlike(able), key=lambda i: (-self.candidates[i].first_high, i))

    def _ring(self, first: int) -> Members | None:
        """An order that begins with `first`."""
        used, ends = 1 << first, self.candidates[first].first_ends
        return self._onward((first,), used, ends) if self._may_end(first, first, used, ends) else None

    def _onward(self, order: Members, used: int, ends: int) -> Members | None:
        """An order that goes on from `order`, of which the last ends at any of `ends`."""
        if len(order) >= RANKS_MAX:
            raise _GivenUpError
        ahead = self._reach[order[-1]] & ~used
        if len(order) + 1 >= self.problem.size_min:
            for last in boundaries(ahead & self._reached_from[order[0]]):
                if self.candidates[last].last_starts & ends and not self._required & ~(used | 1 << last):
                    return (*order, last)
        if len(order) + 2 > self.problem.size_max:
            return None
        for farther, i in self._farther(order[0], used, ahead, ends):
            found = self._onward((*order, i), used | 1 << i, farther)
            if found is not None:
                return found
        return None

    def _farther(self, first: int, used: int, ahead: int, ends: int) -> Iterator[tuple[int, int]]:
        """The boundaries that each next node can end at, with the node; those that get farthest first."""
        reached = ((self.candidates[i].ends_from(ends), i) for i in self._unlike(boundaries(ahead)))
        for farther, i in sorted(reached, key=lambda each: (-each[0].bit_length(), each[1])):
            self._steps += self._step
            if self._steps > self.problem.steps_max:
                raise _GivenUpError
            place = (0, used | 1 << i, 0) if self._open else (first, used | 1 << i, i)
            failed = self._failed.get(place, 0)
            fresh = farther & ~failed
            if self._monotone and failed.bit_length() >= farther.bit_length():
                continue  # It has failed from as far on or farther, and nearer is no better.
            if fresh and self._may_end(first, i, used | 1 << i, fresh):
                self._failed[place] = failed | fresh
                yield fresh, i

    def _may_end(self, first: int, last: int, used: int, ends: int) -> bool:
        """What is left might be held by nodes on a way from `last` back to `first`: a bound, not a proof."""
        rest = ~used & self._everyone
        if not self._open:
            rest &= self._spread(last, self._reach, rest) & self._spread(first, self._reached_from, rest)
        must = self._required & ~used
        places = self.problem.size_max - used.bit_count() - must.bit_count()
        if must & ~rest or places < 0:
            return False
        farthest = ends.bit_length() - 1
        layers = self._most_of(self._most_layers, self._by_layers, must, rest, places)
        if farthest + layers < self.problem.layers:
            return False
        return self._most_of(self._rooms, self._by_room, must, rest, places) >= self._least_after[farthest]

    @staticmethod
    def _most_of(figures: Sequence[int], descending: Sequence[int], must: int, rest: int, places: int) -> int:
        """What those that must take part can take together with the ablest of the rest, in so many places more."""
        most = 0
        for i in descending:
            if must >> i & 1:
                most += figures[i]
            elif places and rest >> i & 1:
                places -= 1
                most += figures[i]
        return most

    def _spread(self, start: int, ways: Sequence[int], among: int) -> int:
        """Whom `start` gets to over `ways`, through nodes of `among` only."""
        reached = todo = ways[start] & among
        while todo:
            i = todo.bit_length() - 1
            found = ways[i] & among & ~reached
            reached |= found
            todo = (todo ^ 1 << i) | found
        return reached

    def _unlike(self, nodes: Iterator[int] | Sequence[int]) -> Iterator[int]:
        """Of nodes that could stand for each other only the first."""
        seen: set[int] = set()
        for i in nodes:
            if self._kinds[i] not in seen:
                seen.add(self._kinds[i])
                yield i

    @cached_property
    def _kinds(self) -> list[int]:
        """For each node the first one that it could change places with: as roomy, and with the same ways."""
        kinds: list[int] = []
        for i, each in enumerate(self.candidates):
            alike = (kind for kind in dict.fromkeys(kinds) if self._alike(i, kind))
            kinds.append(i if each.must else next(alike, i))
        return kinds

    def _alike(self, one: int, other: int) -> bool:
        left, right = self.candidates[one], self.candidates[other]
        if right.must or left.room_bytes != right.room_bytes or left.demand.form != right.demand.form:
            return False
        both = 1 << one | 1 << other
        return all(
            ways[one] & ~both == ways[other] & ~both and ways[one] >> other & 1 == ways[other] >> one & 1
            for ways in (self._reach, self._reached_from)
        )

    @cached_property
    def _step(self) -> int:
        """What a step counts: with more nodes it takes longer."""
        return 1 + len(self.candidates) // STEP_NODES

    @cached_property
    def _open(self) -> bool:
        return self.problem.hops.open

    @cached_property
    def _monotone(self) -> bool:
        """Farther is never worse: every way is there, and whoever has no layers left can be left out."""
        return self._open and self.problem.size_min <= 2 and not self._required

    @cached_property
    def _required(self) -> int:
        return sum(1 << i for i in self.problem.required)

    @cached_property
    def _everyone(self) -> int:
        return (1 << len(self.candidates)) - 1

    @cached_property
    def _reach(self) -> list[int]:
        """For each node whom it reaches."""
        return [_bits(row) for row in np.isfinite(self.problem.hops.onward)]

    @cached_property
    def _reached_from(self) -> list[int]:
        """For each node who reaches it."""
        return [_bits(column) for column in np.isfinite(self.problem.hops.back).T]

    @cached_property
    def _most_layers(self) -> list[int]:
        return [each.most_layers for each in self.candidates]

    @cached_property
    def _by_layers(self) -> list[int]:
        return sorted(range(len(self.candidates)), key=lambda i: -self._most_layers[i])

    @cached_property
    def _rooms(self) -> list[int]:
        return [max(0, each.room_bytes - each.demand.working_bytes) for each in self.candidates]

    @cached_property
    def _by_room(self) -> list[int]:
        return sorted(range(len(self.candidates)), key=lambda i: -self._rooms[i])

    @cached_property
    def _least_after(self) -> list[int]:
        """What the layers from each boundary on take at least, with the end of the model."""
        # Layer by layer what it takes in whichever form takes least of it.
        demands = {each.demand.form: each.demand for each in self.candidates}.values()
        least = [min(each.last_bytes - each.working_bytes for each in demands)]
        for layer in reversed(range(self.problem.layers)):
            sums = (each.layer_sums for each in demands)
            least.append(least[-1] + min(each[layer + 1] - each[layer] for each in sums))
        return least[::-1]


def _bits(row: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    return sum(1 << i for i in np.flatnonzero(row).tolist())
