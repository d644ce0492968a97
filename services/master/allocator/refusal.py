"""A typed no with its proof: the numbers, every node, and what would turn it into a yes.

Rules this module lives by:
- The reason is the most telling one that is true, and its numbers show that it is.
- Every node is named, with its level, factor, bytes and what keeps it out.
- A remedy that names a number or a change of the request was tried: the decision made again with it is a yes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from services.master.allocator.budget import Budget, Budgets, View
from services.master.allocator.capacity import ROOM_BYTES_MAX
from services.master.allocator.case import Case, Fit
from services.master.allocator.demand import UINT64_MAX, Load, least_bytes
from services.master.allocator.force import forcible
from services.master.allocator.naming import counted, listed
from services.master.allocator.pool import roomiest
from services.master.allocator.problem import QUESTION_STEPS_MAX
from services.master.allocator.reach import unreached
from services.master.allocator.request import Request
from services.master.allocator.survey import Held, Ints
from services.master.allocator.wording import exclusion, node_line, size, size_at_least
from ullage.v1 import model_pb2

NODES_ADVISED_MAX: Final = 2
"""For how many nodes it is said how many bytes more would do, of twice as many that are looked at."""

INSTANCES_ADVISED_MAX: Final = 3

LEFT_OUT_ADVISED_MAX: Final = 8
"""For how many of the nodes left out it is said what would bring them in."""

SEARCH_STEPS: Final = 4096
"""How finely a remedy is searched for: one part in this many of what the model needs."""

_REMEDIABLE: Final = frozenset(
    {
        model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY,
        model_pb2.REFUSAL_REASON_FRAGMENTED,
        model_pb2.REFUSAL_REASON_LAYER_TOO_LARGE,
        model_pb2.REFUSAL_REASON_ENDPOINT_TOO_LARGE,
        model_pb2.REFUSAL_REASON_BLOCKED_BY_PROMISES,
        # With more room, or less to hold, one of the nodes that do not reach each other may do alone.
        model_pb2.REFUSAL_REASON_NO_PATH,
    }
)
"""Reasons that more bytes or a smaller request can mend."""

_UNPROVED: Final = "Not every order of its nodes could be tried: there may be one that holds it. Try with fewer nodes."

_OR_INCLUDE: Final = ", or include unknown nodes"

_LEFT_OUT_REMEDIES: Final[dict[model_pb2.Exclusion.ValueType, str]] = {
    model_pb2.EXCLUSION_CRITICAL: "Relieve the memory of {name}",
    model_pb2.EXCLUSION_UNKNOWN_LEVEL: "Find out why {name} cannot read its pressure" + _OR_INCLUDE,
    model_pb2.EXCLUSION_NO_MEMORY_READING: "Start a probe on {name}" + _OR_INCLUDE,
    model_pb2.EXCLUSION_STALE: "Bring {name} back, or wait until it is heard",
    model_pb2.EXCLUSION_NO_RUNNER: "Start a runner on {name}",
    model_pb2.EXCLUSION_MODEL_ABSENT: "Run `ullage models add` on {name}",
}


class Found(NamedTuple):
    """Where what does not fit and what does meet."""

    amount: int
    """The one that fits."""
    proved: bool
    """The one beside it does not, and not only was no way found."""


def refuse(case: Case) -> model_pb2.Refusal:
    """Why the case has no placement; for cases that have none."""
    reason = _reason(case)
    if reason == model_pb2.REFUSAL_REASON_NO_ELIGIBLE_NODES and _with_cut_off(case).weighed:
        # Nor would it fit if all reached each other: what they lack is memory.
        case = _with_cut_off(case)
        reason = _reason(case)
    needed, offered = needed_bytes(case), offered_bytes(case)
    remedies = [*_remedies(replace(case, quickly=True, steps_max=QUESTION_STEPS_MAX), reason, needed or 0)]
    lines = [_headline(case, reason, needed or 0, offered)]
    lines += [] if case.proved else [_UNPROVED]
    lines += [f"  {node_line(budget, case.request.layers)}" for budget in case.nodes]
    lines += ["What would help:", *(f"  {remedy.text}" for remedy in remedies)] if remedies else []
    return model_pb2.Refusal(
        reason=reason,
        message="\n".join(lines),
        needed_bytes=None if needed is None else min(needed, UINT64_MAX),
        offered_bytes=min(offered, UINT64_MAX),
        nodes=[budget.message() for budget in case.nodes],
        remedies=remedies,
        retryable=_retryable(replace(case, steps_max=QUESTION_STEPS_MAX)),
        decided_at_sequence=case.survey.sequence,
    )


def _with_cut_off(case: Case) -> Case:
    """The case with the nodes that no others reach among those weighed, for where rooms may be others than now."""
    return case.seen(replace(case.view, with_cut_off=True))


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


def _held(case: Case, part: Callable[[Held, bool], int]) -> dict[str, int]:
    """What each instance but the replaced one holds of the nodes that may be used.

    `part` is what counts of a shard, told whether its node's figures are an operator's.
    """
    found: dict[str, int] = {}
    weighed = set(case.budgets.weighed.tolist())
    for row in sorted(weighed & case.survey.shards.keys()):
        for shard in case.survey.shards[row]:
            held = part(shard, bool(case.survey.overridden[row]))
            if held and shard.instance_id != case.request.replaced_instance_id:
                found[shard.instance_id] = found.get(shard.instance_id, 0) + held
    return found


def _holders(case: Case) -> str:
    """The instances that are promised what is missing, with how much."""
    promised = _held(case, lambda shard, overridden: shard.held_bytes if overridden else shard.unsettled_bytes)
    return listed([f"{instance_id} ({size(held)})" for instance_id, held in sorted(promised.items())])


def _remedies(case: Case, reason: model_pb2.RefusalReason.ValueType, needed: int) -> Iterator[model_pb2.Remedy]:
    """What would make it fit, the least painful first."""
    if reason in _REMEDIABLE:
        yield from _releases(case)
        yield from _more_bytes(case, needed)
        yield from _smaller_requests(case)
    if reason not in _REMEDIABLE or reason == model_pb2.REFUSAL_REASON_NO_PATH:
        yield from _left_out(case)
    yield from _wider_requests(case)
    if reason != model_pb2.REFUSAL_REASON_NO_PATH and forcible(case):
        yield model_pb2.Remedy(text="Force it, and risk swapping or a killed process", force=True)


def _releases(case: Case) -> Iterator[model_pb2.Remedy]:
    if case.request.replaced_instance_id:
        return
    held = _held(case, lambda shard, _: 0 if shard.shrinking else shard.held_bytes)
    largest = sorted(held, key=lambda instance_id: (-held[instance_id], instance_id))
    for instance_id in largest[:INSTANCES_ADVISED_MAX]:
        if case.asking(replace(case.request, replaced_instance_id=instance_id)).fit.holds:
            model_id = case.survey.instances[instance_id].spec.model_id
            text = f"Release {instance_id} of {model_id}, which holds {size(held[instance_id])}"
            yield model_pb2.Remedy(text=text)


def _more_bytes(case: Case, needed: int) -> Iterator[model_pb2.Remedy]:
    """For the roomiest nodes, how many bytes more on that node alone would do."""
    case = _with_cut_off(case)
    roomiest = sorted(case.weighed, key=lambda each: (-(each.budget_bytes or 0), each.node_id))
    grain, advised = max(1, needed // SEARCH_STEPS), 0
    for budget in roomiest[: 2 * NODES_ADVISED_MAX]:
        found = _grains_on(case, budget, grain)
        if found is None or advised == NODES_ADVISED_MAX:
            continue
        advised += 1
        more = found.amount * grain
        # What an operator lets a node give stays what it is, however much is freed there.
        name, amount = budget.name, size_at_least(more)
        text = f"Raise --memory on {name} by {amount}" if budget.overridden else f"Free {amount} on {name}"
        text += "" if found.proved else "; less may do"
        yield model_pb2.Remedy(text=text, node_id=budget.node_id, more_bytes=more)


def _grains_on(case: Case, budget: Budget, grain: int) -> Found | None:
    """How many grains more on this node would do; None where it does not have as much to free."""
    row = case.budgets.row(budget.node_id)
    most = min(2 * SEARCH_STEPS, UINT64_MAX // grain)
    if budget.ram_total_bytes is not None:
        most = min(most, max(0, budget.ram_total_bytes - (budget.available_bytes or 0)) // grain)
    if not most or not case.fit_with(row, most * grain).holds:
        return None
    return _least(most, lambda count: case.fit_with(row, count * grain))


def _smaller_requests(case: Case) -> Iterator[model_pb2.Remedy]:
    request, load = case.request, case.request.load
    step = max(1, request.model.kv_allocation_step_tokens)

    def with_context(steps: int) -> Fit:
        return _fit_load(case, Load(steps * step, load.concurrent_sequences))

    found = _most((load.context_tokens - 1) // step, with_context)
    if found is not None:
        tokens = found.amount * step
        more = "" if found.proved else "; a longer one may do"
        text = f"Ask for a context of {counted(tokens, 'token')} or less{more}"
        yield model_pb2.Remedy(text=text, context_tokens=tokens)
    found = _most(load.concurrent_sequences - 1, lambda count: _fit_load(case, Load(load.context_tokens, count)))
    if found is not None:
        text = f"Ask for {counted(found.amount, 'sequence')} at once" + ("" if found.proved else "; more may do")
        yield model_pb2.Remedy(text=text, concurrent_sequences=found.amount)


def _fit_load(case: Case, load: Load) -> Fit:
    return case.asking(replace(case.request, load=load)).fit


def _wider_requests(case: Case) -> Iterator[model_pb2.Remedy]:
    request = case.request
    for text, wider in _without_constraints(request):
        if case.asking(wider).fit.holds:
            yield model_pb2.Remedy(text=text)
    if _any_unknown(case) and case.asking(replace(request, include_unknown=True)).fit.holds:
        yield model_pb2.Remedy(text="Include nodes whose level or memory is unknown, at your own risk")
    if (
        request.admission != model_pb2.ADMISSION_CEILING
        and case.asking(replace(request, admission=model_pb2.ADMISSION_CEILING)).fit.holds
    ):
        yield model_pb2.Remedy(text="Ask for the admission CEILING, which trusts the most hopeful estimate")


def _without_constraints(request: Request) -> Iterator[tuple[str, Request]]:
    """The request without one of the constraints it makes, and what that asks for, for each of them."""
    if request.nodes_max is not None:
        yield f"Allow more than {counted(request.nodes_max, 'node')}", replace(request, nodes_max=None)
    if request.nodes_min > 1:
        yield f"Ask for fewer than {counted(request.nodes_min, 'node')}", replace(request, nodes_min=1)
    if request.required:
        yield "Require no node by name", replace(request, required=frozenset())
    if request.layers_fixed:
        yield "Fix no layers", replace(request, layers_fixed={})
    if request.excluded:
        yield "Exclude no node", replace(request, excluded=frozenset())


def _any_unknown(case: Case) -> bool:
    """Some node is left out because something of it is unknown."""
    unknown = {model_pb2.EXCLUSION_UNKNOWN_LEVEL, model_pb2.EXCLUSION_NO_MEMORY_READING}
    return any(budget.left_out in unknown for budget in case.nodes)


def _left_out(case: Case) -> Iterator[model_pb2.Remedy]:
    mendable = [budget for budget in case.nodes if budget.left_out in _LEFT_OUT_REMEDIES]
    for budget in mendable[:LEFT_OUT_ADVISED_MAX]:
        text = _LEFT_OUT_REMEDIES[budget.left_out or model_pb2.EXCLUSION_UNSPECIFIED]
        if case.request.include_unknown:
            text = text.removesuffix(_OR_INCLUDE)
        yield model_pb2.Remedy(text=text.format(name=budget.name), node_id=budget.node_id)


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


def _least(most: int, fit: Callable[[int], Fit]) -> Found | None:
    """The least count from 1 to `most` that fits, if more than that does too; None for none."""
    counts = range(1, most + 1)
    place = bisect_left(counts, True, key=lambda count: fit(count).holds)  # noqa: FBT003 - the first yes
    if place == len(counts):
        return None
    return Found(counts[place], proved=place == 0 or fit(counts[place - 1]).proved)


def _most(most: int, fit: Callable[[int], Fit]) -> Found | None:
    """The greatest count from 1 to `most` that fits, if less than that does too; None for none."""
    counts = range(1, most + 1)
    place = bisect_left(counts, True, key=lambda count: not fit(count).holds)  # noqa: FBT003 - the first no
    if not place:
        return None
    return Found(counts[place - 1], proved=place == len(counts) or fit(counts[place]).proved)
