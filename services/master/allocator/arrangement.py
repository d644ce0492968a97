"""Whether nodes can hold a model at all, and an order in which they can.

Where layers are alike they are counted. Else, of more than EXACT_NODES_MAX nodes the roomiest that all reach each other
stand in sets and chains; if these do not hold it, or there are fewer, every order is tried.

Rules this module lives by:
- More memory or another node never turns a yes into a no.
- What cannot be is found out by adding up, before anything is tried.
"""

from __future__ import annotations

import numpy as np

from services.master.allocator.capacity import ROOM_BYTES_MAX, Capacity
from services.master.allocator.chains import Chains
from services.master.allocator.exact import EXACT_NODES_MAX
from services.master.allocator.problem import Members, Problem
from services.master.allocator.routes import Arrangement, Routes


def arranged(problem: Problem, *, most: bool) -> Arrangement:
    """An order of candidates that holds the model, if there is one; of many, the fewest or the `most` found."""
    if problem.size_max < problem.size_min or _too_little(problem):
        return Arrangement(None)
    if not all(problem.candidates[i].of_use for i in problem.required):
        return Arrangement(None)
    if problem.holding is not None and not most:
        return Arrangement(problem.holding)
    counted = not problem.required and problem.hops.open
    if counted:
        largest = capacity(problem)
        found = largest.arranged(most=most)
        if largest.exact or (found is not None and len(problem.candidates) > EXACT_NODES_MAX):
            return Arrangement(found)
        if not capacity(problem, smallest=True).holds():
            return Arrangement(None)
    if len(problem.candidates) <= EXACT_NODES_MAX:
        # So few are all the sooner tried in every order.
        return Routes(problem).arranged()
    return _among_many(problem, most=most)


def capacity(problem: Problem, *, smallest: bool = False) -> Capacity:
    """What a problem's candidates hold, counted."""
    demands = list({candidate.demand.form: candidate.demand for candidate in problem.candidates}.values())
    places = {demand.form: place for place, demand in enumerate(demands)}
    return Capacity(
        rooms=np.array([min(candidate.room_bytes, ROOM_BYTES_MAX) for candidate in problem.candidates], dtype=np.int64),
        demands=demands,
        forms=np.array([places[candidate.demand.form] for candidate in problem.candidates], dtype=np.int64),
        size_min=problem.size_min,
        size_max=problem.size_max,
        smallest=smallest,
    )


def _too_little(problem: Problem) -> bool:
    """There are not even bytes enough."""
    rooms = sorted((candidate.room_bytes for candidate in problem.candidates), reverse=True)
    return sum(rooms[: problem.size_max]) < problem.least_bytes


def _among_many(problem: Problem, *, most: bool) -> Arrangement:
    """The same where there are many nodes, whose layers differ, or who are asked for by name or do not all reach."""
    kept = _mutual(problem)
    found = Chains(problem.among(kept)).arranged(most=most) if kept else None
    if found:
        return Arrangement(tuple(kept[i] for i in found))
    return Arrangement(problem.holding) if problem.holding else Routes(problem).arranged()


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
        worst = max(
            range(len(kept)), key=lambda place: (not problem.candidates[kept[place]].must, misses[place], place)
        )
        del kept[worst]
    return tuple(kept)
