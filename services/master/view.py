"""The state as clients see it: made when asked for, never stored.

Everything is ordered by id, so that equal states are equal bytes, and have equal hashes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from services.master.state import InstanceRecord, NodeRecord, State
from ullage.v1 import model_pb2, state_pb2


def cluster_state(
    state: State, liveness: Callable[[str], state_pb2.Liveness.ValueType] | None = None
) -> state_pb2.ClusterState:
    """The whole state; with `liveness`, which gives a node's by its id, where the master runs."""
    view = state_pb2.ClusterState(
        sequence=state.sequence,
        nodes=[
            node_view(node, None if liveness is None else liveness(id_)) for id_, node in sorted(state.nodes.items())
        ],
        models=[model for _, model in sorted(state.models.items())],
        instances=[instance(record) for _, record in sorted(state.instances.items())],
        unapplied_events=state.unapplied_events,
    )
    if state.sequence:
        view.recorded_at.FromNanoseconds(state.recorded_at_ns)
    return view


def node_view(node: NodeRecord, liveness: state_pb2.Liveness.ValueType | None = None) -> state_pb2.NodeView:
    """One node, with what is promised on it to instances that still want it, and what of that is resident."""
    return state_pb2.NodeView(
        identity=node.identity,
        memory=node.memory,
        system=node.system,
        runner=node.runner,
        links=[link for _, link in sorted(node.links.items())],
        promised_bytes=sum(shard.shard.bytes.total_bytes for shard in node.shards.values() if not shard.shrinking),
        resident_bytes=sum(shard.resident_bytes for shard in node.shards.values()),
        last_sequence=node.last_sequence,
        liveness=liveness,
    )


def instance(record: InstanceRecord) -> model_pb2.Instance:
    """One instance, with every rank's last status."""
    return model_pb2.Instance(
        instance_id=record.instance_id,
        spec=record.spec,
        placement=record.placement,
        model=record.model,
        state=record.state,
        shards=[shard.status for shard in record.shards],
        failure=record.failure,
        placed_at_sequence=record.placed_at_sequence,
    )


def state_hash(state: State) -> str:
    """sha256 in hex over the state without liveness: equal states of one release have equal hashes."""
    return hashlib.sha256(cluster_state(state).SerializeToString(deterministic=True)).hexdigest()
