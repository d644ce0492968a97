"""What each runner shall run, from the state alone; and which shards to give up when a runner does not do it.

Rules this module lives by:
- A placement is one decision: the assignment of an instance's rank never changes, it is only there or gone.
- What is over is not assigned: a released or failed instance leaves every runner's set at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Final

from services.master.state import InstanceRecord, ShardRecord, State
from ullage.v1 import dispatch_service_pb2, event_pb2, model_pb2

SOURCES_MAX: Final = 8
"""Runners beside the instance's own that a model may be fetched from."""

Key = tuple[str, int]
"""A shard: the instance's id and the rank."""


def assignments(state: State, node_id: str) -> dict[Key, dispatch_service_pb2.Assignment]:
    """Everything the node's runner shall run, in order of instance and rank."""
    return {key: _assignment(state, instance, shard) for key, instance, shard in _wanted(state, node_id)}


def assigned_keys(state: State, node_id: str) -> frozenset[Key]:
    """The shards the node's runner shall run."""
    return frozenset(key for key, _, _ in _wanted(state, node_id))


def _wanted(state: State, node_id: str) -> Iterator[tuple[Key, InstanceRecord, ShardRecord]]:
    node = state.nodes.get(node_id)
    for key, shard in sorted(node.shards.items()) if node is not None else ():
        instance = state.instances[key[0]]
        if instance.wanted:
            yield key, instance, shard


def _assignment(state: State, instance: InstanceRecord, shard: ShardRecord) -> dispatch_service_pb2.Assignment:
    return dispatch_service_pb2.Assignment(
        instance_id=instance.instance_id,
        rank=shard.shard.rank,
        shard=shard.shard,
        model=instance.model,
        context_tokens=instance.placement.context_tokens,
        concurrent_sequences=instance.placement.concurrent_sequences,
        peers=[_peer(state, other.shard) for other in instance.shards],
        sources=_sources(state, instance),
    )


def _sources(state: State, instance: InstanceRecord) -> list[dispatch_service_pb2.Peer]:
    """The runners that have the model's files: all of the instance's own, and some of the others."""
    having = {
        node_id: dispatch_service_pb2.Peer(node_id=node_id, address=node.runner.address)
        for node_id, node in sorted(state.nodes.items())
        if node.runner is not None and instance.model.model_id in node.runner.model_ids
    }
    own = [having.pop(shard.shard.node_id) for shard in instance.shards if shard.shard.node_id in having]
    return [*own, *islice(having.values(), SOURCES_MAX)]


def _peer(state: State, shard: model_pb2.Shard) -> dispatch_service_pb2.Peer:
    node = state.nodes.get(shard.node_id)
    address = node.runner.address if node is not None and node.runner is not None else ""
    return dispatch_service_pb2.Peer(rank=shard.rank, node_id=shard.node_id, address=address)


def change(
    known: Collection[Key],
    wanted: Mapping[Key, dispatch_service_pb2.Assignment],
    version: int,
    reasons: Mapping[str, str],
) -> dispatch_service_pb2.AssignmentChange | None:
    """What leads a runner that knows of `known`, at `version`, to `wanted`; None when that is the same.

    `reasons` say, by instance, why one is over.
    """
    assign = [assignment for key, assignment in wanted.items() if key not in known]
    remove = sorted(set(known) - wanted.keys())
    if not assign and not remove:
        return None
    return dispatch_service_pb2.AssignmentChange(
        applies_to_version=version,
        results_in_version=version + 1,
        assign=assign,
        remove=[
            dispatch_service_pb2.ShardRef(instance_id=id_, rank=rank, reason=reasons.get(id_, ""))
            for id_, rank in remove
        ],
    )


def reasons(state: State, keys: Collection[Key]) -> dict[str, str]:
    """Why the instances of these shards are over, by instance; for those that are."""
    instances = (state.instances[instance_id] for instance_id, _ in keys)
    return {each.instance_id: each.failure or "it was released" for each in instances if not each.wanted}


def overdrawn(state: State, node_id: str) -> list[model_pb2.ShardStatus]:
    """The ranks, on any node, of the instances the node's runner shall run that hold more than they were promised."""
    instances = {instance.instance_id: instance for _, instance, _ in _wanted(state, node_id)}
    statuses = (shard.status for _, instance in sorted(instances.items()) for shard in instance.shards)
    return [status for status in statuses if status.HasField("over_grant_bytes")]


def untaken(state: State, node_id: str) -> frozenset[Key]:
    """The shards on the node that its runner shall run and has not said a word of."""
    return frozenset(
        key for key, _, shard in _wanted(state, node_id) if shard.status.phase == model_pb2.SHARD_PHASE_ASSIGNED
    )


def given_up(state: State, node_id: str, keys: Collection[Key], message: str) -> list[event_pb2.Fact]:
    """The facts that fail these of the node's shards, and with them their instances, for the reason in `message`.

    Also shards that shall end: of those nobody else would ever say that they have.
    """
    node = state.nodes.get(node_id)
    return (
        []
        if node is None
        else [
            event_pb2.Fact(
                shard_status_changed=event_pb2.ShardStatusChanged(
                    status=model_pb2.ShardStatus(
                        instance_id=key[0],
                        rank=key[1],
                        node_id=node_id,
                        phase=model_pb2.SHARD_PHASE_FAILED,
                        failure=model_pb2.ShardFailure(phase=shard.status.phase, message=message),
                    )
                )
            )
            for key, shard in sorted(node.shards.items())
            if key in keys
        ]
    )
