"""A solution as the decision that is recorded: shards with their bytes, everybody's budget, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from google.protobuf import duration_pb2

from services.master.allocator.budget import Budget
from services.master.allocator.case import Case
from services.master.allocator.demand import UINT64_MAX
from services.master.allocator.naming import counted, listed
from services.master.allocator.request import WHOLE_TENTHS, Request
from services.master.allocator.solution import Solution
from services.master.allocator.wording import size
from ullage.v1 import model_pb2, node_pb2

SECONDS_MAX: Final = 315_576_000_000
"""The longest time a Duration can say."""

NODES_SHOWN_MAX: Final = 64
"""Of how many nodes a decision keeps the budget: of more, those it could have used most, and how many it left out."""


def placement(case: Case, solutions: Sequence[Solution]) -> model_pb2.Placement:
    """The decision for the first of `solutions`; the others are its alternatives."""
    chosen, *others = solutions
    request, nodes = case.request, _shown(case, solutions)
    shards = _shards(chosen, nodes)
    layers = {shard.node_id: shard.end_layer - shard.first_layer for shard in shards}
    return model_pb2.Placement(
        shards=shards,
        nodes=[budget.message(layers=layers.get(budget.node_id, 0)) for budget in nodes],
        nodes_omitted=len(case.budgets) - len(nodes),
        decided_at_sequence=case.survey.sequence,
        admission=request.admission,
        objective=request.objective,
        context_tokens=request.load.context_tokens,
        concurrent_sequences=request.load.concurrent_sequences,
        time_per_token=_duration(chosen.seconds_per_token),
        alternatives=[_alternative(other, chosen, nodes) for other in others],
        explanation=_explanation(request, chosen, nodes),
    )


def _shown(case: Case, solutions: Sequence[Solution]) -> list[Budget]:
    """The budgets that are kept with the decision, by id: all, or those in a solution and the weightiest others."""
    budgets = case.budgets
    if len(budgets) <= NODES_SHOWN_MAX:
        return list(case.nodes)
    used = {budgets.row(node_id) for solution in solutions for node_id in solution.node_ids}
    weights = budgets.weights
    least = np.partition(weights, -NODES_SHOWN_MAX)[-NODES_SHOWN_MAX]
    weighty = np.flatnonzero(weights >= least)
    by_weight = weighty[np.lexsort((weighty, -weights[weighty]))][:NODES_SHOWN_MAX].tolist()
    shown = [*used, *(row for row in by_weight if row not in used)][: max(NODES_SHOWN_MAX, len(used))]
    return budgets.of(sorted(shown))


def _shards(solution: Solution, nodes: Sequence[Budget]) -> list[model_pb2.Shard]:
    overheads = {budget.node_id: budget.overhead_bytes for budget in nodes}
    stages = solution.stage_seconds or [None] * len(solution.order)
    hops = solution.hop_seconds or [None] * len(solution.order)
    shards = []
    first = 0
    for rank, (candidate, end) in enumerate(zip(solution.order, solution.ends, strict=True)):
        parts, form = candidate.demand.parts(first, end), candidate.demand.form
        parts.overhead_bytes = overheads[candidate.node_id]
        parts.total_bytes = min(parts.total_bytes + parts.overhead_bytes, UINT64_MAX)
        shards.append(
            model_pb2.Shard(
                rank=rank,
                node_id=candidate.node_id,
                first_layer=first,
                end_layer=end,
                bytes=parts,
                stage_time=_duration(stages[rank]),
                hop_time=_duration(hops[rank]),
                weight_form=form.weight_form if form.is_changed else node_pb2.WEIGHT_FORM_UNSPECIFIED,
            )
        )
        first = end
    return shards


def _duration(seconds: float | None) -> duration_pb2.Duration | None:
    if seconds is None:
        return None
    duration = duration_pb2.Duration()
    # A node may say that it reads a byte a second.
    duration.FromNanoseconds(round(min(seconds, SECONDS_MAX) * 1e9))
    return duration


def _alternative(other: Solution, chosen: Solution, nodes: Sequence[Budget]) -> model_pb2.Alternative:
    return model_pb2.Alternative(
        shards=_shards(other, nodes),
        time_per_token=_duration(other.seconds_per_token),
        reason=_lack(other, chosen),
    )


def _lack(other: Solution, chosen: Solution) -> str:
    """What an alternative lacks against the solution chosen."""
    if other.seconds_per_token is not None and chosen.seconds_per_token is not None:
        slower_ms = (other.seconds_per_token - chosen.seconds_per_token) * 1000
        if slower_ms > 0:
            return f"{slower_ms:.1f} ms more for each token"
    more_nodes = len(other.order) - len(chosen.order)
    if more_nodes > 0:
        return f"{counted(more_nodes, 'node')} more"
    if more_nodes < 0:
        return f"{counted(-more_nodes, 'node')} fewer share the work"
    less = chosen.weight - other.weight
    return f"{size(less)} less weighted memory" if less > 0 else "nothing but its place in the order of node ids"


def _explanation(request: Request, chosen: Solution, nodes: Sequence[Budget]) -> str:
    """Why these nodes, in one sentence."""
    names = {budget.node_id: budget.name for budget in nodes}
    used = [names[candidate.node_id] for candidate in chosen.order]
    layers = counted(request.layers, "layer")
    computed = ", computed from config.json," if request.model.computed_from_config else ""
    where = f"{layers}{computed} on {listed(used)}"
    pressed = [budget.name for budget in nodes if _pressed(budget) and budget.name in used]
    weighed = (
        f"; {listed(pressed)} under WARNING counts {request.warning_tenths / WHOLE_TENTHS:g}"
        if pressed and len(used) > 1
        else ""
    )
    stored = [names[candidate.node_id] for candidate in chosen.order if candidate.demand.form.is_changed]
    held = f"; weights fit only as they are stored on {listed(stored)}, where that is slower" if stored else ""
    return f"{where} because {_because(request, chosen, len(used))}{weighed}{held}."


def _pressed(budget: Budget) -> bool:
    return budget.level == node_pb2.PRESSURE_LEVEL_WARNING


def _because(request: Request, chosen: Solution, used: int) -> str:
    match request.objective:
        case model_pb2.OBJECTIVE_LATENCY if chosen.seconds_per_token is not None:
            return f"that is the least predicted time for a token, {chosen.seconds_per_token * 1000:.1f} ms"
        case model_pb2.OBJECTIVE_THROUGHPUT if chosen.bottleneck_seconds is not None:
            return f"no rank then takes longer than {chosen.bottleneck_seconds * 1000:.1f} ms for a token"
        case model_pb2.OBJECTIVE_THROUGHPUT | model_pb2.OBJECTIVE_PROPORTIONAL:
            return "every node that can hold a layer shall work, in proportion to its weighted memory"
        case _:
            return _because_fewest(request, used)


def _because_fewest(request: Request, used: int) -> str:
    if used == 1:
        return "it can hold the whole model and no other node is needed"
    if used == request.nodes_min or used == len(request.wanted):
        return "that many nodes were asked for; shares follow weighted memory"
    fewer = "no single node" if used == 2 else f"no {used - 1} of the nodes"
    return f"{fewer} can hold the model; shares follow weighted memory"
