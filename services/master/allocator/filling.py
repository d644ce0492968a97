"""Which nodes to take when there are many: the fastest are filled first, exactly but for unequal layers and ways.

Where layers take the same and ways cost the same, a best set fills every node but its slowest. So the nodes are
gone through from the fastest on, each skipped or filled as a first, a last or an inner rank, until what is left
fits the next: a knapsack over (roles given, nodes taken, layers held). What it takes as equal is made exact later.

Rules this module lives by:
- It proposes and never decides: a proposal is tried with its true bytes and ways before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from services.master.allocator.problem import Members, Problem

FILLED_NODES_MAX: Final = 24
"""The largest set that is proposed where nodes are counted; whoever asks for more gets the roomiest."""

_FIRST, _LAST, _INNER = 0, 1, 2

_TURNS: Final = (
    (slice(0, None, 2), slice(1, None, 2)),
    (slice(0, 2), slice(2, 4)),
    (slice(0, 4), slice(0, 4)),
)
"""From which roles given to which a node leads, by the role it takes: for the first from 0 to 1 and from 2 to 3."""

_ADDED: Final = (1, 2, 0)
"""What each role adds to the roles given."""

_ENDED: Final = ((_INNER, 3), (_FIRST, 2), (_LAST, 1))
"""The roles in which a node can be given all that is left, with the roles given before."""

Rooms = tuple[int, int, int]
"""As the first, the last and an inner rank."""

Costs = np.ndarray[tuple[int, int, int, int], np.dtype[np.float64]]
"""By point of view, roles given (1 the first, 2 the last), nodes taken and layers held."""

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Views = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""What the way to each candidate costs, from each point of view."""


class Ended(NamedTuple):
    """A set whose slowest node was given all that was left."""

    seconds: float
    slowest: int
    role: int
    """Of the slowest."""
    place: tuple[int, int, int]
    """The roles given, nodes taken and layers held before."""


@dataclass(frozen=True, eq=False)
class Filling:
    """The knapsack over some of a problem's candidates, from several points of view at once."""

    layers: int
    size_min: int
    size_max: int | None
    """None where any number of nodes will do: then they need not be counted."""
    seconds: Floats
    """Each candidate's for one layer, ascending."""
    attached: Views
    heads: Floats
    rooms_of: Callable[[int], Rooms]
    """By candidate, the layers it holds in each role."""
    limit: float
    """A set that costs as much is of no interest."""
    rooms: list[Rooms] = field(default_factory=list)
    """Of the candidates gone through."""

    def best(self) -> list[tuple[int, ...] | None]:
        """From each point of view the candidates of the best set; None where there is none.

        The first rank comes first and the last rank last.
        """
        views = len(self.attached)
        costs = np.full((views, 4, 1 if self.size_max is None else self.size_max + 1, self.layers + 1), np.inf)
        costs[:, 0, 0, 0] = 0.0
        steps: list[Costs] = []
        found: list[Ended | None] = [None] * views
        going = list(range(views))
        for i, seconds in enumerate(self.seconds.tolist()):
            ahead = costs + self._left * seconds
            # Slower nodes than this only cost more.
            least = (ahead.min(axis=(2, 3)) + self._least_beside[i]).min(axis=1).tolist()
            going = [view for view in going if least[view] < self._worst(found[view])]
            if not going:
                break
            self.rooms.append(self.rooms_of(i))
            self._end(found, going, ahead, i)
            steps.append(costs)
            costs = self._taken(costs, i)
        return [None if each is None else self._members(steps, view, each) for view, each in enumerate(found)]

    def _worst(self, found: Ended | None) -> float:
        """Whatever costs as much is of no interest."""
        return self.limit if found is None else found.seconds

    def _taken(self, costs: Costs, i: int) -> Costs:
        """The costs once candidate `i` was skipped or filled."""
        taken = costs.copy()
        for role, (before, after) in enumerate(_TURNS):
            held = self.rooms[i][role]
            if 0 < held < self.layers:
                added = held * self.seconds[i] + self._beside[role][:, i, None, None, None]
                better = costs[:, before, : costs.shape[2] - self._step, : self.layers + 1 - held] + added
                target = taken[:, after, self._step :, held:]
                np.minimum(target, better, out=target)
        return taken

    def _end(self, found: list[Ended | None], going: Sequence[int], ahead: Costs, i: int) -> None:
        """Put into `found`, where it costs less from these points of view, that candidate `i` takes all that is left.

        `ahead` is what that costs, but for the way to it.
        """
        fewest = self._step * max(1, self.size_min - 1)
        for role, before in _ENDED:
            low = max(1, self.layers - self.rooms[i][role])
            totals = ahead[:, before, fewest : self.size_max, low : self.layers]
            if not totals.size:
                continue
            flat = totals.reshape(len(ahead), -1)
            places = flat.argmin(axis=1)
            seconds = (flat[np.arange(len(flat)), places] + self._beside[role][:, i]).tolist()
            for view in going:
                if seconds[view] < self._worst(found[view]):
                    taken, held = divmod(int(places[view]), totals.shape[2])
                    found[view] = Ended(seconds[view], i, role, (before, fewest + taken, low + held))

    @property
    def _step(self) -> int:
        """By how much a node more counts."""
        return 0 if self.size_max is None else 1

    @cached_property
    def _left(self) -> Floats:
        """The layers that are left when so many are held."""
        return np.arange(self.layers, -1.0, -1.0)

    @cached_property
    def _beside(self) -> tuple[Views, Views, Views]:
        """What each candidate costs beside its layers in each role."""
        return self.attached, self.attached + self.heads, self.attached

    @cached_property
    def _least_beside(self) -> np.ndarray[tuple[int, int, int], np.dtype[np.float64]]:
        """By candidate, what it and those after it cost at least beside layers, by point of view and roles given."""
        way = np.minimum.accumulate(self.attached[:, ::-1], axis=1)[:, ::-1]
        head = np.minimum.accumulate(self.heads[::-1])[::-1]
        # Without the first and the last at least two are to come; without the last, one of them with the head.
        return np.stack([2 * way + head, way + head, way, way]).transpose(2, 1, 0)

    def _members(self, steps: list[Costs], view: int, ended: Ended) -> tuple[int, ...]:
        """The way back from where the slowest node was given what was left."""
        roles, place = {ended.role: [ended.slowest]}, ended.place
        for i in range(ended.slowest - 1, -1, -1):
            before, after = steps[i][view], steps[i + 1][view]
            if before[place] == after[place]:
                continue
            for taken, added in enumerate(_ADDED):
                held = self.rooms[i][taken]
                origin = (place[0] - added, place[1] - self._step, place[2] - held)
                if held < 1 or origin[2] < 0 or place[0] & added != added:
                    continue
                if before[origin] + (held * self.seconds[i] + self._beside[taken][view, i]) == after[place]:
                    roles.setdefault(taken, []).append(i)
                    place = origin
                    break
        return (*roles.get(_FIRST, []), *roles.get(_INNER, []), *roles.get(_LAST, []))


def fastest_sets(problem: Problem, attached: Views, limit: float) -> list[Members | None]:
    """The nodes of the best set of more than one by their roles, were each way to cost what a row of `attached` says.

    One set for each row; None where none takes less than `limit`.
    """
    candidates = problem.candidates
    if problem.size_max < 2:
        return [None] * len(attached)
    counted = problem.nodes_max is not None or problem.size_min > 2
    seconds = np.array([candidate.second_sums[-1] / problem.layers for candidate in candidates])
    order = np.lexsort((np.arange(len(candidates)), seconds))
    filling = Filling(
        layers=problem.layers,
        size_min=problem.size_min,
        size_max=min(problem.size_max, FILLED_NODES_MAX) if counted else None,
        seconds=seconds[order],
        attached=attached[:, order],
        heads=np.array([candidates[i].head_seconds for i in order]),
        rooms_of=lambda i: _rooms(problem, int(order[i])),
        limit=limit,
    )
    return [None if members is None else tuple(int(order[i]) for i in members) for members in filling.best()]


def _rooms(problem: Problem, i: int) -> Rooms:
    """How many layers a candidate holds as the first, the last and an inner rank."""
    candidate = problem.candidates[i]
    first = max(0, candidate.first_high)
    last = max(0, problem.layers - candidate.last_low)
    return first, last, min(candidate.most_layers, problem.layers - 1)
