"""Which few of many nodes are worth weighing whole.

Rules this module lives by:
- Where speeds are known, the proposals are what would be best if every way cost the same, from several points of
  view where ways differ, each with the neighbours that might do better.
- Where they are not, the weightiest nodes; fewer nodes if fewer can hold the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from services.master.allocator.arrangement import arranged
from services.master.allocator.exact import EXACT_NODES_MAX
from services.master.allocator.filling import Floats, Views, fastest_sets
from services.master.allocator.problem import Members, Problem

WINDOW_NODES: Final = 6
"""How many nodes are weighed whole together, where a proposal itself is not larger."""

SHARING_NODES: Final = (8, 12, 16, 24, 32)
"""How many of the fastest nodes are tried where the slowest of them counts."""

POINTS_OF_VIEW: Final = 2
"""From how many nodes the ways are looked at where they differ."""


class Alone(NamedTuple):
    """A candidate that holds the whole model."""

    seconds: float
    member: int


def proposals(problem: Problem, *, timed: bool, bottleneck: bool, size: int, wanted: int) -> Iterator[Members]:
    """Sets of candidates that may be among the `wanted` best.

    Those of more than EXACT_NODES_MAX come in an order, from first to last.
    """
    seen: list[frozenset[int]] = []
    alone = _fastest_alone(problem, wanted) if timed else []
    limit = alone[-1].seconds if len(alone) == wanted else float("inf")
    found = _many_at_once(problem) if bottleneck else _proposals(problem, timed=timed, size=size, limit=limit)
    for proposal in list(found) or [tuple(each.member for each in alone)]:
        window = _filled(problem, proposal, timed=timed) if len(proposal) <= EXACT_NODES_MAX else proposal
        if not any(other.issuperset(window) for other in seen):
            seen.append(frozenset(window))
            yield window
    yield from ((each.member,) for each in alone if not any(each.member in other for other in seen))


def _fastest_alone(problem: Problem, wanted: int) -> list[Alone]:
    """The `wanted` fastest of the nodes that hold the model alone, where one node will do."""
    if problem.size_min > 1 or problem.required:
        return []
    able = ((i, each) for i, each in enumerate(problem.candidates) if each.alone)
    return sorted(Alone(float(each.second_sums[-1]) + each.head_seconds, i) for i, each in able)[:wanted]


def _proposals(problem: Problem, *, timed: bool, size: int, limit: float = float("inf")) -> Iterator[Members]:
    if problem.required:
        yield problem.required
    if not timed or size:
        yield ()
        found = arranged(problem, most=size < 0).order
        if found is not None:
            yield found
        return
    yield from filter(None, fastest_sets(problem, _views(problem), limit))


def _many_at_once(problem: Problem) -> Iterator[Members]:
    """Where tokens follow each other closely: as many of the fastest as share the work without too many hops."""
    yield problem.required
    fastest = sorted(range(len(problem.candidates)), key=lambda i: (problem.candidates[i].second_sums[-1], i))
    others = [i for i in fastest if i not in problem.required]
    for count in SHARING_NODES:
        chosen = (*problem.required, *others[: max(0, count - len(problem.required))])
        if problem.size_min <= len(chosen) <= problem.size_max:
            yield tuple(sorted(chosen))
    yield from _proposals(problem, timed=True, size=0)


def _views(problem: Problem) -> Views:
    """What the way to each candidate costs: at least, and from the fastest where ways differ."""
    onward = problem.hops.onward
    views: list[Floats] = [onward.min(axis=0)]
    if not problem.hops.even:
        fastest = sorted(range(len(problem.candidates)), key=lambda i: (problem.candidates[i].second_sums[-1], i))
        for i in fastest[:POINTS_OF_VIEW]:
            views.append(np.maximum(onward[i], onward[:, i]))
            views[-1][i] = 0.0
    return np.nan_to_num(np.stack(views), posinf=1e9)


def _filled(problem: Problem, proposal: Members, *, timed: bool) -> Members:
    """The proposal with the required, and the neighbours most worth a look, in the order of preference."""
    chosen = list(dict.fromkeys((*problem.required, *proposal)))
    room = max(WINDOW_NODES if timed else EXACT_NODES_MAX, len(chosen)) - len(chosen)
    others = [i for i in _by_worth(problem, chosen, timed=timed) if i not in chosen]
    return tuple(sorted((*chosen, *others[:room])))


def _by_worth(problem: Problem, chosen: list[int], *, timed: bool) -> list[int]:
    places = range(len(problem.candidates))
    if not timed:
        return list(places)
    ways = problem.hops.onward[chosen].min(axis=0) if chosen else np.zeros(len(problem.candidates))

    def worth(i: int) -> tuple[float, int]:
        candidate = problem.candidates[i]
        held = max(1, candidate.most_layers) / candidate.layers
        return float(ways[i]) / held + float(candidate.second_sums[-1]), i

    return sorted(places, key=worth)
