"""`ullage diff`: every thing that is different in the state, and nothing that was not measured."""

from __future__ import annotations

from services.cli.diff import _changes, _equal
from tests.cli.canned import instance, node
from ullage.v1 import model_pb2, node_pb2, state_pb2

LOADING = instance("i-1", model_pb2.INSTANCE_STATE_LOADING, model_pb2.SHARD_PHASE_LOADING)
FAILED = instance("i-1", model_pb2.INSTANCE_STATE_FAILED, model_pb2.SHARD_PHASE_FAILED)


def test_what_is_the_same_is_not_told() -> None:
    state = state_pb2.ClusterState(nodes=[node("a")], instances=[LOADING])
    assert list(_changes(state, state)) == []


def test_nodes_models_and_instances_that_came_went_or_changed_are_told() -> None:
    failed = model_pb2.Instance()
    failed.CopyFrom(FAILED)
    failed.failure = "rank 0 on node-1 failed while LOADING: no room"
    before = state_pb2.ClusterState(
        nodes=[node("a", "node-1"), node("b", "node-2")],
        models=[model_pb2.Model(model_id="kept", digest="d1"), model_pb2.Model(model_id="old")],
        instances=[LOADING],
    )
    after = state_pb2.ClusterState(
        nodes=[node("a", "node-1", runner="127.0.0.1:2"), node("c", "node-3")],
        models=[model_pb2.Model(model_id="kept", digest="d2"), model_pb2.Model(model_id="new")],
        instances=[failed, instance("i-2", model_pb2.INSTANCE_STATE_PLACED, model_pb2.SHARD_PHASE_ASSIGNED)],
    )
    after.nodes[0].memory.pressure_level = node_pb2.PRESSURE_LEVEL_WARNING
    after.nodes[0].memory.balanced_available_bytes = 256 * 2**20
    after.nodes[0].runner.boot_id = "2"
    assert list(_changes(before, after)) == [
        "node node-1: level NORMAL -> WARNING",
        "node node-1: available 512 MiB -> 256 MiB",
        "node node-1: runner at 127.0.0.1:2",
        "node node-2: gone",
        "node node-3: new",
        "model kept: other files, d1 -> d2",
        "model new: new",
        "model old: gone",
        "instance i-1: LOADING -> FAILED, rank 0 on node-1 failed while LOADING: no room",
        "instance i-2: new, PLACED",
    ]


def test_a_figure_that_was_not_measured_is_unknown_and_not_zero() -> None:
    before, after = (state_pb2.ClusterState(nodes=[node("a", "node-1")]) for _ in range(2))
    before.nodes[0].memory.ClearField("balanced_available_bytes")
    before.nodes[0].memory.ClearField("pressure_level")
    assert list(_changes(before, after)) == [
        "node node-1: level unknown -> NORMAL",
        "node node-1: available unknown -> 512 MiB",
    ]


def test_a_way_that_is_gone_and_files_that_came_are_told() -> None:
    before, after = (state_pb2.ClusterState(nodes=[node("a", "node-1"), node("b", "node-2")]) for _ in range(2))
    before.nodes[0].links.add(from_node_id="a", to_node_id="b", reachable=True)
    after.nodes[0].links.add(from_node_id="a", to_node_id="b", reachable=False, failure="connection refused")
    after.nodes[1].links.add(from_node_id="b", to_node_id="a", reachable=True)
    before.nodes[1].runner.model_ids.append("old")
    after.nodes[1].runner.model_ids.append("m")
    assert list(_changes(before, after)) == [
        "node node-1: does not reach node-2: connection refused",
        "node node-2: has the files of m; has no more the files of old",
        "node node-2: reaches node-1",
    ]


def test_a_way_that_was_only_measured_again_is_no_change_and_yet_not_the_same() -> None:
    before, after = (state_pb2.ClusterState(sequence=at, nodes=[node("a")]) for at in (1, 2))
    after.nodes[0].last_sequence = 2
    assert _equal(before, after)
    for state, milliseconds in ((before, 1), (after, 2)):
        state.nodes[0].links.add(to_node_id="b", reachable=True).latency.FromMilliseconds(milliseconds)
    assert list(_changes(before, after)) == []
    assert not _equal(before, after)
