"""Whether nodes can hold a model at all, and an order in which they can.

Up to EXACT_NODES_MAX nodes the answer is exact. Of more nodes it is exact where layers are alike; where they are
not, the roomiest stand in sets and chains. Nodes between which there is no way are told apart first.

Rules this module lives by:
- More memory or another node never turns a yes into a no.
- What cannot be is found out by adding up, before anything is tried.
"""

from __future__ import annotations

import numpy as np

from services.master.allocator.capacity import Capacity
from services.master.allocator.chains import Chains
from services.master.allocator.exact import EXACT_NODES_MAX, Exact
from services.master.allocator.problem import Members, Problem


def fits(problem: Problem) -> bool:
    """Some arrangement of the candidates holds the model."""
    return arranged(problem, most=False) is not None


def arranged(problem: Problem, *, most: bool) -> Members | None:
    """An order of candidates that holds the model, of the fewest or the `most` found; None when there is none."""
    alone = _alone(problem)
    if alone is not None and not most:
        return alone
    if problem.size_max < problem.size_min or not _could(problem):
        return alone
    largest = Capacity(problem)
    if largest.exact:
        return largest.arranged(most=most) or alone
    if len(problem.candidates) <= EXACT_NODES_MAX:
        return _exactly(problem, most=most)
    return (largest.arranged(most=most) if largest.counts else _among_many(problem, most=most)) or alone


def _alone(problem: Problem) -> Members | None:
    """A candidate that holds the whole model, if one may."""
    if problem.size_min > 1:
        return None
    others = problem.required[1:]
    able = [i for i, each in enumerate(problem.candidates) if each.alone and not others]
    allowed = [i for i in able if not problem.required or i in problem.required]
    return (allowed[0],) if allowed else None


def _could(problem: Problem) -> bool:
    """Bounds that cost little: enough bytes, and enough layers were every one as small as the smallest."""
    rooms = sorted((candidate.room_bytes for candidate in problem.candidates), reverse=True)
    if sum(rooms[: problem.size_max]) < problem.least_bytes:
        return False
    smallest = Capacity(problem, smallest=True)
    return not smallest.counts or smallest.holds()


def _exactly(problem: Problem, *, most: bool) -> Members | None:
    exact = Exact(problem, timed=False, size=-1 if most else 1)
    sets = sorted(exact.sets, key=lambda best: (-len(best.members) if most else len(best.members), best.members))
    return exact.order(sets[0]) if sets else None


def _among_many(problem: Problem, *, most: bool) -> Members | None:
    """The same where there are many nodes, of which some are asked for by name or reach some others only."""
    kept = _mutual(problem)
    found = Chains(problem.among(kept)).arranged(most=most) if kept else None
    return tuple(kept[i] for i in found) if found else None


def _mutual(problem: Problem) -> Members:
    """Candidates that all reach each other: whoever misses most others is left out first, required ones last."""
    missing = ~np.isfinite(problem.hops.onward)
    np.fill_diagonal(missing, val=False)
    missing |= missing.T
    kept = list(range(len(problem.candidates)))
    while kept:
        misses = missing[np.ix_(kept, kept)].sum(axis=1)
        if not misses.any():
            break
        # Of equally cut off nodes the one preferred least goes.
        worst = max(range(len(kept)), key=lambda place: (not problem.candidates[kept[place]].must, misses[place], place))
        del kept[worst]
    return tuple(kept)
