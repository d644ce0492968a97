"""The shortest history with the same end: facts whose fold is a state. A start replays them, and then the tail.

Rules this module lives by:
- The state itself is never stored. A checkpoint is made of facts, and `apply` alone says what they mean.
- A checkpoint that does not fold to the state it was made of is not made: a longer replay is no harm, a wrong
  state is. Histories no master writes (an instance_id used twice, a node removed with shards on it) have none.
- It is used by the release that made it only: another may read more in the same events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final

from services.master.state import InstanceRecord, NodeRecord, ShardRecord, State, apply
from services.master.view import state_hash
from ullage.v1 import event_pb2, model_pb2, node_pb2

RELEASE: Final = version("ullage")


def checkpoint(state: State, acknowledged: Mapping[str, int]) -> event_pb2.Checkpoint | None:
    """A checkpoint of `state`, and of what each source had said by then; None where its fold is not the same."""
    made = event_pb2.Checkpoint(
        sequence=state.sequence,
        ullage_version=RELEASE,
        events=history(state),
        sources=[
            event_pb2.SourceMark(source=source, source_sequence=sequence)
            for source, sequence in sorted(acknowledged.items())
        ],
    )
    made.recorded_at.FromNanoseconds(state.recorded_at_ns)
    return made if _essence(restored(made)) == _essence(state) else None


def restored(made: event_pb2.Checkpoint) -> State:
    """The state a checkpoint stands for."""
    state = State()
    for event in made.events:
        apply(state, event)
    state.sequence = made.sequence
    state.recorded_at_ns = made.recorded_at.ToNanoseconds()
    return state


def history(state: State) -> Iterator[event_pb2.RecordedEvent]:
    """Facts that fold to `state` but for its own sequence, each with the sequence it stands for."""
    fact = event_pb2.Fact
    yield from _placements(state)
    for node_id, node in state.nodes.items():
        yield from _node(node_id, node)
    yield from _holdings(state)
    for instance in state.instances.values():
        yield from _endings(instance)
    for model in state.models.values():
        yield _event(fact(model_registered=event_pb2.ModelRegistered(model=model)))
    for _ in range(state.unapplied_events):
        yield _event(fact())
    # Last of all, since each of the facts before it may have been about a node.
    for node_id in sorted(_named(state)):
        known = state.nodes.get(node_id)
        if known is None:
            yield _event(fact(node_removed=event_pb2.NodeRemoved(node_id=node_id)))
        else:
            announced = event_pb2.NodeAnnounced(identity=known.identity)
            yield _event(fact(node_announced=announced), known.last_sequence)


def _event(fact: event_pb2.Fact, sequence: int = 0) -> event_pb2.RecordedEvent:
    return event_pb2.RecordedEvent(sequence=sequence, fact=fact)


def _placements(state: State) -> Iterator[event_pb2.RecordedEvent]:
    """Every instance, placed with the model as it was then; no model is registered afterwards."""
    registered: dict[str, model_pb2.Model] = {}
    for instance in state.instances.values():
        model_id = instance.spec.model_id
        if registered.get(model_id, model_pb2.Model(model_id=model_id)) != instance.model:
            registered[model_id] = instance.model
            yield _event(event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=instance.model)))
        placed = event_pb2.InstancePlaced(
            instance_id=instance.instance_id,
            spec=instance.spec,
            placement=instance.placement,
            silent_node_ids=instance.silent_node_ids,
            rules_version=instance.rules_version,
        )
        yield _event(event_pb2.Fact(instance_placed=placed), instance.placed_at_sequence)
    for model_id in registered:
        yield _event(event_pb2.Fact(model_removed=event_pb2.ModelRemoved(model_id=model_id)))


def _node(node_id: str, node: NodeRecord) -> Iterator[event_pb2.RecordedEvent]:
    """What a node last said, but for who it is."""
    if node.runner is not None:
        yield _event(event_pb2.Fact(runner_announced=event_pb2.RunnerAnnounced(profile=node.runner)))
    for link in node.links.values():
        yield _event(event_pb2.Fact(link_measured=event_pb2.LinkMeasured(link=link)))
    if node.system is not None:
        sampled = event_pb2.SystemSampled(node_id=node_id, sample=node.system)
        yield _event(event_pb2.Fact(system_sampled=sampled))
    if node.memory is not None:
        yield _memory(node_id, node.memory)


def _memory(node_id: str, sample: node_pb2.MemorySample) -> event_pb2.RecordedEvent:
    return _event(event_pb2.Fact(memory_sampled=event_pb2.MemorySampled(node_id=node_id, sample=sample)))


def _holdings(state: State) -> Iterator[event_pb2.RecordedEvent]:
    """What each shard was resident with before the last memory sample but one, before the last, and since."""
    held = [
        (instance, shard)
        for instance in state.instances.values()
        for shard in instance.shards
        if not shard.gone and (shard.seen_bytes or shard.resident_bytes)
    ]
    sampled = sorted({shard.shard.node_id for _, shard in held})
    for field in ("settled_bytes", "seen_bytes"):
        for instance, shard in held:
            yield _growing(instance, shard, getattr(shard, field))
        for node_id in sampled:
            node = state.nodes.get(node_id)
            if node is not None and node.memory is not None:
                yield _memory(node_id, node.memory)
    for instance, shard in held:
        yield _growing(instance, shard, shard.resident_bytes)


def _growing(instance: InstanceRecord, shard: ShardRecord, resident_bytes: int) -> event_pb2.RecordedEvent:
    """A status on the way to the last one: phases only go forward, and one no longer ASSIGNED is not let go of."""
    status = model_pb2.ShardStatus(
        instance_id=instance.instance_id,
        rank=shard.shard.rank,
        node_id=shard.shard.node_id,
        phase=min(shard.status.phase, model_pb2.SHARD_PHASE_STARTING),
        resident_bytes=resident_bytes,
    )
    return _said(status)


def _said(status: model_pb2.ShardStatus) -> event_pb2.RecordedEvent:
    return _event(event_pb2.Fact(shard_status_changed=event_pb2.ShardStatusChanged(status=status)))


def _endings(instance: InstanceRecord) -> Iterator[event_pb2.RecordedEvent]:
    """The last word of every shard, in an order that gives the instance the end it had."""
    for shard in instance.shards:
        never_started = shard.status == _status(instance, shard, model_pb2.SHARD_PHASE_UNLOADED)
        if not instance.wanted and not never_started and not shard.resident_bytes:
            yield _growing(instance, shard, 0)  # Started, so that the end of the instance does not unload it.
    if instance.failure:
        yield from _failure(instance)
    released = event_pb2.InstanceReleased(instance_id=instance.instance_id)
    if instance.released:
        yield _event(event_pb2.Fact(instance_released=released))
    for shard in instance.shards:
        if shard.resident_bytes or shard.status != _status(instance, shard, model_pb2.SHARD_PHASE_ASSIGNED):
            yield _said(shard.status)


def _status(
    instance: InstanceRecord, shard: ShardRecord, phase: model_pb2.ShardPhase.ValueType
) -> model_pb2.ShardStatus:
    """The status `apply` itself gives a shard."""
    return model_pb2.ShardStatus(
        instance_id=instance.instance_id,
        rank=shard.shard.rank,
        node_id=shard.shard.node_id,
        phase=phase,
    )


def _failure(instance: InstanceRecord) -> Iterator[event_pb2.RecordedEvent]:
    """The status that failed the instance, from a node that is called as it was called then."""
    for shard in instance.shards:
        status = shard.status
        phase = model_pb2.ShardPhase.Name(status.failure.phase).removeprefix("SHARD_PHASE_")
        before, after = f"rank {status.rank} on ", f" failed while {phase}: {status.failure.message}"
        if (
            status.phase == model_pb2.SHARD_PHASE_FAILED
            and instance.failure.startswith(before)
            and instance.failure.endswith(after)
        ):
            name = instance.failure[len(before) : len(instance.failure) - len(after)]
            identity = node_pb2.NodeIdentity(node_id=status.node_id, friendly_name=name)
            yield _event(event_pb2.Fact(node_announced=event_pb2.NodeAnnounced(identity=identity)))
            yield _said(status)
            return


def _named(state: State) -> set[str]:
    """Every node that a fact of the history is about."""
    return set(state.nodes).union(
        *(
            {shard.shard.node_id, shard.status.node_id}
            for instance in state.instances.values()
            for shard in instance.shards
        )
    )


def _essence(state: State) -> tuple[Any, ...]:
    """All of a state that anything may rest on: what is shown, and what promises are reckoned from.

    The marks of change are left out: they are for readers that keep a copy, and a new state has none yet. So is
    what a shard that is gone once held.
    """
    shards = [
        (shard.resident_bytes, shard.shrinking, () if shard.gone else (shard.seen_bytes, shard.settled_bytes))
        for instance in state.instances.values()
        for shard in instance.shards
    ]
    held = {node_id: sorted(node.shards) for node_id, node in state.nodes.items()}
    decided = [
        (instance_id, instance.silent_node_ids, instance.rules_version)
        for instance_id, instance in state.instances.items()
    ]
    return state_hash(state), state.recorded_at_ns, state.requests, shards, held, decided
