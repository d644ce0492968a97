"""Which of many nodes take part in a search: the few that could be in a best placement, or could be needed at all.

Rules this module lives by:
- A node is left aside only where enough others hold as many layers as fast; of equals the first by id stays.
- For whether a model fits at all, the roomiest of each form are enough: place by place they hold what any others do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

import numpy as np

from services.master.allocator.budget import Budgets
from services.master.allocator.survey import Floats, Ints

BETTER_NODES_MAX: Final = 4
"""A node is of interest as long as not more than so many are both roomier and faster."""

POOL_NODES_MAX: Final = 40

NEIGHBOURS_MAX: Final = 4
"""How many of the nearest neighbours of each of the fastest come along."""

BLOCK_NODES: Final = 128

FORERUNNERS: Final = 128
"""How many of the best are looked at first, so that few of thousands need to be sorted."""

ROUTES_NODES_MAX: Final = 256
"""So many of the roomiest take part where some do not reach some others: the very roomiest may lie apart."""


def roomiest(budgets: Budgets, rows: Ints, rooms: Ints) -> Ints:
    """Of each form the roomiest of `rows`, as many as the model has layers, and all that are asked for by name.

    Where ways are missing these may not be enough, and more of them are taken.
    """
    most = max(budgets.request.layers, ROUTES_NODES_MAX if budgets.survey.blocked else 0)
    kept = [budgets.named_among(rows)]
    for form in range(len(budgets.survey.forms)):
        block = rows[budgets.survey.form[rows] == form]
        if len(block) > most:
            block = block[np.lexsort((block, -rooms[block]))[:most]]
        kept.append(block)
    return np.unique(np.concatenate(kept))


def promising(budgets: Budgets, *, timed: bool) -> Ints:
    """The rows that could be in a best placement; all of them where they are few."""
    rows = budgets.able
    if len(rows) <= POOL_NODES_MAX:
        return rows
    merits = budgets.speeds[rows] if timed else budgets.weights[rows].astype(np.float64)
    chosen = rows[_skyband(merits, budgets.room_bytes[rows])]
    near = _neighbours(budgets, chosen[np.lexsort((chosen, -budgets.speeds[chosen]))]) if timed else []
    return np.unique(np.concatenate([chosen, budgets.named_among(rows), np.array(near, dtype=np.int64)]))


def _skyband(merits: Floats, rooms: Ints) -> Ints:
    """The places that the fewest others surpass in both figures; of equals the later is surpassed by the earlier."""
    left = _unsurpassed(merits, rooms)
    order = left[np.lexsort((left, -rooms[left], -merits[left]))]
    sorted_rooms = rooms[order]
    # All that come before are at least as good in the one figure, so only those as roomy surpass.
    # Of their rooms the largest, ascending, one more than may surpass.
    best: list[int] = []
    kept: list[tuple[int, int]] = []
    for start in range(0, len(order), BLOCK_NODES):
        least = best[0] if len(best) > BETTER_NODES_MAX else -1
        for place in (np.flatnonzero(sorted_rooms[start : start + BLOCK_NODES] > least) + start).tolist():
            room = int(sorted_rooms[place])
            surpassed_by = len(best) - bisect_left(best, room)
            if surpassed_by <= BETTER_NODES_MAX:
                kept.append((surpassed_by, int(order[place])))
                insort(best, room)
                if len(best) > BETTER_NODES_MAX + 1:
                    del best[0]
    chosen = sorted(range(len(kept)), key=lambda place: (kept[place][0], place))[:POOL_NODES_MAX]
    return np.array([kept[place][1] for place in chosen], dtype=np.int64)


def _unsurpassed(merits: Floats, rooms: Ints) -> Ints:
    """The places that are left once the best were looked at: most others are neither as good nor as roomy."""
    if len(merits) <= 2 * FORERUNNERS:
        return np.arange(len(merits))
    ahead = merits >= np.partition(merits, -FORERUNNERS)[-FORERUNNERS]
    enough = np.partition(rooms[ahead], -BETTER_NODES_MAX - 1)[-BETTER_NODES_MAX - 1]
    return np.flatnonzero(ahead | (rooms > enough))


def _neighbours(budgets: Budgets, chosen: Ints) -> list[int]:
    """The nodes nearest to the first few of `chosen`, by what these have measured."""
    found: list[int] = []
    rooms, able = budgets.room_bytes, budgets.is_able
    for row in chosen[:NEIGHBOURS_MAX].tolist():
        ways = budgets.survey.ways.get(budgets.survey.node_ids[row], {})
        reached = ((budgets.survey.rows.get(to), way.seconds) for to, way in ways.items() if way.seconds < float("inf"))
        near = sorted((seconds, -int(rooms[to]), to) for to, seconds in reached if to is not None and able[to])
        found.extend(to for *_, to in near[:NEIGHBOURS_MAX])
    return found
