"""Facts as short expressions."""

from __future__ import annotations

from collections.abc import Sequence

from ullage.v1 import event_pb2, model_pb2, node_pb2, telemetry_service_pb2

GIB = 1 << 30
MIB = 1 << 20


def memory_sampled(node_id: str = "a", available: int = 8 * GIB, total: int = 16 * GIB) -> event_pb2.Fact:
    sample = node_pb2.MemorySample(
        ram_total_bytes=total,
        ram_available_bytes=available,
        balanced_available_bytes=available,
        pressure_level=node_pb2.PRESSURE_LEVEL_NORMAL,
    )
    return event_pb2.Fact(memory_sampled=event_pb2.MemorySampled(node_id=node_id, sample=sample))


def system_sampled(node_id: str = "a", **fields: float) -> event_pb2.Fact:
    sample = node_pb2.SystemSample(**fields)  # type: ignore[arg-type]  # each test names fields of its own
    return event_pb2.Fact(system_sampled=event_pb2.SystemSampled(node_id=node_id, sample=sample))


def node_announced(node_id: str = "a", boot_id: str = "boot", friendly_name: str | None = None) -> event_pb2.Fact:
    identity = node_pb2.NodeIdentity(node_id=node_id, boot_id=boot_id, friendly_name=friendly_name)
    return event_pb2.Fact(node_announced=event_pb2.NodeAnnounced(identity=identity))


def node_removed(node_id: str = "a") -> event_pb2.Fact:
    return event_pb2.Fact(node_removed=event_pb2.NodeRemoved(node_id=node_id))


def runner_announced(node_id: str = "a", boot_id: str = "runner-boot") -> event_pb2.Fact:
    profile = node_pb2.RunnerProfile(node_id=node_id, boot_id=boot_id, address=f"{node_id}:50502")
    return event_pb2.Fact(runner_announced=event_pb2.RunnerAnnounced(profile=profile))


def link_measured(from_node_id: str = "a", to_node_id: str = "b") -> event_pb2.Fact:
    link = node_pb2.Link(from_node_id=from_node_id, to_node_id=to_node_id, reachable=True)
    return event_pb2.Fact(link_measured=event_pb2.LinkMeasured(link=link))


def model(model_id: str = "m", layers: int = 4, digest: str = "d1") -> model_pb2.Model:
    weight = model_pb2.Weight(stored_bytes=100 * MIB, parameters=50_000_000)
    return model_pb2.Model(
        model_id=model_id,
        model_type="llama",
        layers=[model_pb2.Layer(weight=weight, kv_elements_per_token=384) for _ in range(layers)],
        embedding=weight,
        head=model_pb2.Weight(stored_bytes=1152, parameters=576),
        tied_embedding=True,
        hidden_size=576,
        intermediate_size=1536,
        vocabulary_size=49152,
        attention_heads=9,
        kv_heads=3,
        kv_allocation_step_tokens=256,
        context_tokens_max=2048,
        digest=digest,
    )


def model_registered(model_id: str = "m", digest: str = "d1") -> event_pb2.Fact:
    return event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=model(model_id, digest=digest)))


def instance_placed(
    instance_id: str = "i", node_ids: Sequence[str] = ("a",), total_bytes: int = GIB, request_id: str = ""
) -> event_pb2.Fact:
    shards = [
        model_pb2.Shard(
            rank=rank,
            node_id=node_id,
            first_layer=rank,
            end_layer=rank + 1,
            bytes=model_pb2.ShardBytes(layers_bytes=total_bytes, total_bytes=total_bytes),
        )
        for rank, node_id in enumerate(node_ids)
    ]
    placed = event_pb2.InstancePlaced(
        instance_id=instance_id,
        spec=model_pb2.PlacementSpec(model_id="m", request_id=request_id),
        placement=model_pb2.Placement(shards=shards),
    )
    return event_pb2.Fact(instance_placed=placed)


def shard_status(
    phase: model_pb2.ShardPhase.ValueType,
    instance_id: str = "i",
    rank: int = 0,
    node_id: str = "a",
    resident_bytes: int | None = None,
    failure: str = "",
) -> event_pb2.Fact:
    status = model_pb2.ShardStatus(
        instance_id=instance_id, rank=rank, node_id=node_id, phase=phase, resident_bytes=resident_bytes
    )
    if failure:
        status.failure.message = failure
        status.failure.phase = model_pb2.SHARD_PHASE_LOADING
    return event_pb2.Fact(shard_status_changed=event_pb2.ShardStatusChanged(status=status))


def instance_released(instance_id: str = "i") -> event_pb2.Fact:
    return event_pb2.Fact(instance_released=event_pb2.InstanceReleased(instance_id=instance_id))


def unknown_kind() -> event_pb2.Fact:
    """A fact of a release to come: field 99, holding one byte."""
    return event_pb2.Fact.FromString(b"\x9a\x06\x01x")


def observations(*facts: event_pb2.Fact, first: int = 1) -> list[telemetry_service_pb2.Observation]:
    """Facts numbered by their source from `first` on."""
    return [
        telemetry_service_pb2.Observation(source_sequence=number, fact=fact)
        for number, fact in enumerate(facts, start=first)
    ]
