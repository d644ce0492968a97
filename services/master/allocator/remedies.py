"""What would turn a no into a yes, the least painful first.

Rules this module lives by:
- A remedy that names a number or a change of the request was tried: the decision made again with it is a yes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

from services.master.allocator.budget import Budget
from services.master.allocator.case import Case, Fit
from services.master.allocator.demand import UINT64_MAX, Load
from services.master.allocator.force import forcible
from services.master.allocator.naming import counted
from services.master.allocator.request import Request
from services.master.allocator.wording import size, size_at_least
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


def remedies(case: Case, reason: model_pb2.RefusalReason.ValueType, needed: int) -> Iterator[model_pb2.Remedy]:
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
    held = case.held(lambda shard, _: 0 if shard.shrinking else shard.held_bytes)
    largest = sorted(held, key=lambda instance_id: (-held[instance_id], instance_id))
    for instance_id in largest[:INSTANCES_ADVISED_MAX]:
        if case.asking(replace(case.request, replaced_instance_id=instance_id)).fit.holds:
            model_id = case.survey.instances[instance_id].spec.model_id
            text = f"Release {instance_id} of {model_id}, which holds {size(held[instance_id])}"
            yield model_pb2.Remedy(text=text)


def _more_bytes(case: Case, needed: int) -> Iterator[model_pb2.Remedy]:
    """For the roomiest nodes, how many bytes more on that node alone would do."""
    case = case.with_cut_off()
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
