"""The cluster as the log says it is. `apply` alone decides what a fact means.

Rules this module lives by:
- `apply` is deterministic and total: no clock, no randomness, no I/O; a fact of an unknown kind is counted.
- It changes the State it is given, in place, at a cost that does not grow with the number of nodes: copying
  would make every event pay for every node. Whoever else holds the State only reads it.
- Liveness is not here: whether a node is heard is known to the running master alone, and never replayed.
- A promise is a reservation, and the same bytes are never counted twice: see `ShardRecord.unsettled_bytes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ullage.v1 import event_pb2, model_pb2, node_pb2

MEMORY_SAMPLED: Final = event_pb2.Fact.MEMORY_SAMPLED_FIELD_NUMBER

GONE_PHASES = frozenset({model_pb2.SHARD_PHASE_FAILED, model_pb2.SHARD_PHASE_UNLOADED})
"""Phases in which a shard's process is gone, and its memory with it."""


@dataclass(slots=True)
class ShardRecord:
    """A shard of an instance: what it was promised, and what its runner last said of it."""

    shard: model_pb2.Shard
    status: model_pb2.ShardStatus
    resident_bytes: int = 0
    seen_bytes: int = 0
    """Resident bytes reported before the node's latest memory sample arrived."""
    settled_bytes: int = 0
    """Resident bytes that the latest sample surely shows as taken: reported before the one before it.

    Probe and runner are two processes: a sample may be read before a shard grew and arrive after it said so.
    """
    shrinking: bool = False
    """Its instance is released or failed: it will take nothing more, and what it holds it gives back."""

    @property
    def gone(self) -> bool:
        """No process holds the shard any more."""
        return self.status.phase in GONE_PHASES

    @property
    def unsettled_bytes(self) -> int:
        """Bytes that it is promised, or has not given back, and the latest memory sample still shows as available."""
        if self.gone:
            return 0
        due = self.resident_bytes if self.shrinking else self.shard.bytes.total_bytes
        return max(0, due - self.settled_bytes)

    @property
    def held_bytes(self) -> int:
        """All the shard may hold: for nodes whose available figure is an operator's and never sinks."""
        if self.gone:
            return 0
        return self.resident_bytes if self.shrinking else max(self.shard.bytes.total_bytes, self.resident_bytes)


@dataclass(slots=True)
class NodeRecord:
    """A node: who it is, what it last read of itself, its runner, and the shards it holds."""

    identity: node_pb2.NodeIdentity
    memory: node_pb2.MemorySample | None = None
    system: node_pb2.SystemSample | None = None
    runner: node_pb2.RunnerProfile | None = None
    links: dict[str, node_pb2.Link] = field(default_factory=dict)
    shards: dict[tuple[str, int], ShardRecord] = field(default_factory=dict)
    """By instance and rank; only those whose process may still be there."""
    last_sequence: int = 0
    changed_at: int = 0
    """The sequence at which it, or a shard on it, last changed: readers that keep a copy compare it."""

    @property
    def overridden(self) -> bool:
        """Its available figures are an operator's, which do not sink while shards load."""
        return self.memory is not None and node_pb2.MEMORY_FLAG_OVERRIDDEN in self.memory.flags

    @property
    def promised_bytes(self) -> int:
        """What must be subtracted from the latest available figure for what is promised already."""
        if self.overridden:
            return sum(shard.held_bytes for shard in self.shards.values())
        return sum(shard.unsettled_bytes for shard in self.shards.values())


@dataclass(slots=True)
class InstanceRecord:
    """A placed model with a life."""

    instance_id: str
    spec: model_pb2.PlacementSpec
    placement: model_pb2.Placement
    model: model_pb2.Model
    silent_node_ids: tuple[str, ...]
    shards: list[ShardRecord]
    placed_at_sequence: int
    rules_version: int | None = None
    """The allocator's rules it was decided by; None where the decision does not say."""
    released: bool = False
    failure: str = ""

    @property
    def state(self) -> model_pb2.InstanceState.ValueType:
        """Where the instance is in its life, from what its shards say."""
        if self.released:
            everyone_gone = all(shard.gone for shard in self.shards)
            return model_pb2.INSTANCE_STATE_RELEASED if everyone_gone else model_pb2.INSTANCE_STATE_RELEASING
        if self.failure:
            return model_pb2.INSTANCE_STATE_FAILED
        phases = {shard.status.phase for shard in self.shards}
        if phases == {model_pb2.SHARD_PHASE_RUNNING}:
            return model_pb2.INSTANCE_STATE_RUNNING
        if phases == {model_pb2.SHARD_PHASE_ASSIGNED}:
            return model_pb2.INSTANCE_STATE_PLACED
        return model_pb2.INSTANCE_STATE_LOADING

    @property
    def wanted(self) -> bool:
        """Its shards shall run: neither released nor failed."""
        return not self.released and not self.failure


@dataclass(slots=True)
class State:
    """Everything the log says, at `sequence`."""

    sequence: int = 0
    recorded_at_ns: int = 0
    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    models: dict[str, model_pb2.Model] = field(default_factory=dict)
    instances: dict[str, InstanceRecord] = field(default_factory=dict)
    requests: dict[str, str] = field(default_factory=dict)
    """The instance each request_id was answered with."""
    unapplied_events: int = 0
    membership_changed_at: int = 0
    """The sequence at which a node last came or went."""
    links_changed_at: int = 0
    """The sequence at which a link was last measured."""


def apply(state: State, event: event_pb2.RecordedEvent) -> None:
    """Make `state` what it is after `event`, which is the one that follows it."""
    apply_fact(state, event.sequence, event.recorded_at.ToNanoseconds(), event.fact)


def apply_fact(  # noqa: C901, PLR0912, PLR0915 - an arm for each fact
    state: State, sequence: int, recorded_at_ns: int, fact: event_pb2.Fact
) -> None:
    """`apply`, for whoever has an event in its parts: a replay need not build what it would take apart again."""
    state.sequence = sequence
    state.recorded_at_ns = recorded_at_ns
    match fact.WhichOneof("fact"):
        case "memory_sampled":
            _memory_sampled(state, fact.memory_sampled)
        case "system_sampled":
            _system_sampled(state, fact.system_sampled)
        case "shard_status_changed":
            _shard_status_changed(state, fact.shard_status_changed.status)
        case "node_announced":
            _node(state, fact.node_announced.identity.node_id).identity = fact.node_announced.identity
        case "runner_announced":
            _runner_announced(state, fact.runner_announced.profile)
        case "link_measured":
            _link_measured(state, fact.link_measured.link)
        case "node_removed":
            state.nodes.pop(fact.node_removed.node_id, None)
            state.membership_changed_at = sequence
        case "model_registered":
            state.models[fact.model_registered.model.model_id] = fact.model_registered.model
        case "model_removed":
            state.models.pop(fact.model_removed.model_id, None)
        case "instance_placed":
            _instance_placed(state, sequence, fact.instance_placed)
        case "instance_released":
            _instance_released(state, fact.instance_released)
        case (
            "master_started"
            | "node_suspected"
            | "node_lost"
            | "placement_refused"
            | "generation_started"
            | "generation_finished"
            | "log_compacted"
        ):
            pass  # History: nothing that is decided later rests on it.
        case None:
            state.unapplied_events += 1


def apply_facts(state: State, events: Iterable[tuple[int, int, event_pb2.Fact]]) -> None:
    """`apply_fact` for many, each with its sequence and its time.

    Nearly every event of a log is a sample of the memory of a known node without shards. For such a one this does what
    `apply_fact` does, in half the time.
    """
    nodes, sequence, recorded_at_ns = state.nodes, state.sequence, state.recorded_at_ns
    for sequence, recorded_at_ns, fact in events:
        sampled = fact.memory_sampled
        node_id = sampled.node_id
        # A fact of another kind names no node here.
        node = nodes.get(node_id) if node_id else None
        if node is None or node.shards:
            apply_fact(state, sequence, recorded_at_ns, fact)
        else:
            node.memory = sampled.sample
            node.last_sequence = node.changed_at = sequence
    state.sequence, state.recorded_at_ns = sequence, recorded_at_ns


def superseded(state: State, node_id: str | None, samples: int) -> int:
    """How many of so many samples of the node's memory, one right after the other, leave nothing behind once the rest
    are applied: all but the last two, where the node is known.

    A sample replaces the one before it. What a shard holds counts as seen with the next sample, and as settled with
    the one after that; more of them change nothing.
    """
    return max(0, samples - 2) if node_id in state.nodes else 0


def lasting(sampled: Sequence[tuple[int, str] | None]) -> list[int]:
    """Where in a stretch of the log those facts are, in order, that must be applied for all to have been.

    `sampled` says of each fact its kind and its node, where it is a sample, and None where it is anything else. Of a
    node's memory these are the first sample, which may make the node known, and the last: as in `superseded`, two are
    enough for what a shard holds. So it is between any two facts that are no samples, since those may be about a shard.
    """
    kept: list[int] = []
    first: dict[str, int] = {}
    seen: set[str] = set()
    for index in range(len(sampled) - 1, -1, -1):
        kind, node_id = sampled[index] or (None, "")
        if kind != MEMORY_SAMPLED:
            kept.append(index)
            if kind is None:
                kept += first.values()
                first.clear()
                seen.clear()
        elif node_id in seen:
            first[node_id] = index
        else:
            seen.add(node_id)
            kept.append(index)
    return sorted((*kept, *first.values()))


def _node(state: State, node_id: str) -> NodeRecord:
    """The node, made with its identity unknown when it speaks before it has announced itself."""
    node = state.nodes.get(node_id)
    if node is None:
        node = state.nodes[node_id] = NodeRecord(node_pb2.NodeIdentity(node_id=node_id))
        state.membership_changed_at = state.sequence
    node.last_sequence = node.changed_at = state.sequence
    return node


def _link_measured(state: State, link: node_pb2.Link) -> None:
    _node(state, link.from_node_id).links[link.to_node_id] = link
    state.links_changed_at = state.sequence


def _memory_sampled(state: State, fact: event_pb2.MemorySampled) -> None:
    node = _node(state, fact.node_id)
    node.memory = fact.sample
    for shard in node.shards.values():
        shard.settled_bytes = min(shard.seen_bytes, shard.resident_bytes)
        shard.seen_bytes = shard.resident_bytes


def _system_sampled(state: State, fact: event_pb2.SystemSampled) -> None:
    node = _node(state, fact.node_id)
    node.system = fact.sample
    if fact.sample.HasField("memory"):
        node.memory = fact.sample.memory


def _runner_announced(state: State, profile: node_pb2.RunnerProfile) -> None:
    node = _node(state, profile.node_id)
    rebooted = node.runner is not None and node.runner.boot_id != profile.boot_id
    node.runner = profile
    if not rebooted:
        return
    for (instance_id, rank), shard in list(node.shards.items()):
        status = model_pb2.ShardStatus(
            instance_id=instance_id,
            rank=rank,
            node_id=profile.node_id,
            phase=model_pb2.SHARD_PHASE_FAILED,
            failure=model_pb2.ShardFailure(phase=shard.status.phase, message="its runner was restarted"),
        )
        _shard_status_changed(state, status)


def _instance_placed(state: State, sequence: int, fact: event_pb2.InstancePlaced) -> None:
    model = state.models.get(fact.spec.model_id, model_pb2.Model(model_id=fact.spec.model_id))
    shards = [
        ShardRecord(
            shard,
            model_pb2.ShardStatus(
                instance_id=fact.instance_id,
                rank=shard.rank,
                node_id=shard.node_id,
                phase=model_pb2.SHARD_PHASE_ASSIGNED,
            ),
        )
        for shard in fact.placement.shards
    ]
    state.instances[fact.instance_id] = InstanceRecord(
        instance_id=fact.instance_id,
        spec=fact.spec,
        placement=fact.placement,
        model=model,
        silent_node_ids=tuple(fact.silent_node_ids),
        shards=shards,
        placed_at_sequence=sequence,
        rules_version=fact.rules_version if fact.HasField("rules_version") else None,
    )
    for shard in shards:
        _node(state, shard.shard.node_id).shards[fact.instance_id, shard.shard.rank] = shard
    if fact.spec.request_id:
        state.requests[fact.spec.request_id] = fact.instance_id


def _instance_released(state: State, fact: event_pb2.InstanceReleased) -> None:
    instance = state.instances.get(fact.instance_id)
    if instance is None:
        return
    instance.released = True
    _shrink(state, instance)


def _shrink(state: State, instance: InstanceRecord) -> None:
    """Let go of what an instance that is over was promised and never took."""
    for shard in instance.shards:
        shard.shrinking = True
        _touch(state, shard)
        if shard.status.phase == model_pb2.SHARD_PHASE_ASSIGNED:
            # No runner has taken it up, so there is nobody to say that it is gone.
            # A new status: the old one may be part of a fact that others still read.
            shard.status = model_pb2.ShardStatus(
                instance_id=instance.instance_id,
                rank=shard.shard.rank,
                node_id=shard.shard.node_id,
                phase=model_pb2.SHARD_PHASE_UNLOADED,
            )
            _forget(state, shard)


def _shard_status_changed(state: State, status: model_pb2.ShardStatus) -> None:
    instance = state.instances.get(status.instance_id)
    if instance is None or status.rank >= len(instance.shards):
        return
    shard = instance.shards[status.rank]
    if status.phase < shard.status.phase or shard.gone:
        return  # Phases only go forward: this one was overtaken.
    shard.status = status
    _touch(state, shard)
    if status.HasField("resident_bytes"):
        shard.resident_bytes = status.resident_bytes
        shard.settled_bytes = min(shard.settled_bytes, status.resident_bytes)
    if shard.gone:
        _forget(state, shard)
    if status.phase == model_pb2.SHARD_PHASE_FAILED and instance.wanted:
        instance.failure = _failure(state, status)
        _shrink(state, instance)


def _failure(state: State, status: model_pb2.ShardStatus) -> str:
    node = state.nodes.get(status.node_id)
    name = node.identity.friendly_name if node is not None and node.identity.friendly_name else status.node_id
    phase = model_pb2.ShardPhase.Name(status.failure.phase).removeprefix("SHARD_PHASE_")
    return f"rank {status.rank} on {name} failed while {phase}: {status.failure.message}"


def _touch(state: State, shard: ShardRecord) -> None:
    """Note that what the shard's node holds has changed."""
    node = state.nodes.get(shard.shard.node_id)
    if node is not None:
        node.changed_at = state.sequence


def _forget(state: State, shard: ShardRecord) -> None:
    shard.resident_bytes = 0
    node = state.nodes.get(shard.shard.node_id)
    if node is not None:
        node.shards.pop((shard.status.instance_id, shard.shard.rank), None)
