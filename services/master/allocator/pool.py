"""Which of many nodes take part in a search: the few that could be in a best placement, or could be needed at all.

Rules this module lives by:
- A node is left aside only where enough others hold as many layers as fast; of equals the first by id stays.
- For whether a model fits at all, the roomiest of each form are enough: place by place they hold what any others do.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from services.master.allocator.budget import Budgets
from services.master.allocator.roster import Floats, Ints

BETTER_NODES_MAX: Final = 4
"""A node is of interest as long as not more than so many are both roomier and faster."""

POOL_NODES_MAX: Final = 40

NEIGHBOURS_MAX: Final = 4
"""How many of the nearest neighbours of each of the fastest come along."""

BLOCK_NODES: Final = 512

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
    """The places that the fewest others surpass in both figures."""
    order = np.lexsort((np.arange(len(merits)), -rooms, -merits))
    kept = np.empty(0, dtype=np.int64)
    for start in range(0, len(order), BLOCK_NODES):
        block = order[start : start + BLOCK_NODES]
        if len(kept) > BETTER_NODES_MAX:
            # All that were kept are at least as fast, so only room can set a later one apart.
            least = np.partition(rooms[kept], -BETTER_NODES_MAX - 1)[-BETTER_NODES_MAX - 1]
            block = block[rooms[block] > least]
        kept = np.concatenate([kept, block])
        kept = kept[_surpassed(merits[kept], rooms[kept]) <= BETTER_NODES_MAX]
    depths = _surpassed(merits[kept], rooms[kept])
    return kept[np.lexsort((np.arange(len(kept)), depths))[:POOL_NODES_MAX]]


def _surpassed(merits: Floats, rooms: Ints) -> Ints:
    """By how many each is surpassed; of equals the later by the earlier."""
    places = np.arange(len(merits))
    better = (merits[None, :] >= merits[:, None]) & (rooms[None, :] >= rooms[:, None])
    equal = (merits[None, :] == merits[:, None]) & (rooms[None, :] == rooms[:, None])
    by: Ints = (better & ~(equal & (places[None, :] >= places[:, None]))).sum(axis=1)
    return by


def _neighbours(budgets: Budgets, chosen: Ints) -> list[int]:
    """The nodes nearest to the first few of `chosen`, by what these have measured."""
    found: list[int] = []
    for row in chosen[:NEIGHBOURS_MAX].tolist():
        links = budgets.survey.links.get(budgets.survey.node_ids[row])
        if not links:
            continue
        able = budgets.able_node_ids
        near = sorted(
            (link.latency.seconds, link.latency.nanos, -budgets.room_of(to), to)
            for to, link in list(links.items())
            if link.reachable and to in able
        )
        found.extend(budgets.row(to) for *_, to in near[:NEIGHBOURS_MAX])
    return found
