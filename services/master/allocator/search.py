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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from services.master.allocator.arrangement import arranged
from services.master.allocator.exact import EXACT_NODES_MAX, Best, Exact
from services.master.allocator.problem import Problem
from services.master.allocator.shortlist import proposals
from services.master.allocator.solution import Solution, solution
from ullage.v1 import model_pb2

RUNNERS_UP_MAX: Final = 3

KEPT_UNLESS_BETTER: Final = 0.95
"""What is to be replaced stays where it is unless elsewhere takes less than this part of its time."""

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
        kept = frozenset(each.node_id for each in members) == self.kept
        cost = best.cost * KEPT_UNLESS_BETTER if kept else best.cost
        return (
            self.size * len(members),
            _digits(cost) if self.timed else 0.0,
            0 if kept else 1,
            -sum(candidate.weight for candidate in members),
        )


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
        return tuple(_weighed(problem, aim))
    found: dict[tuple[str, ...], Solution] = {}
    for solved in _proposed(problem, aim):
        names = tuple(candidate.node_id for candidate in solved.order)
        if names not in found or aim.rank(solved) < aim.rank(found[names]):
            found[names] = solved
    if not found:
        order = arranged(problem, most=aim.size < 0).order
        last = solution(problem, order, timed=False) if order else None
        return (last,) if last else ()
    return tuple(sorted(found.values(), key=aim.rank)[: runners_up + 1])


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


def _weighed(problem: Problem, aim: Aim) -> Iterator[Solution]:
    """The best sets of a problem small enough to weigh them all."""
    tolerance = KEPT_UNLESS_BETTER if aim.kept else 1.0
    if aim.runners_up > RUNNERS_UP_MAX:
        tolerance = 0.0  # All of them are asked for, however much worse.
    size = aim.size if tolerance else -1
    exact = Exact(problem, timed=aim.timed, bottleneck=aim.bottleneck, size=size, tolerance=tolerance)
    best = sorted(exact.sets, key=lambda each: (*aim.rank_of(each, problem), each.members))
    yield from islice(filter(None, (_ordered(problem, exact, each, aim) for each in best)), aim.runners_up + 1)


def _ordered(problem: Problem, exact: Exact, best: Best, aim: Aim) -> Solution | None:
    """The set in its best order; as its nodes are preferred, if that is as good."""
    preferred = solution(problem, best.members, timed=aim.timed, bottleneck=aim.bottleneck)
    if preferred is not None and (not aim.timed or _as_good(preferred, best, aim)):
        return preferred
    return solution(problem, exact.order(best), timed=aim.timed, bottleneck=aim.bottleneck)


def _as_good(found: Solution, best: Best, aim: Aim) -> bool:
    cost = found.bottleneck_seconds if aim.bottleneck else found.seconds_per_token
    return cost is not None and _digits(cost) <= _digits(best.cost)


def _proposed(problem: Problem, aim: Aim) -> Iterable[Solution]:
    """Solutions among many candidates: each proposal weighed whole, or in its order where it is too large for that."""
    for proposal in proposals(problem, timed=aim.timed, bottleneck=aim.bottleneck, size=aim.size):
        if len(proposal) <= EXACT_NODES_MAX:
            yield from _weighed(problem.among(proposal), aim)
        else:
            solved = solution(problem, proposal, timed=aim.timed, bottleneck=aim.bottleneck)
            yield from [solved] if solved is not None else []


def _digits(seconds: float) -> float:
    return float(f"{seconds:.{EQUAL_DIGITS}g}")
