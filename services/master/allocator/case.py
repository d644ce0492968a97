"""A request put to the nodes as they are, and to the nodes as they would be if."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from services.master.allocator.budget import AS_THEY_ARE, Budget, View, budgets
from services.master.allocator.hops import hops
from services.master.allocator.problem import Problem
from services.master.allocator.ranges import Candidate
from services.master.allocator.request import Request
from services.master.allocator.search import fits, solve
from services.master.allocator.solution import Solution
from services.master.state import State


@dataclass(frozen=True, eq=False)
class Case:
    """What is to be decided."""

    state: State
    request: Request
    silent_node_ids: frozenset[str]
    view: View = AS_THEY_ARE

    @cached_property
    def nodes(self) -> tuple[Budget, ...]:
        """Every node, by id."""
        return budgets(self.state, self.request, self.silent_node_ids, self.view)

    @cached_property
    def weighed(self) -> tuple[Budget, ...]:
        """The nodes that are not left out, even if they are too small."""
        return tuple(budget for budget in self.nodes if budget.left_out is None)

    def solutions(self) -> tuple[Solution, ...]:
        """The best placement and its runners-up; empty when there is none."""
        return self.solutions_for(self._candidates())

    def solutions_for(self, candidates: tuple[Candidate, ...]) -> tuple[Solution, ...]:
        """The same for candidates other than the nodes' own."""
        problem = self._problem(candidates)
        return solve(problem, self.request.objective, self._replaced_node_ids()) if problem else ()

    def fits(self) -> bool:
        """There is a placement."""
        return self.fits_for(self._candidates())

    def fits_for(self, candidates: tuple[Candidate, ...]) -> bool:
        """There is one for candidates other than the nodes' own."""
        problem = self._problem(candidates)
        return problem is not None and fits(problem)

    def fits_with(self, node_id: str, more_bytes: int) -> bool:
        """There would be one if `more_bytes` more were available on one node."""
        return self.fits_for(
            tuple(
                budget.candidate(more_bytes=more_bytes if budget.node_id == node_id else 0) for budget in self.weighed
            )
        )

    def fits_in(self, rooms: Mapping[str, int]) -> bool:
        """There would be one if these nodes had this room."""
        return self.fits_for(self.candidates_in(rooms))

    def candidates_in(self, rooms: Mapping[str, int]) -> tuple[Candidate, ...]:
        """These nodes as candidates with this room."""
        return tuple(
            budget.candidate(room_bytes=rooms[budget.node_id]) for budget in self.nodes if budget.node_id in rooms
        )

    def asking(self, request: Request) -> Case:
        """The same nodes, asked for something else."""
        return replace(self, request=request)

    def seen(self, view: View) -> Case:
        """The same request to the nodes in another light."""
        return replace(self, view=view)

    def _candidates(self) -> tuple[Candidate, ...]:
        return tuple(budget.candidate() for budget in self.nodes if budget.exclusion is None)

    def _problem(self, candidates: tuple[Candidate, ...]) -> Problem | None:
        """The problem, or None where a node that must get layers is not there to get them."""
        if not candidates or not self.request.wanted <= {candidate.node_id for candidate in candidates}:
            return None
        preferred = sorted(candidates, key=lambda each: (-each.weight, each.node_id))
        demand = preferred[0].demand
        ways = hops(
            [candidate.node_id for candidate in preferred],
            {candidate.node_id: self.state.nodes[candidate.node_id].links for candidate in preferred},
            token_bytes=demand.activation_bytes,
            prompt_bytes=demand.prompt_activation_bytes,
        )
        return Problem(tuple(preferred), ways, self.request.nodes_min, self.request.nodes_max)

    def _replaced_node_ids(self) -> frozenset[str]:
        """The nodes of the instance that this one takes the place of."""
        replaced = self.state.instances.get(self.request.replaced_instance_id)
        return frozenset() if replaced is None else frozenset(each.shard.node_id for each in replaced.shards)
