"""Who gets which layers: the best arrangement under an objective, and what came close.

Up to EXACT_NODES_MAX nodes every set, order and cut is weighed, and the answer is the best there is. Of more nodes
some few are proposed (`shortlist`), and every set, order and cut of these is weighed.

Rules this module lives by:
- It answers whenever `arranged` does, and that does not depend on the objective: wishes choose, they never refuse.
- Speeds count only when they are known for every candidate: a guess would send layers to whoever says nothing.
- Deterministic: nodes are preferred by weight, then by id, never by when they joined.
- A placement that is to be replaced is left only for one that is better by more than a sample's noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from services.master.allocator.arrangement import arranged
from services.master.allocator.exact import EXACT_NODES_MAX, Best, Exact
from services.master.allocator.problem import Problem
from services.master.allocator.shortlist import proposals
from services.master.allocator.solution import Solution, solution
from ullage.v1 import model_pb2

RUNNERS_UP_MAX: Final = 3

KEPT_UNLESS_BETTER: Final = 0.95
"""What is to be replaced stays where it is unless elsewhere takes less than this part of its time."""

RUNNERS_UP_SLOWER_MAX: Final = 1.5
"""By how much the longest stage of a runner-up may be longer, where that counts."""

EQUAL_DIGITS: Final = 9
"""Times that agree in so many digits are equal: weight decides between them."""


@dataclass(frozen=True)
class Aim:
    """What makes one arrangement better than another."""

    timed: bool = False
    bottleneck: bool = False
    """The longest stage or hop counts, not their sum."""
    size: int = 0
    """1 where fewer nodes are better before anything else, -1 where more are."""
    kept: frozenset[str] = frozenset()
    """The nodes of the placement that this one replaces."""
    runners_up: int = RUNNERS_UP_MAX

    def rank(self, found: Solution) -> tuple[float, ...]:
        """The less, the better."""
        seconds, bottleneck = found.seconds_per_token or 0.0, found.bottleneck_seconds or 0.0
        cost = (bottleneck if self.bottleneck else seconds) if self.timed else 0.0
        if self.kept and found.node_ids == self.kept:
            cost *= KEPT_UNLESS_BETTER
        kept = 0 if found.node_ids == self.kept else 1
        then = seconds if self.bottleneck else 0.0
        return self.size * len(found.order), _digits(cost), _digits(then), kept, -found.weight

    def rank_of(self, best: Best, problem: Problem) -> tuple[float, ...]:
        """The same of a set before it is cut."""
        members = [problem.candidates[i] for i in best.members]
        kept = bool(self.kept) and frozenset(each.node_id for each in members) == self.kept
        cost = best.cost * KEPT_UNLESS_BETTER if kept else best.cost
        return (
            self.size * len(members),
            _digits(cost) if self.timed else 0.0,
            0 if kept else 1,
            -sum(candidate.weight for candidate in members),
        )


class Weighed(NamedTuple):
    """A set of nodes at its best, not yet cut."""

    exact: Exact
    best: Best
    rank: tuple[float, ...]
    """The less, the better."""

    @property
    def node_ids(self) -> frozenset[str]:
        """The nodes it uses."""
        return frozenset(self.exact.problem.candidates[i].node_id for i in self.best.members)

    def solution(self) -> Solution:
        """The set in its best order, cut; in the order in which nodes are preferred, if that is as good."""
        exact, preferred = self.exact, self.best.members
        as_good = _digits(exact.cost(preferred)) <= _digits(self.best.cost)
        order = preferred if as_good else exact.order(self.best)
        found = solution(exact.problem, order, timed=exact.timed, bottleneck=exact.bottleneck)
        if found is None:
            raise ValueError("an order that was weighed cannot be cut")
        return found


def solve(
    problem: Problem,
    objective: model_pb2.Objective.ValueType,
    kept: frozenset[str] = frozenset(),
    runners_up: int = RUNNERS_UP_MAX,
) -> tuple[Solution, ...]:
    """The best arrangement, then at most so many runners-up; empty when the model does not fit.

    `kept` are the nodes of the placement that is replaced.
    """
    aim = replace(_aim(objective, kept, speeds_known=problem.speeds_known), runners_up=runners_up)
    if len(problem.candidates) <= EXACT_NODES_MAX:
        return tuple(each.solution() for each in _weighed(problem, aim))
    found = _among_many(problem, aim)
    if not found:
        order = arranged(problem, most=aim.size < 0).order
        last = solution(problem, order, timed=False) if order else None
        return (last,) if last else ()
    return tuple(sorted(found, key=aim.rank)[: runners_up + 1])


def _aim(objective: model_pb2.Objective.ValueType, kept: frozenset[str], *, speeds_known: bool) -> Aim:
    match objective:
        case model_pb2.OBJECTIVE_FEWEST_NODES:
            return Aim(timed=speeds_known, size=1, kept=kept)
        case model_pb2.OBJECTIVE_PROPORTIONAL:
            return Aim(size=-1, kept=kept)
        case model_pb2.OBJECTIVE_THROUGHPUT:
            return Aim(timed=speeds_known, bottleneck=speeds_known, size=0 if speeds_known else -1, kept=kept)
        case _:
            # Without speeds no node is used without need.
            return Aim(timed=speeds_known, size=0 if speeds_known else 1, kept=kept)


def _weighed(problem: Problem, aim: Aim) -> list[Weighed]:
    """The best sets of a problem small enough to weigh them all, best first."""
    tolerance = KEPT_UNLESS_BETTER if aim.kept else 1.0
    if aim.runners_up > RUNNERS_UP_MAX:
        tolerance = 0.0  # All of them are asked for, however much worse.
    size = aim.size if tolerance else -1
    limit = _bottleneck_known(problem) if aim.bottleneck and tolerance else float("inf")
    wanted = aim.runners_up + 1
    exact = Exact(
        problem,
        aim.timed,
        bottleneck=aim.bottleneck,
        size=size,
        tolerance=tolerance,
        limit=limit,
        wanted=wanted,
    )
    weighed = [Weighed(exact, best, aim.rank_of(best, problem)) for best in exact.sets]
    return sorted(weighed, key=lambda each: (each.rank, each.best.members))[:wanted]


def _bottleneck_known(problem: Problem) -> float:
    """What sets are to be better than, or not much worse: all nodes in the order in which they are preferred."""
    found = solution(problem, range(len(problem.candidates)), timed=True, bottleneck=True)
    known = float("inf") if found is None else found.bottleneck_seconds
    return float("inf") if known is None else known * RUNNERS_UP_SLOWER_MAX


def _among_many(problem: Problem, aim: Aim) -> list[Solution]:
    """Solutions among many candidates: each proposal weighed whole, or in its order where it is too large for that."""
    sets: dict[frozenset[str], Weighed] = {}
    large: list[Solution] = []
    wanted = aim.runners_up + 1
    for proposal in proposals(problem, timed=aim.timed, bottleneck=aim.bottleneck, size=aim.size, wanted=wanted):
        if len(proposal) > EXACT_NODES_MAX:
            solved = solution(problem, proposal, timed=aim.timed, bottleneck=aim.bottleneck)
            large += [solved] if solved is not None else []
            continue
        for each in _weighed(problem.among(proposal), aim):
            known = sets.get(each.node_ids)
            if known is None or each.rank < known.rank:
                sets[each.node_ids] = each
    best = sorted(sets.values(), key=lambda each: (each.rank, sorted(each.node_ids)))
    # How long a token takes in all, which decides between equal bottlenecks, is known only once it is cut.
    return large + [each.solution() for each in (best if aim.bottleneck else best[: aim.runners_up + 1])]


def _digits(seconds: float) -> float:
    return float(f"{seconds:.{EQUAL_DIGITS}g}")
