"""Where to cut the layers among nodes that stand in an order: exact, over every cut that fits.

Rules this module lives by:
- A cut is made only where each rank can hold its layers, ends and all; shares and speeds choose among such cuts.
- Of equally good cuts, earlier ranks get more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from services.master.allocator.ranges import Candidate, boundaries

Cost = Callable[[int, int, int], float]
"""What it costs that a rank gets the layers from a start to an end."""
Join = Callable[[float, float], float]
"""How costs of ranks make a cost of the whole; never falls when one of them rises."""

SHARE_WEIGHT: Final = 1e-6
"""How much shares count against time: enough to choose between equal times, too little to be felt."""


def cut(order: Sequence[Candidate], cost: Cost, join: Join) -> tuple[int, ...]:
    """The ends of each rank's layers with the least cost, for an order that can hold the model."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for rank in range(len(order)):
        reached: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start in sorted(best, reverse=True):
            so_far, cuts = best[start]
            for end in _ends(order, rank, start):
                total = join(so_far, cost(rank, start, end))
                if end not in reached or total < reached[end][0]:
                    reached[end] = (total, (*cuts, end))
        best = reached
    return best[order[0].layers][1]


def _ends(order: Sequence[Candidate], rank: int, start: int) -> list[int]:
    """Where `rank` can end when it starts at `start`."""
    candidate, end = order[rank], order[rank].layers
    if len(order) == 1:
        return [end]
    if rank == 0:
        return list(boundaries(candidate.first_ends))
    if rank == len(order) - 1:
        return [end] if candidate.last_starts >> start & 1 else []
    return list(boundaries(candidate.ends_from(1 << start)))


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


def share_cost(order: Sequence[Candidate]) -> Cost:
    """How far a rank's part of the layers is from its share."""
    parts = shares(order)

    def cost(rank: int, start: int, end: int) -> float:
        sums = order[rank].demand.layer_sums
        return float(((sums[end] - sums[start]) / sums[-1] - parts[rank]) ** 2)

    return cost


def stage_seconds(candidate: Candidate, start: int, end: int) -> float:
    """The time the layers from `start` to `end` take for a token on a node whose speed is known."""
    if not candidate.bytes_per_second:
        raise ValueError(f"the speed of {candidate.node_id} is not known")
    return candidate.demand.read_bytes(start, end) / candidate.bytes_per_second


def time_cost(order: Sequence[Candidate]) -> Cost:
    """How long a rank takes for a token; where that is equal, how far it is from its share."""
    share = share_cost(order)

    def cost(rank: int, start: int, end: int) -> float:
        return stage_seconds(order[rank], start, end) * (1 + SHARE_WEIGHT * share(rank, start, end))

    return cost


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
