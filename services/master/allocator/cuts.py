"""Where to cut the layers among nodes that stand in an order: exact, over every cut that fits.

Rules this module lives by:
- A cut is made only where each rank can hold its layers, ends and all; shares and speeds choose among such cuts.
- Of equally good cuts, earlier ranks get more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from services.master.allocator.ranges import Candidate

Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]
"""What it costs that a rank gets the layers from a start to an end; infinite where it cannot hold them.

A first rank's has one row, since it starts with the first layer, and a last rank's one column.
"""

SHARE_WEIGHT: Final = 1e-6
"""How much shares count against time: enough to choose between equal times, too little to be felt."""


def cut_by_shares(order: Sequence[Candidate]) -> tuple[int, ...] | None:
    """The ends of each rank's layers that come closest to its share; None when the order cannot hold the model."""
    stages = [_fitting(order, rank, costs) for rank, costs in enumerate(_share_costs(order))]
    return _cut(stages, order[0].layers, bottleneck=False)


def cut_by_time(order: Sequence[Candidate], *, bottleneck: bool) -> tuple[int, ...] | None:
    """The ends with the least time for a token or, for `bottleneck`, the shortest longest stage.

    Where times are equal, shares decide. None when the order cannot hold the model.
    """
    stages = []
    for rank, shares_missed in enumerate(_share_costs(order)):
        seconds = _differences(order, rank, order[rank].second_sums)
        if rank == len(order) - 1:
            seconds += order[rank].head_seconds
        stages.append(_fitting(order, rank, seconds * (1 + SHARE_WEIGHT * shares_missed)))
    return _cut(stages, order[0].layers, bottleneck=bottleneck)


def stage_seconds(candidate: Candidate, start: int, end: int) -> float:
    """The time the layers from `start` to `end` take for a token on a node whose speed is known."""
    seconds = float(candidate.second_sums[end] - candidate.second_sums[start])
    return seconds + candidate.head_seconds if end == candidate.layers else seconds


def _cut(stages: Sequence[Matrix], layers: int, *, bottleneck: bool) -> tuple[int, ...] | None:
    """The ends with the least cost; of equally good ones those that give earlier ranks more."""
    best = stages[0][0]
    starts = []
    for stage in stages[1:]:
        total = np.maximum(best[:, None], stage) if bottleneck else best[:, None] + stage
        starts.append(len(total) - 1 - total[::-1].argmin(axis=0))
        best = total.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    ends, place = [layers], -1
    for before in reversed(starts):
        place = int(before[place])
        ends.append(place)
    return tuple(reversed(ends))


def _fitting(order: Sequence[Candidate], rank: int, costs: Matrix) -> Matrix:
    """`costs` where the rank can hold its layers, else infinite."""
    candidate, last = order[rank], order[rank].layers
    fits = np.zeros(costs.shape, dtype=bool)
    if len(order) == 1:
        fits[0, -1] = candidate.alone
    elif rank == 0:
        fits[0, candidate.first_low : candidate.first_high + 1] = True
    elif rank == len(order) - 1:
        fits[candidate.last_low : candidate.last_high + 1, -1] = True
    else:
        starts, ends = np.arange(last)[:, None], np.arange(last)
        low, high = (starts + 1, np.array(candidate.farthest)[:, None])
        if candidate.layers_fixed is not None:
            low = starts + candidate.layers_fixed
            high = np.minimum(high, low)
        fits[1:last, :last] = ((ends >= low) & (ends <= high))[1:]
    return np.where(fits, costs, np.inf)


def _share_costs(order: Sequence[Candidate]) -> list[Matrix]:
    """For each rank how far its part of the layers is from its share."""
    return [
        (_differences(order, rank, order[rank].demand.layer_array) / order[rank].demand.layer_array[-1] - part) ** 2
        for rank, part in enumerate(shares(order))
    ]


def _differences(order: Sequence[Candidate], rank: int, sums: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Matrix:
    """What lies between each start and each end that the rank can have."""
    starts = sums[:1] if rank == 0 else sums
    ends = sums[-1:] if rank == len(order) - 1 else sums
    return ends[None, :] - starts[:, None]


def shares(order: Sequence[Candidate]) -> list[float]:
    """The part of the layers each rank should get: in proportion to its weight, up to what it can hold."""
    caps = [_layer_room(order, rank) / candidate.demand.layer_sums[-1] for rank, candidate in enumerate(order)]
    weights = [_layer_weight(order, rank) for rank in range(len(order))]
    parts = [0.0] * len(order)
    for rank, candidate in enumerate(order):
        if candidate.layers_fixed is not None:
            parts[rank] = candidate.layers_fixed / candidate.layers
    open_ranks = [rank for rank, candidate in enumerate(order) if candidate.layers_fixed is None]
    left = max(0.0, 1.0 - sum(parts))
    while open_ranks:
        whole = sum(weights[rank] for rank in open_ranks)
        full = [rank for rank in open_ranks if left * weights[rank] / whole > caps[rank]]
        for rank in full or open_ranks:
            parts[rank] = caps[rank] if full else left * weights[rank] / whole
        left = max(0.0, left - sum(parts[rank] for rank in full))
        open_ranks = [rank for rank in open_ranks if rank not in full] if full else []
    return parts


def _layer_room(order: Sequence[Candidate], rank: int) -> int:
    """What a rank's room leaves for layers."""
    candidate, demand = order[rank], order[rank].demand
    if len(order) == 1:
        beside = demand.alone_bytes - demand.layer_sums[-1]
    elif rank == 0:
        beside = demand.first_bytes
    elif rank == len(order) - 1:
        beside = demand.last_bytes
    else:
        beside = demand.working_bytes
    return max(0, candidate.room_bytes - beside)


def _layer_weight(order: Sequence[Candidate], rank: int) -> float:
    """A rank's weight for layers alone: what it needs beside them is no share of them."""
    candidate = order[rank]
    if not candidate.room_bytes:
        return 1.0
    return max(1.0, candidate.weight * _layer_room(order, rank) / candidate.room_bytes)
