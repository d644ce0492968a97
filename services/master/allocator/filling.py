"""Which nodes to take when there are many: the fastest are filled first, exactly but for unequal layers and ways.

Where layers take the same and ways cost the same, a best set fills every node but its slowest. So the nodes are
gone through from the fastest on, each skipped or filled as a first, a last or an inner rank, until what is left
fits the next: a knapsack over (roles given, nodes taken, layers held). What it takes as equal is made exact later.

Rules this module lives by:
- It proposes and never decides: a proposal is tried with its true bytes and ways before it is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

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

Costs = np.ndarray[tuple[int, int, int], np.dtype[np.float64]]
"""By roles given (1 the first, 2 the last), nodes taken and layers held."""


@dataclass(frozen=True, eq=False)
class Filling:
    """The knapsack over some of a problem's candidates."""

    layers: int
    size_min: int
    size_max: int | None
    """None where any number of nodes will do: then they need not be counted."""
    seconds: np.ndarray[tuple[int], np.dtype[np.float64]]
    """Each candidate's for one layer, ascending."""
    attached: np.ndarray[tuple[int], np.dtype[np.float64]]
    """Each candidate's for the way to it."""
    heads: np.ndarray[tuple[int], np.dtype[np.float64]]
    rooms_of: Callable[[int], Rooms]
    """By candidate, the layers it holds in each role."""
    limit: float
    """A set that costs as much is of no interest."""
    rooms: list[Rooms] = field(default_factory=list)
    """Of the candidates gone through."""

    def best(self) -> tuple[int, ...] | None:
        """The candidates of the best set, the first rank's first and the last rank's last; None where there is none."""
        costs = np.full((4, 1 if self.size_max is None else self.size_max + 1, self.layers + 1), np.inf)
        costs[0, 0, 0] = 0.0
        steps: list[Costs] = []
        found: tuple[float, int, int, tuple[int, int, int]] | None = None
        for i, seconds in enumerate(self.seconds.tolist()):
            ahead = costs + self._left * seconds
            if ahead.min() >= (self.limit if found is None else found[0]):
                break  # Slower nodes than this only cost more.
            self.rooms.append(self.rooms_of(i))
            ended = self._ended(ahead, i)
            if ended is not None and (found is None or ended[0] < found[0]):
                found = (ended[0], i, *ended[1:])
            steps.append(costs)
            costs = self._taken(costs, i)
        return self._members(steps, *found[1:]) if found else None

    def _taken(self, costs: Costs, i: int) -> Costs:
        """The costs once candidate `i` was skipped or filled."""
        taken = costs.copy()
        for role, (before, after) in enumerate(_TURNS):
            held = self.rooms[i][role]
            if 0 < held < self.layers:
                added = held * self.seconds[i] + self._beside(i, role)
                better = costs[before, : costs.shape[1] - self._step, : self.layers + 1 - held] + added
                target = taken[after, self._step :, held:]
                np.minimum(target, better, out=target)
        return taken

    def _ended(self, ahead: Costs, i: int) -> tuple[float, int, tuple[int, int, int]] | None:
        """The least cost of giving candidate `i` all that is left, in which role, and from where.

        `ahead` is what it costs if it takes what is left, but for the way to it.
        """
        best: tuple[float, int, tuple[int, int, int]] | None = None
        for role, before in _ENDED:
            low, fewest = max(1, self.layers - self.rooms[i][role]), self._step * max(1, self.size_min - 1)
            totals = ahead[before, fewest : self.size_max, low : self.layers]
            if not totals.size:
                continue
            least = int(totals.argmin())
            total = float(totals.flat[least]) + self._beside(i, role)
            if total < np.inf and (best is None or total < best[0]):
                taken, held = divmod(least, totals.shape[1])
                best = (total, role, (before, fewest + taken, low + held))
        return best

    @property
    def _step(self) -> int:
        """By how much a node more counts."""
        return 0 if self.size_max is None else 1

    @cached_property
    def _left(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The layers that are left when so many are held."""
        return np.arange(self.layers, -1.0, -1.0)

    def _beside(self, i: int, role: int) -> float:
        return float(self.attached[i] + (self.heads[i] if role == _LAST else 0.0))

    def _members(self, steps: list[Costs], last: int, role: int, place: tuple[int, int, int]) -> tuple[int, ...]:
        """The way back from where the slowest node was given what was left."""
        roles = {role: [last]}
        for i in range(last - 1, -1, -1):
            before = steps[i]
            if before[place] == steps[i + 1][place]:
                continue
            for taken, added in enumerate(_ADDED):
                held = self.rooms[i][taken]
                origin = (place[0] - added, place[1] - self._step, place[2] - held)
                if held < 1 or origin[2] < 0 or place[0] & added != added:
                    continue
                if before[origin] + (held * self.seconds[i] + self._beside(i, taken)) == steps[i + 1][place]:
                    roles.setdefault(taken, []).append(i)
                    place = origin
                    break
        return (*roles.get(_FIRST, []), *roles.get(_INNER, []), *roles.get(_LAST, []))


def fastest_set(
    problem: Problem, attached: np.ndarray[tuple[int], np.dtype[np.float64]], limit: float
) -> Members | None:
    """The nodes of the best set of more than one by their roles, were each way to cost what `attached` says.

    None where none takes less than `limit`.
    """
    candidates = problem.candidates
    if problem.size_max < 2:
        return None
    counted = problem.nodes_max is not None or problem.size_min > 2
    seconds = np.array([candidate.second_sums[-1] / problem.layers for candidate in candidates])
    order = np.lexsort((np.arange(len(candidates)), seconds))
    filling = Filling(
        layers=problem.layers,
        size_min=problem.size_min,
        size_max=min(problem.size_max, FILLED_NODES_MAX) if counted else None,
        seconds=seconds[order],
        attached=attached[order],
        heads=np.array([candidates[i].head_seconds for i in order]),
        rooms_of=lambda i: _rooms(problem, int(order[i])),
        limit=limit,
    )
    members = filling.best()
    return None if members is None else tuple(int(order[i]) for i in members)


def _rooms(problem: Problem, i: int) -> Rooms:
    """How many layers a candidate holds as the first, the last and an inner rank."""
    candidate = problem.candidates[i]
    first = max(0, candidate.first_high)
    last = max(0, problem.layers - candidate.last_low)
    return first, last, min(candidate.most_layers, problem.layers - 1)
