"""What is asked for, with its defaults filled in, or what is wrong with it.

Rules this module lives by:
- What no memory could mend is found here, before a node is looked at; `force` does not lift it.
- Every complaint says what to ask for instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, isqrt
from typing import Final

from services.master.allocator.demand import Load
from services.master.allocator.naming import counted, listed
from services.master.state import State
from ullage.v1 import model_pb2

WHOLE_TENTHS: Final = 10

WARNING_TENTHS: Final = 6
"""The weight of a node under WARNING, in tenths, where nobody set another: work flows to healthier nodes."""

CONTEXT_TOKENS_DEFAULT: Final = 2048

CONTEXT_TOKENS_MAX: Final = 2**27
"""More than any model takes; keeps the bytes of a model whose own limit is unknown within what can be said."""

CONCURRENT_SEQUENCES_MAX: Final = 65_536

_ADMISSIONS: Final = frozenset(model_pb2.Admission.values())
_OBJECTIVES: Final = frozenset(model_pb2.Objective.values())
_PARALLELISMS: Final = frozenset(model_pb2.Parallelism.values())


@dataclass(frozen=True)
class Complaint:
    """Why a request cannot be answered with a placement, whatever the nodes have to give."""

    reason: model_pb2.RefusalReason.ValueType
    text: str


@dataclass(frozen=True)
class Request:
    """A request that makes sense for its model and the nodes there are."""

    model: model_pb2.Model
    load: Load
    admission: model_pb2.Admission.ValueType
    objective: model_pb2.Objective.ValueType
    nodes_min: int
    nodes_max: int | None
    required: frozenset[str]
    excluded: frozenset[str]
    layers_fixed: dict[str, int]
    """Only of nodes that get layers; one fixed at none is excluded."""
    include_unknown: bool
    replaced_instance_id: str
    warning_tenths: int = WARNING_TENTHS
    """The weight of a node under WARNING, in tenths."""
    tensor: bool = False
    """Every node shall have a part of every layer."""

    @property
    def layers(self) -> int:
        """How many layers are to be placed."""
        return len(self.model.layers)

    @property
    def wanted(self) -> frozenset[str]:
        """The nodes that must get layers."""
        return self.required | frozenset(self.layers_fixed)


def understand(state: State, spec: model_pb2.PlacementSpec) -> Request | Complaint:
    """The request in `spec`, or the first thing that is wrong with it."""
    model = state.models.get(spec.model_id)
    if model is None:
        return Complaint(
            model_pb2.REFUSAL_REASON_INVALID_REQUEST,
            f"no model is called {spec.model_id!r}: add it with `ullage models add`",
        )
    complaint = next(_complaints(state, spec, model), None)
    if complaint is not None:
        return complaint
    fixed = {each.node_id: each.layers for each in spec.fixed_layers}
    return Request(
        model=model,
        load=Load(
            context_tokens=_context_tokens(spec, model),
            concurrent_sequences=spec.concurrent_sequences if spec.HasField("concurrent_sequences") else 1,
            prompt_tokens=spec.prompt_tokens_hint,
        ),
        admission=spec.admission or model_pb2.ADMISSION_BALANCED,
        objective=spec.objective or model_pb2.OBJECTIVE_LATENCY,
        nodes_min=spec.min_nodes if spec.HasField("min_nodes") else 1,
        nodes_max=spec.max_nodes if spec.HasField("max_nodes") else None,
        required=frozenset(spec.require_node_ids),
        excluded=frozenset(spec.exclude_node_ids) | {node_id for node_id, layers in fixed.items() if not layers},
        layers_fixed={node_id: layers for node_id, layers in fixed.items() if layers},
        include_unknown=spec.include_unknown,
        replaced_instance_id=spec.replace_instance_id,
        warning_tenths=round(spec.warning_factor * WHOLE_TENTHS) if spec.HasField("warning_factor") else WARNING_TENTHS,
        tensor=spec.parallelism == model_pb2.PARALLELISM_TENSOR,
    )


def _context_tokens(spec: model_pb2.PlacementSpec, model: model_pb2.Model) -> int:
    if spec.HasField("context_tokens"):
        return spec.context_tokens
    return min(CONTEXT_TOKENS_DEFAULT, model.context_tokens_max or CONTEXT_TOKENS_DEFAULT)


def _complaints(state: State, spec: model_pb2.PlacementSpec, model: model_pb2.Model) -> Iterator[Complaint]:
    """Everything that is wrong, in the order in which it should be mended; made as far as it is asked for."""
    for reason, texts in (
        (model_pb2.REFUSAL_REASON_INVALID_REQUEST, _invalid(state, spec)),
        (model_pb2.REFUSAL_REASON_MODEL_INCOMPLETE, _incomplete(model)),
        (model_pb2.REFUSAL_REASON_CONTEXT_TOO_LONG, _too_long(spec, model)),
        (model_pb2.REFUSAL_REASON_TENSOR_INDIVISIBLE, _indivisible(spec, model)),
        (model_pb2.REFUSAL_REASON_UNKNOWN_NODE, _unknown_nodes(state, spec)),
        (model_pb2.REFUSAL_REASON_CONTRADICTORY_CONSTRAINTS, _contradictions(spec, len(model.layers))),
    ):
        yield from (Complaint(reason, text) for text in texts)


def _invalid(state: State, spec: model_pb2.PlacementSpec) -> Iterator[str]:
    if spec.admission not in _ADMISSIONS or spec.objective not in _OBJECTIVES:
        yield "this release does not know the admission or the objective asked for: leave them out for the default"
    if spec.parallelism not in _PARALLELISMS:
        yield "this release does not know the parallelism asked for: leave it out for a pipeline"
    if spec.HasField("context_tokens") and not spec.context_tokens:
        yield "a context of 0 tokens holds nothing: ask for at least 1, or leave it out for 2048"
    if spec.HasField("concurrent_sequences") and not 0 < spec.concurrent_sequences <= CONCURRENT_SEQUENCES_MAX:
        yield f"concurrent_sequences is {spec.concurrent_sequences}: ask for 1 to {CONCURRENT_SEQUENCES_MAX}"
    # A comparison that is no number's is false, so that what is not a number is refused as well.
    if spec.HasField("warning_factor") and not 0.05 < spec.warning_factor <= 1:
        yield f"warning_factor is {spec.warning_factor:g}: ask for 0.1 to 1, in tenths"
    if spec.replace_instance_id and spec.replace_instance_id not in state.instances:
        yield f"no instance is called {spec.replace_instance_id!r}: it cannot be replaced"


def _incomplete(model: model_pb2.Model) -> Iterator[str]:
    again = "add the model again with `ullage models add`"
    if not model.layers:
        yield f"{model.model_id} is registered without layers: {again}"
    for index, layer in enumerate(model.layers):
        if not layer.weight.stored_bytes or not layer.weight.parameters:
            yield f"layer {index} of {model.model_id} is registered without its weight: {again}"
    if not model.HasField("embedding") or not model.HasField("head"):
        yield f"{model.model_id} is registered without the weight of its embedding or head: {again}"


def _too_long(spec: model_pb2.PlacementSpec, model: model_pb2.Model) -> Iterator[str]:
    longest = model.context_tokens_max or CONTEXT_TOKENS_MAX
    if spec.context_tokens > longest:
        yield (
            f"{model.model_id} takes at most {longest} tokens of context and {spec.context_tokens} were asked for: "
            f"ask for {longest} or less; force does not lift this"
        )
    if spec.prompt_tokens_hint > _context_tokens(spec, model):
        yield (
            f"prompts of {spec.prompt_tokens_hint} tokens do not fit in a context of {_context_tokens(spec, model)}: "
            "ask for a longer context"
        )


def _indivisible(spec: model_pb2.PlacementSpec, model: model_pb2.Model) -> Iterator[str]:
    if spec.parallelism != model_pb2.PARALLELISM_TENSOR:
        return
    low = max(2, spec.min_nodes, len(spec.require_node_ids))
    allowed = tensor_sizes(model)
    if not any(size >= low and (not spec.HasField("max_nodes") or size <= spec.max_nodes) for size in allowed):
        counts = f"of {listed(list(map(str, allowed)))} nodes" if allowed else "of no number of nodes"
        heads = f"{model.kv_heads} heads of keys and values and {model.hidden_size} numbers for each token"
        yield f"{model.model_id} has {heads}, which divide among groups {counts}: ask for such, or for a pipeline"
    if spec.fixed_layers:
        yield "in a tensor group every node has a part of every layer: fix no layers, or ask for a pipeline"


def tensor_sizes(model: model_pb2.Model) -> list[int]:
    """Among how many nodes each layer can be split evenly: the heads and the width must divide."""
    both = gcd(model.kv_heads, model.hidden_size)
    # Each divisor up to the root has its partner above it: a number that makes no sense is soon gone through as well.
    low = [size for size in range(1, isqrt(both) + 1) if both % size == 0] if model.kv_heads else []
    return sorted({*low, *(both // size for size in low)} - {1})


def _unknown_nodes(state: State, spec: model_pb2.PlacementSpec) -> Iterator[str]:
    named = [*spec.require_node_ids, *spec.exclude_node_ids, *(each.node_id for each in spec.fixed_layers)]
    known = listed(sorted(state.nodes)) or "none"
    for node_id in named:
        if node_id not in state.nodes:
            yield f"no node is called {node_id!r}; known are: {known}"


def _contradictions(spec: model_pb2.PlacementSpec, layers: int) -> Iterator[str]:
    yield from _contradictory_nodes(spec)
    fixed = {each.node_id: each.layers for each in spec.fixed_layers}
    wanted = set(spec.require_node_ids) | {node_id for node_id, count in fixed.items() if count}
    if sum(fixed.values()) > layers:
        yield f"{sum(fixed.values())} layers are fixed and the model has {layers}: fix fewer"
    if spec.HasField("max_nodes") and spec.max_nodes < max(1, spec.min_nodes, len(wanted)):
        yield f"at most {spec.max_nodes} nodes, but at least {max(1, spec.min_nodes, len(wanted))} are asked for"
    least = max(spec.min_nodes, len(wanted))
    if least > layers:
        yield f"{counted(least, 'node')} are asked for and the model has {counted(layers, 'layer')}: ask for fewer"
    left = layers - sum(fixed.values())
    further = least - len([count for count in fixed.values() if count])
    if left < further:
        yield (
            f"{counted(least, 'node')} are asked for, and the layers that are fixed leave {counted(left, 'layer')} for "
            f"{counted(further, 'node')} of them: fix fewer layers, or ask for fewer nodes"
        )
    if left and spec.HasField("max_nodes") and spec.max_nodes == len([count for count in fixed.values() if count]):
        yield f"every one of at most {spec.max_nodes} nodes has its layers fixed, and {left} layers are left over"


def _contradictory_nodes(spec: model_pb2.PlacementSpec) -> Iterator[str]:
    fixed = [(each.node_id, each.layers) for each in spec.fixed_layers]
    node_ids = [node_id for node_id, _ in fixed]
    for node_id in node_ids:
        if node_ids.count(node_id) > 1:
            yield f"node {node_id} has its layers fixed twice: fix them once"
    wanted = set(spec.require_node_ids) | {node_id for node_id, layers in fixed if layers}
    for node_id in sorted(wanted & set(spec.exclude_node_ids)):
        yield f"node {node_id} is required and excluded: choose one"
    for node_id in sorted(set(spec.require_node_ids) & {node_id for node_id, layers in fixed if not layers}):
        yield f"node {node_id} is required and fixed at 0 layers: choose one"
