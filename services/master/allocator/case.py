"""A request put to the nodes as they are, and to the nodes as they would be if."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

from services.master.allocator.arrangement import arranged
from services.master.allocator.budget import AS_THEY_ARE, Budget, Budgets, View
from services.master.allocator.capacity import Capacity
from services.master.allocator.exact import EXACT_NODES_MAX
from services.master.allocator.hops import hops
from services.master.allocator.pool import POOL_NODES_MAX, promising, roomiest
from services.master.allocator.problem import STEPS_MAX, Members, Problem
from services.master.allocator.request import Request
from services.master.allocator.search import RUNNERS_UP_MAX, solve
from services.master.allocator.solution import Solution
from services.master.allocator.survey import Held, Ints, Survey
from ullage.v1 import model_pb2

_WIDE: Final = frozenset({model_pb2.OBJECTIVE_PROPORTIONAL, model_pb2.OBJECTIVE_THROUGHPUT})
"""Objectives that may want every node there is, not the few that are fast."""

QUICK_NODES_MAX: Final = 16
"""Of so many nodes orders are tried even where it shall be quick."""


class Fit(NamedTuple):
    """Whether nodes can hold what is asked for."""

    holds: bool
    proved: bool = True
    """Where they do not: that they cannot, and not only that no way was found."""
    order: Members | None = None
    """Where they do and it was looked for: an order, as places among the roomiest in the order of preference."""


@dataclass(frozen=True, eq=False)
class Case:
    """What is to be decided."""

    survey: Survey
    request: Request
    silent_node_ids: frozenset[str]
    view: View = AS_THEY_ARE
    runners_up: int = RUNNERS_UP_MAX
    quickly: bool = False
    """Of many nodes say only so much as counting shows: a yes is true, a no may not be. For what is tried often."""
    steps_max: int = STEPS_MAX
    """How long an order is looked for."""

    @cached_property
    def budgets(self) -> Budgets:
        """Every node's, in columns."""
        return Budgets(self.survey, self.request, self.silent_node_ids, self.view)

    @cached_property
    def nodes(self) -> tuple[Budget, ...]:
        """Every node, by id."""
        return tuple(self.budgets.of(range(len(self.budgets))))

    @cached_property
    def weighed(self) -> tuple[Budget, ...]:
        """The nodes that are not left out, even if they are too small."""
        return tuple(self.nodes[row] for row in self.budgets.weighed)

    def solutions(self) -> tuple[Solution, ...]:
        """The best placement and its runners-up; empty when there is none."""
        able, rooms = self.budgets.able, self.budgets.room_bytes
        few = len(able) <= EXACT_NODES_MAX
        if few and self._counted(able, rooms) is False:
            return ()
        if few or (len(able) > POOL_NODES_MAX and self.request.objective not in _WIDE):
            timed = self.timed(able)
            problem = self._problem(promising(self.budgets, timed=timed), rooms, timed=timed)
            found = self._solved(problem) if problem else ()
            if found or few:
                return found
        return self.solutions_in(rooms)

    def solutions_in(self, rooms: Ints) -> tuple[Solution, ...]:
        """The same were these the rooms of the nodes, whichever they are."""
        fit = self.fit if rooms is self.budgets.room_bytes else self.fit_in(rooms)
        if not fit.holds:
            return ()
        rows = roomiest(self.budgets, self.budgets.weighed, rooms)
        problem = self._problem(rows, rooms, timed=self.timed(self.budgets.weighed))
        return self._solved(replace(problem, holding=fit.order)) if problem else ()

    @cached_property
    def fit(self) -> Fit:
        """Whether there is a placement."""
        return self.fit_in(self.budgets.room_bytes)

    @property
    def proved(self) -> bool:
        """Where there is no placement: that there is none, and not only that none was found."""
        return len(self.budgets.able) <= EXACT_NODES_MAX or self.fit.proved

    def fit_with(self, row: int, more_bytes: int) -> Fit:
        """Whether there would be one if `more_bytes` more were available on one node."""
        rooms = self.budgets.room_bytes.copy()
        rooms[row] = self.budgets.room_with(more_bytes)[row]
        return self.fit_in(rooms)

    def fits_boundless(self) -> bool:
        """There would be one if the nodes had all the memory in the world, and reached each other."""
        request, nodes = self.request, len(self.budgets.weighed)
        if not nodes or len(self.budgets.named_among(self.budgets.weighed)) < len(request.wanted):
            return False
        fixed, left = len(request.layers_fixed), request.layers - sum(request.layers_fixed.values())
        others = max(1 if left else 0, len(request.wanted) - fixed)
        fewest = max(request.nodes_min, fixed + others)
        most = min(nodes, fixed + left)
        return fewest <= (most if request.nodes_max is None else min(most, request.nodes_max))

    def fit_in(self, rooms: Ints) -> Fit:
        """Whether there would be one if these were the rooms of the nodes."""
        rows = roomiest(self.budgets, self.budgets.weighed, rooms)
        counted = self._counted(rows, rooms)
        if counted is not None or (self.quickly and len(rows) > QUICK_NODES_MAX):
            return Fit(bool(counted), proved=counted is not None)
        problem = self._problem(rows, rooms, timed=False)
        if problem is None:
            return Fit(holds=False)
        found = arranged(problem, most=False)
        # Where ways are missing, whoever was left aside may be the only way.
        aside = self.ways_missing and len(rows) < len(self.budgets.weighed)
        return Fit(found.order is not None, proved=found.proved and not aside, order=found.order)

    @property
    def ways_missing(self) -> bool:
        """Some node does not reach some other."""
        return bool(self.survey.blocked) and not self.view.every_way

    def timed(self, rows: Ints) -> bool:
        """The speed of every one of these nodes is known: a guess would send layers to whoever says nothing."""
        return bool((self.budgets.speeds[rows] > 0).all())

    def asking(self, request: Request) -> Case:
        """The same nodes, asked for something else."""
        return replace(self, request=request)

    def seen(self, view: View) -> Case:
        """The same request to the nodes in another light."""
        return replace(self, view=view)

    def with_cut_off(self) -> Case:
        """The case with the nodes that no others reach among those weighed, for where rooms may be others than now."""
        return self.seen(replace(self.view, with_cut_off=True))

    def held(self, part: Callable[[Held, bool], int]) -> dict[str, int]:
        """What each instance but the replaced one holds of the nodes that may be used.

        `part` is what counts of a shard, told whether its node's figures are an operator's.
        """
        found: dict[str, int] = {}
        weighed = set(self.budgets.weighed.tolist())
        for row in sorted(weighed & self.survey.shards.keys()):
            for shard in self.survey.shards[row]:
                held = part(shard, bool(self.survey.overridden[row]))
                if held and shard.instance_id != self.request.replaced_instance_id:
                    found[shard.instance_id] = found.get(shard.instance_id, 0) + held
        return found

    def _counted(self, rows: Ints, rooms: Ints) -> bool | None:
        """Whether these nodes hold the model, where that can be found out by counting layers."""
        request = self.request
        if not rows.size:
            return False
        most = min(len(rows), request.layers)
        largest = Capacity(
            rooms=rooms[rows],
            demands=self.budgets.demands,
            forms=self.survey.form[rows],
            size_min=request.nodes_min,
            size_max=most if request.nodes_max is None else min(most, request.nodes_max),
        )
        # Counting knows neither of nodes that are asked for nor of ways that are missing: with these only a no is sure.
        free = not request.wanted and not self.ways_missing
        if free and largest.holds():
            return True
        return False if (free and largest.exact) or not replace(largest, smallest=True).holds() else None

    def _solved(self, problem: Problem) -> tuple[Solution, ...]:
        return solve(problem, self.request.objective, self._replaced_node_ids(), self.runners_up)

    def _problem(self, rows: Ints, rooms: Ints, *, timed: bool) -> Problem | None:
        """The problem, or None where a node that must get layers is not there to get them."""
        candidates = self.budgets.candidates(rows.tolist(), rooms, timed=timed)
        if not candidates or not self.request.wanted <= {candidate.node_id for candidate in candidates}:
            return None
        preferred = sorted(candidates, key=lambda each: (-each.weight, each.node_id))
        demand = preferred[0].demand
        ways = hops(
            [candidate.node_id for candidate in preferred],
            {} if self.view.every_way else self.survey.ways,
            token_bytes=demand.activation_bytes,
            prompt_bytes=demand.prompt_activation_bytes,
        )
        return Problem(tuple(preferred), ways, self.request.nodes_min, self.request.nodes_max, steps_max=self.steps_max)

    def _replaced_node_ids(self) -> frozenset[str]:
        """The nodes of the instance that this one takes the place of."""
        replaced = self.survey.instances.get(self.request.replaced_instance_id)
        return frozenset() if replaced is None else frozenset(each.shard.node_id for each in replaced.shards)
