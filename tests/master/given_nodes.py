"""States to place on, written down as nodes and models: what tests of the allocator share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.master.state import State, apply
from ullage.v1 import event_pb2, model_pb2, node_pb2

GB = 10**9
GIB = 2**30
NORMAL = node_pb2.PRESSURE_LEVEL_NORMAL
WARNING = node_pb2.PRESSURE_LEVEL_WARNING
CRITICAL = node_pb2.PRESSURE_LEVEL_CRITICAL
UNKNOWN = node_pb2.PRESSURE_LEVEL_UNKNOWN

STORED = node_pb2.WEIGHT_FORM_AS_STORED
FLOAT32 = node_pb2.WEIGHT_FORM_FLOAT32


@dataclass(frozen=True)
class Node:
    """A node as its probe and runner describe it. None is what they do not say."""

    node_id: str
    available: float | None
    level: node_pb2.PressureLevel.ValueType = NORMAL
    ram: float | None = None
    overhead: int = 0
    device_limit: float | None = None
    speed: float | None = None
    form: node_pb2.WeightForm.ValueType = STORED
    can_hold_as_stored: bool = False
    element_bytes: int = 2
    device: str = "metal"
    device_name: str | None = None
    runner: bool = True
    models: tuple[str, ...] = ("m",)
    name: str = ""
    read: bool = True
    overridden: bool = False


def whole(amount: float | None) -> int | None:
    """Bytes as the protos want them."""
    return None if amount is None else round(amount)


def sample(node: Node) -> node_pb2.MemorySample:
    """The reading of a node: the same figure under each estimator."""
    return node_pb2.MemorySample(
        ram_total_bytes=whole(node.ram),
        strict_available_bytes=whole(node.available),
        balanced_available_bytes=whole(node.available),
        ceiling_available_bytes=whole(node.available),
        device_limit_bytes=whole(node.device_limit),
        pressure_level=node.level,
        flags=[node_pb2.MEMORY_FLAG_OVERRIDDEN] if node.overridden else [],
    )


def profile(node: Node) -> node_pb2.RunnerProfile:
    """What the node's runner says when it starts."""
    return node_pb2.RunnerProfile(
        node_id=node.node_id,
        boot_id="boot",
        address=f"{node.node_id}:50502",
        device=node.device,
        device_name=node.device_name,
        weight_form=node.form,
        can_hold_as_stored=node.can_hold_as_stored,
        compute_element_bytes=node.element_bytes,
        shard_overhead_bytes=node.overhead,
        decode_bytes_per_second=whole(node.speed),
        model_ids=node.models,
    )


def facts_of(node: Node) -> list[event_pb2.Fact]:
    """What the log holds of a node that announced itself once."""
    identity = node_pb2.NodeIdentity(node_id=node.node_id, boot_id="boot", friendly_name=node.name or None)
    facts = [event_pb2.Fact(node_announced=event_pb2.NodeAnnounced(identity=identity))]
    if node.runner:
        facts.append(event_pb2.Fact(runner_announced=event_pb2.RunnerAnnounced(profile=profile(node))))
    if node.read:
        reading = event_pb2.MemorySampled(node_id=node.node_id, sample=sample(node))
        facts.append(event_pb2.Fact(memory_sampled=reading))
    return facts


def even(total: float, layers: int) -> list[int]:
    """The bytes of equal layers, `total` together but for what does not divide."""
    return [int(total) // layers] * layers


def model(layers: Sequence[int], *, embedding: int = 0, head: int = 0, kv: int = 0, **shape: Any) -> model_pb2.Model:
    """A model of layers with these bytes, each stored and as numbers; `kv` elements for each token and layer."""
    shape.setdefault("context_tokens_max", 131_072)
    return model_pb2.Model(
        model_id="m",
        layers=[
            model_pb2.Layer(weight=model_pb2.Weight(stored_bytes=each, parameters=each), kv_elements_per_token=kv)
            for each in layers
        ],
        embedding=model_pb2.Weight(stored_bytes=embedding, parameters=embedding),
        head=model_pb2.Weight(stored_bytes=head, parameters=head),
        **shape,
    )


def add(state: State, *facts: event_pb2.Fact) -> None:
    """Let `facts` happen."""
    for fact in facts:
        apply(state, event_pb2.RecordedEvent(sequence=state.sequence + 1, fact=fact))


def state_of(nodes: Sequence[Node], shape: model_pb2.Model | None = None) -> State:
    """The state in which these nodes have announced themselves, in this order, and the model is registered."""
    state = State()
    add(state, *(fact for node in nodes for fact in facts_of(node)))
    if shape is not None:
        add(state, event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=shape)))
    return state


def spec(**fields: Any) -> model_pb2.PlacementSpec:
    """A request for the model, with a context of one token unless said otherwise."""
    fields.setdefault("model_id", "m")
    fields.setdefault("context_tokens", 1)
    return model_pb2.PlacementSpec(**fields)


def placed(instance_id: str, decision: model_pb2.Placement, asked: model_pb2.PlacementSpec) -> event_pb2.Fact:
    """The fact that records a decision."""
    return event_pb2.Fact(
        instance_placed=event_pb2.InstancePlaced(instance_id=instance_id, spec=asked, placement=decision)
    )


def layers_by_node(decision: model_pb2.Placement) -> dict[str, int]:
    """How many layers each node that is used got."""
    return {shard.node_id: shard.end_layer - shard.first_layer for shard in decision.shards}
