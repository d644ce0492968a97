"""Groups of nodes that would each hold a part of every layer: planned and explained, not yet run.

After each half layer all nodes of a group add up what they have, twice a layer: what splitting saves in reading is
soon lost in waiting. So only nodes that reach each other fast are worth grouping.

Rules this module lives by:
- No runner can do it yet, and the answer says so whatever the numbers are; `force` does not lift it.
- What is said of a group is reckoned from its nodes' true bytes, speeds and ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from services.master.allocator.case import Case
from services.master.allocator.demand import Demand
from services.master.allocator.hops import hops
from services.master.allocator.naming import counted, listed
from services.master.allocator.request import tensor_sizes
from services.master.allocator.wording import size
from ullage.v1 import model_pb2

SUMS_PER_LAYER: Final = 2
"""After attention and after the MLP."""

SEEDS_MAX: Final = 8
"""From how many of the roomiest nodes a group is grown."""


@dataclass(frozen=True)
class Group:
    """Nodes that share every layer."""

    rows: tuple[int, ...]
    share_bytes: int
    seconds: float | None
    """For a token, predicted; None where a speed is unknown."""
    waiting_seconds: float
    """The part of it in which the nodes add up."""


def not_runnable(case: Case) -> model_pb2.Refusal:
    """Why no tensor group is placed, and which one it would be."""
    group = best_group(case)
    plan = _plan(case, group) if group is not None else _no_plan(case)
    message = (
        f"No runner splits layers among nodes yet: ask for a pipeline, which is the default. As a tensor group {plan}."
    )
    return model_pb2.Refusal(
        reason=model_pb2.REFUSAL_REASON_TENSOR_NOT_RUNNABLE,
        message=message,
        nodes=[budget.message() for budget in case.nodes],
        remedies=[model_pb2.Remedy(text="Ask for a pipeline")],
        decided_at_sequence=case.survey.sequence,
    )


def best_group(case: Case) -> Group | None:
    """The group with the least time for a token or, where speeds are unknown, of the fewest nodes; None for none."""
    groups = list(_groups(case))
    if not groups:
        return None
    return min(groups, key=lambda group: (group.seconds or 0.0, len(group.rows), group.rows))


def share_bytes(demand: Demand, nodes: int) -> int:
    """What one of `nodes` holds: its part of every layer and cache, and the ends of the model whole."""
    layers = -(-demand.layer_sums[-1] // nodes)
    return layers + demand.alone_bytes - demand.layer_sums[-1]


def _groups(case: Case) -> Iterator[Group]:
    request = case.request
    for count in tensor_sizes(request.model):
        if request.nodes_min <= count <= (request.nodes_max or count):
            yield from _groups_of(case, count)


def _groups_of(case: Case, count: int) -> Iterator[Group]:
    """Groups grown from the fastest nodes that hold a share, each with those it reaches soonest."""
    budgets = case.budgets
    able = [row for row in budgets.weighed.tolist() if _share(case, row, count) <= budgets.room_bytes[row]]
    must = set(budgets.named_among(budgets.weighed).tolist())
    if len(able) < count or not must <= set(able):
        return
    speeds = np.nan_to_num(budgets.speeds)
    able.sort(key=lambda row: (row not in must, -speeds[row], -budgets.room_bytes[row], row))
    able = able[: 4 * SEEDS_MAX + count]
    ways = hops(
        [case.survey.node_ids[row] for row in able],
        case.survey.ways,
        token_bytes=budgets.demands[0].activation_bytes / count,
        prompt_bytes=0.0,
    ).onward
    ways = np.maximum(ways, ways.T)
    for seed in range(1 if must else min(SEEDS_MAX, len(able))):
        near = sorted(range(len(able)), key=lambda i: (i != seed, able[i] not in must, ways[seed, i], i))[:count]
        waiting = float(ways[np.ix_(near, near)][~np.eye(count, dtype=bool)].max())
        if np.isfinite(waiting):
            yield _group(case, tuple(able[i] for i in near), waiting)


def _group(case: Case, rows: tuple[int, ...], way_seconds: float) -> Group:
    count = len(rows)
    waiting = SUMS_PER_LAYER * case.request.layers * 2 * (count - 1) / count * way_seconds
    share = max(_share(case, row, count) for row in rows)
    if not case.timed(np.array(rows)):
        return Group(rows, share, None, waiting)
    reading = max(_read_bytes(case, row) / count / float(case.budgets.speeds[row]) for row in rows)
    return Group(rows, share, reading + waiting, waiting)


def _share(case: Case, row: int, count: int) -> int:
    return share_bytes(case.budgets.demands[int(case.survey.form[row])], count)


def _read_bytes(case: Case, row: int) -> int:
    return case.budgets.demands[int(case.survey.form[row])].read_bytes(0, case.request.layers)


def _plan(case: Case, group: Group) -> str:
    names = listed([case.survey.names[row] for row in group.rows])
    text = f"{names} would each hold {size(group.share_bytes)}"
    if group.seconds is None:
        return f"{text}, and wait {group.waiting_seconds * 1000:.1f} ms for each other at every token"
    milliseconds = f"{group.seconds * 1000:.1f} ms, {group.waiting_seconds * 1000:.1f} ms of it waiting for each other"
    return f"{text} and take {milliseconds}, for a token"


def _no_plan(case: Case) -> str:
    sizes = tensor_sizes(case.request.model)
    demands = case.budgets.demands
    share = size(share_bytes(demands[0], sizes[-1])) if demands and sizes else "its share"
    weighed = counted(len(case.budgets.weighed), "node")
    among = listed([str(each) for each in sizes])
    return f"it could be split among {among} nodes, and of {weighed} too few hold {share} and reach each other"
