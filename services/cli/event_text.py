"""What a recorded event says to a person: its kind, whom it is about, and one line of substance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from services.cli import names
from services.cli.output import bytes_text, known_bytes_text
from ullage.v1 import event_pb2, model_pb2, node_pb2

Names = Mapping[str, str]

KINDS: Final = tuple(field.name for field in event_pb2.Fact.DESCRIPTOR.oneofs_by_name["fact"].fields)
UNKNOWN_KIND: Final = "unknown"


def line(event: event_pb2.RecordedEvent, node_names: Names) -> str:
    """One event on one line."""
    recorded_at = event.recorded_at.ToDatetime().strftime("%H:%M:%S.%f")[:-3]
    kind = event.fact.WhichOneof("fact") or UNKNOWN_KIND
    subject = names.named(node_names, node_id(event.fact)) or "-"
    return f"{event.sequence:>7}  {recorded_at}  {kind:<20}  {subject:<12}  {summary(event.fact, node_names)}".rstrip()


def node_id(fact: event_pb2.Fact) -> str:
    """The node a fact is about, or "" when it is about none or several."""
    kind = fact.WhichOneof("fact")
    body = None if kind is None else getattr(fact, kind)
    match body:
        case None:
            return ""
        case event_pb2.NodeAnnounced():
            return body.identity.node_id
        case event_pb2.RunnerAnnounced():
            return body.profile.node_id
        case event_pb2.LinkMeasured():
            return body.link.from_node_id
        case event_pb2.ShardStatusChanged():
            return body.status.node_id
        case _:
            return str(getattr(body, "node_id", ""))


def summary(fact: event_pb2.Fact, node_names: Names) -> str:
    """The substance of a fact in a few words."""
    kind = fact.WhichOneof("fact")
    if kind is None:
        return "a fact of a later release"
    write = _SUMMARIES.get(kind)
    return "" if write is None else write(getattr(fact, kind), node_names)


def _master_started(body: event_pb2.MasterStarted, _: Names) -> str:
    return f"ullage {body.ullage_version}, boot {body.boot_id[: names.SHORT_CHARACTERS]}"


def _node_announced(body: event_pb2.NodeAnnounced, _: Names) -> str:
    one = body.identity
    parts = [one.friendly_name, one.model, one.chip, one.os]
    return ", ".join(part for part in parts if part)


def _memory(sample: node_pb2.MemorySample) -> str:
    level = node_pb2.PressureLevel.Name(sample.pressure_level).removeprefix("PRESSURE_LEVEL_")
    text = f"{level}, {known_bytes_text(sample, 'balanced_available_bytes')} available"
    if node_pb2.MEMORY_FLAG_OVERRIDDEN in sample.flags:
        text += " as the operator says"
    return text


def _memory_sampled(body: event_pb2.MemorySampled, _: Names) -> str:
    return _memory(body.sample)


def _system_sampled(body: event_pb2.SystemSampled, _: Names) -> str:
    parts = [f"cpu {body.sample.cpu_pct:.0f} %"] if body.sample.HasField("cpu_pct") else []
    if body.sample.HasField("memory"):
        parts.append(_memory(body.sample.memory))
    return ", ".join(parts)


def _link_measured(body: event_pb2.LinkMeasured, node_names: Names) -> str:
    link = body.link
    to = names.named(node_names, link.to_node_id)
    if not link.reachable:
        return f"cannot reach {to}: {link.failure}"
    return f"reaches {to} in {link.latency.ToMicroseconds() / 1000:.1f} ms"


def _runner_announced(body: event_pb2.RunnerAnnounced, _: Names) -> str:
    profile = body.profile
    models = ", ".join(profile.model_ids) or "no models"
    return f"at {profile.address}, {profile.device}, {profile.threads} threads, {models}"


def _model_registered(body: event_pb2.ModelRegistered, _: Names) -> str:
    return f"{body.model.model_id}: {body.model.model_type}, {len(body.model.layers)} layers"


def _model_removed(body: event_pb2.ModelRemoved, _: Names) -> str:
    return body.model_id


def _instance_placed(body: event_pb2.InstancePlaced, node_names: Names) -> str:
    shares = ", ".join(
        f"{names.named(node_names, shard.node_id)} {shard.first_layer}-{shard.end_layer - 1}"
        for shard in body.placement.shards
    )
    return f"{body.instance_id}: {body.spec.model_id} on {shares}"


def _placement_refused(body: event_pb2.PlacementRefused, _: Names) -> str:
    reason = model_pb2.RefusalReason.Name(body.refusal.reason).removeprefix("REFUSAL_REASON_")
    return f"{body.spec.model_id}: {reason}"


def _shard_status_changed(body: event_pb2.ShardStatusChanged, _: Names) -> str:
    status = body.status
    text = f"{status.instance_id} rank {status.rank}: "
    text += model_pb2.ShardPhase.Name(status.phase).removeprefix("SHARD_PHASE_")
    if status.HasField("done_bytes") and status.total_bytes:
        text += f" {100 * status.done_bytes // status.total_bytes} %"
    if status.HasField("resident_bytes"):
        text += f", {bytes_text(status.resident_bytes)} resident"
    if status.HasField("over_grant_bytes"):
        text += f", {bytes_text(status.over_grant_bytes)} over its promise"
    if status.HasField("returned_bytes"):
        text += f", {bytes_text(status.returned_bytes)} given back"
    return f"{text}: {status.failure.message}" if status.failure.message else text


def _instance_released(body: event_pb2.InstanceReleased, _: Names) -> str:
    return f"{body.instance_id}: {body.reason}" if body.reason else body.instance_id


def _generation_started(body: event_pb2.GenerationStarted, _: Names) -> str:
    return f"{body.instance_id}: {body.prompt_tokens} tokens to read"


def _generation_finished(body: event_pb2.GenerationFinished, _: Names) -> str:
    return f"{body.instance_id}: {body.generated_tokens} tokens in {body.decode_seconds:.2f} s, {body.finish_reason}"


def _log_compacted(body: event_pb2.LogCompacted, _: Names) -> str:
    return f"{body.removed_events} samples less from {body.first_sequence} to {body.last_sequence}"


_SUMMARIES: Final[dict[str, Callable[[Any, Names], str]]] = {
    "master_started": _master_started,
    "node_announced": _node_announced,
    "memory_sampled": _memory_sampled,
    "system_sampled": _system_sampled,
    "link_measured": _link_measured,
    "runner_announced": _runner_announced,
    "model_registered": _model_registered,
    "model_removed": _model_removed,
    "instance_placed": _instance_placed,
    "placement_refused": _placement_refused,
    "shard_status_changed": _shard_status_changed,
    "instance_released": _instance_released,
    "generation_started": _generation_started,
    "generation_finished": _generation_finished,
    "log_compacted": _log_compacted,
}
