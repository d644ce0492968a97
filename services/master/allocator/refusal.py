"""A typed no with its proof: the numbers, every node, and what would turn it into a yes.

Rules this module lives by:
- The reason is the most telling one that is true, and its numbers show that it is.
- Every node is named, with its level, factor, bytes and what keeps it out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from services.master.allocator.budget import Budget, Budgets, View
from services.master.allocator.capacity import ROOM_BYTES_MAX
from services.master.allocator.case import Case
from services.master.allocator.demand import UINT64_MAX, least_bytes
from services.master.allocator.naming import counted, listed
from services.master.allocator.pool import roomiest
from services.master.allocator.problem import QUESTION_STEPS_MAX
from services.master.allocator.reach import unreached
from services.master.allocator.remedies import remedies
from services.master.allocator.survey import Ints
from services.master.allocator.wording import exclusion, node_line, size
from ullage.v1 import model_pb2

_UNPROVED: Final = "Not every order of its nodes could be tried: there may be one that holds it. Try with fewer nodes."


def refuse(case: Case) -> model_pb2.Refusal:
    """Why the case has no placement; for cases that have none."""
    reason = _reason(case)
    if reason == model_pb2.REFUSAL_REASON_NO_ELIGIBLE_NODES and case.with_cut_off().weighed:
        # Nor would it fit if all reached each other: what they lack is memory.
        case = case.with_cut_off()
        reason = _reason(case)
    needed, offered = needed_bytes(case), offered_bytes(case)
    advice = [*remedies(replace(case, quickly=True, steps_max=QUESTION_STEPS_MAX), reason, needed or 0)]
    lines = [_headline(case, reason, needed or 0, offered)]
    lines += [] if case.proved else [_UNPROVED]
    lines += [f"  {node_line(budget, case.request.layers)}" for budget in case.nodes]
    lines += ["What would help:", *(f"  {remedy.text}" for remedy in advice)] if advice else []
    return model_pb2.Refusal(
        reason=reason,
        message="\n".join(lines),
        needed_bytes=None if needed is None else min(needed, UINT64_MAX),
        offered_bytes=min(offered, UINT64_MAX),
        nodes=[budget.message() for budget in case.nodes],
        remedies=advice,
        retryable=_retryable(replace(case, steps_max=QUESTION_STEPS_MAX)),
        decided_at_sequence=case.survey.sequence,
    )


def needed_bytes(case: Case) -> int | None:
    """The least the model takes on any way over the nodes; None where no runner says how it would hold it."""
    demands = [budget.demand for budget in case.weighed or case.nodes if budget.demand is not None]
    return least_bytes(demands) if demands else None


def offered_bytes(case: Case) -> int:
    """What the nodes that may be used can give together, as many of them as the request allows."""
    rooms = np.sort(case.budgets.room_bytes[case.budgets.weighed])[::-1]
    return sum(rooms[: case.request.nodes_max].tolist())


def _reason(case: Case) -> model_pb2.RefusalReason.ValueType:
    """The first of the reasons that is true."""
    reasons: tuple[tuple[Callable[[Case], bool], model_pb2.RefusalReason.ValueType], ...] = (
        (lambda case: not len(case.budgets), model_pb2.REFUSAL_REASON_NO_NODES),
        (_no_path, model_pb2.REFUSAL_REASON_NO_PATH),
        (lambda case: not case.weighed, model_pb2.REFUSAL_REASON_NO_ELIGIBLE_NODES),
        (_too_few_nodes, model_pb2.REFUSAL_REASON_TOO_FEW_NODES),
        (_blocked, model_pb2.REFUSAL_REASON_BLOCKED_BY_PROMISES),
        (
            lambda case: (needed_bytes(case) or 0) > offered_bytes(case),
            model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY,
        ),
        (
            lambda case: not any(_holds_any_layer(each) for each in case.weighed),
            model_pb2.REFUSAL_REASON_LAYER_TOO_LARGE,
        ),
        (_endpoint_too_large, model_pb2.REFUSAL_REASON_ENDPOINT_TOO_LARGE),
    )
    return next((reason for holds, reason in reasons if holds(case)), model_pb2.REFUSAL_REASON_FRAGMENTED)


def _no_path(case: Case) -> bool:
    """It would fit if every node reached every other."""
    return bool(case.survey.blocked) and case.seen(replace(case.view, every_way=True)).fit.holds


def _too_few_nodes(case: Case) -> bool:
    """Even with all the memory in the world these nodes could not do what was asked."""
    return not case.fits_boundless()


def _blocked(case: Case) -> bool:
    """Without what is promised to others it would fit."""
    return any(budget.promised_bytes for budget in case.weighed) and case.seen(View(without_promises=True)).fit.holds


def _holds_any_layer(budget: Budget) -> bool:
    """The node has room for the model's largest layer."""
    demand = budget.demand
    return demand is not None and (budget.budget_bytes or 0) >= demand.working_bytes + demand.largest_layer_bytes


def _endpoint_too_large(case: Case) -> bool:
    """No node can be the first, or none the last; a node that could be both alone would have been taken."""
    rows = roomiest(case.budgets, case.budgets.weighed, case.budgets.room_bytes)
    candidates = case.budgets.candidates(rows.tolist(), case.budgets.room_bytes, timed=False)
    return not any(each.first_ends for each in candidates) or not any(each.last_starts for each in candidates)


def _headline(case: Case, reason: model_pb2.RefusalReason.ValueType, needed: int, offered: int) -> str:
    """What is refused and why, in a sentence with its numbers."""
    if reason == model_pb2.REFUSAL_REASON_NO_NODES:
        return "No node has been heard of: start `ullage node` on a machine, then see `ullage status`."
    request, load = case.request, case.request.load
    asked = f"{request.model.model_id} with {counted(load.context_tokens, 'token')} of context"
    if load.concurrent_sequences > 1:
        asked += f" for {load.concurrent_sequences} sequences"
    if request.model.computed_from_config:
        asked += ", computed from its config.json,"
    return f"{asked} {_because(case, reason, needed, offered)}."


def _because(case: Case, reason: model_pb2.RefusalReason.ValueType, needed: int, offered: int) -> str:
    weighed = counted(len(case.budgets.weighed), "node")
    if case.request.nodes_max is not None and case.request.nodes_max < len(case.budgets.weighed):
        weighed = f"the roomiest {case.request.nodes_max} of {weighed}"
    match reason:
        case model_pb2.REFUSAL_REASON_NO_ELIGIBLE_NODES:
            return f"cannot be placed: {_everyone(len(case.nodes))} left out"
        case model_pb2.REFUSAL_REASON_TOO_FEW_NODES:
            return f"cannot be placed: {_missing(case)}"
        case model_pb2.REFUSAL_REASON_NO_PATH:
            return f"would fit, but {unreached(case.seen(replace(case.view, every_way=True)).budgets)}"
        case model_pb2.REFUSAL_REASON_BLOCKED_BY_PROMISES:
            return f"needs {size(needed)} and would fit but for what is promised to {_holders(case)}"
        case model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY:
            return f"needs {size(needed)} and {weighed} can give {size(offered)}: {size(needed - offered)} short"
        case _:
            return f"needs {size(needed)} of the {size(offered)} of {weighed}, but {_pieces(case, reason)}"


def _everyone(nodes: int) -> str:
    return "the only node is" if nodes == 1 else f"every one of {nodes} nodes is"


def _missing(case: Case) -> str:
    """Which nodes the request misses."""
    weighed = {budget.node_id for budget in case.weighed}
    absent = [each for each in case.nodes if each.node_id in case.request.wanted - weighed]
    if absent:
        return " and ".join(f"{each.name} must get layers and is left out: {_why(each)}" for each in absent)
    if len(weighed) < case.request.nodes_min:
        return f"at least {case.request.nodes_min} nodes are asked for and {len(weighed)} can be used"
    return "the layers fixed leave others over, and no further node can be used for them"


def _why(budget: Budget) -> str:
    return exclusion(budget.exclusion)


def _pieces(case: Case, reason: model_pb2.RefusalReason.ValueType) -> str:
    """Why the bytes that are there do not hold the model."""
    demands = [budget.demand for budget in case.weighed if budget.demand is not None]
    most = size(max(budget.budget_bytes or 0 for budget in case.weighed))
    match reason:
        case model_pb2.REFUSAL_REASON_LAYER_TOO_LARGE:
            layer = min(each.working_bytes + each.largest_layer_bytes for each in demands)
            return f"its largest layer needs {size(layer)} on one node and none has more than {most}"
        case model_pb2.REFUSAL_REASON_ENDPOINT_TOO_LARGE:
            first = min(each.first_bytes + each.layer_sums[1] for each in demands)
            last = min(each.last_bytes + each.layer_sums[-1] - each.layer_sums[-2] for each in demands)
            return (
                f"its first layer with the embedding needs {size(first)}, its last with the head {size(last)}, "
                f"and no node has more than {most}"
            )
        case _:
            return "not in pieces that hold whole layers, under the constraints asked for"


def _holders(case: Case) -> str:
    """The instances that are promised what is missing, with how much."""
    promised = case.held(lambda shard, overridden: shard.held_bytes if overridden else shard.unsettled_bytes)
    return listed([f"{instance_id} ({size(held)})" for instance_id, held in sorted(promised.items())])


def _retryable(case: Case) -> bool:
    """The nodes as they are could hold it, or might, were their memory free: what is in the way may pass."""
    if not len(case.budgets):
        return True
    lifted = case.seen(View(lifted=True, with_cut_off=True))
    whole = lifted.fit_in(_whole_rooms(lifted.budgets))
    return whole.holds or not whole.proved


def _whole_rooms(budgets: Budgets) -> Ints:
    """The rooms of the nodes with nothing on them; without bounds where a size is not known."""
    total, limit = budgets.survey.ram_total, budgets.survey.device_limit
    rooms = np.where(total.known, total.bytes - budgets.survey.overhead_bytes, ROOM_BYTES_MAX)
    return np.maximum(0, np.where(limit.known, np.minimum(rooms, limit.bytes), rooms))
