"""What each runner shall run, from the state alone."""

from __future__ import annotations

import pytest

from services.master import dispatch
from services.master.state import State, apply_fact
from ullage.v1 import dispatch_service_pb2, event_pb2, model_pb2, node_pb2

MODEL = model_pb2.Model(model_id="m", layers=[model_pb2.Layer() for _ in range(4)])


def state_after(*facts: event_pb2.Fact) -> State:
    state = State()
    for sequence, fact in enumerate(facts, start=1):
        apply_fact(state, sequence, sequence, fact)
    return state


def announced(node_id: str, boot_id: str = "b") -> event_pb2.Fact:
    profile = node_pb2.RunnerProfile(node_id=node_id, boot_id=boot_id, address=f"{node_id}:50502")
    return event_pb2.Fact(runner_announced=event_pb2.RunnerAnnounced(profile=profile))


def registered() -> event_pb2.Fact:
    return event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=MODEL))


def placed(instance_id: str, *node_ids: str) -> event_pb2.Fact:
    shards = [
        model_pb2.Shard(rank=rank, node_id=node_id, first_layer=rank, end_layer=rank + 1)
        for rank, node_id in enumerate(node_ids)
    ]
    return event_pb2.Fact(
        instance_placed=event_pb2.InstancePlaced(
            instance_id=instance_id,
            spec=model_pb2.PlacementSpec(model_id="m"),
            placement=model_pb2.Placement(shards=shards, context_tokens=256, concurrent_sequences=2),
        )
    )


def said(instance_id: str, rank: int, node_id: str, phase: model_pb2.ShardPhase.ValueType) -> event_pb2.Fact:
    status = model_pb2.ShardStatus(instance_id=instance_id, rank=rank, node_id=node_id, phase=phase)
    return event_pb2.Fact(shard_status_changed=event_pb2.ShardStatusChanged(status=status))


def released(instance_id: str) -> event_pb2.Fact:
    return event_pb2.Fact(instance_released=event_pb2.InstanceReleased(instance_id=instance_id))


CLUSTER = (registered(), announced("n1"), announced("n2"))


def test_an_assignment_has_all_that_is_needed_to_run_the_shard() -> None:
    state = state_after(*CLUSTER, placed("i", "n1", "n2"))

    assert dispatch.assignments(state, "n2") == {
        ("i", 1): dispatch_service_pb2.Assignment(
            instance_id="i",
            rank=1,
            shard=model_pb2.Shard(rank=1, node_id="n2", first_layer=1, end_layer=2),
            model=MODEL,
            context_tokens=256,
            concurrent_sequences=2,
            peers=[
                dispatch_service_pb2.Peer(rank=0, node_id="n1", address="n1:50502"),
                dispatch_service_pb2.Peer(rank=1, node_id="n2", address="n2:50502"),
            ],
        )
    }


def test_a_node_gets_its_own_shards_in_order_of_instance_and_rank() -> None:
    state = state_after(*CLUSTER, placed("z", "n1", "n2"), placed("a", "n2", "n1"))

    assert list(dispatch.assignments(state, "n1")) == [("a", 1), ("z", 0)]
    assert dispatch.assignments(state, "n9") == {}


@pytest.mark.parametrize(
    "end",
    [
        released("i"),
        said("i", 0, "n1", model_pb2.SHARD_PHASE_FAILED),
        announced("n1", boot_id="another"),
    ],
    ids=["released", "failed on another node", "another runner restarted"],
)
def test_an_instance_that_is_over_is_wanted_of_nobody(end: event_pb2.Fact) -> None:
    running = said("i", 1, "n2", model_pb2.SHARD_PHASE_RUNNING)
    state = state_after(*CLUSTER, placed("i", "n1", "n2"), running, end)

    assert dispatch.assigned_keys(state, "n1") == frozenset()
    assert dispatch.assigned_keys(state, "n2") == frozenset()


def test_what_a_shard_says_of_itself_does_not_change_what_is_assigned() -> None:
    state = state_after(*CLUSTER, placed("i", "n1", "n2"), said("i", 0, "n1", model_pb2.SHARD_PHASE_LOADING))

    assert dispatch.assigned_keys(state, "n1") == {("i", 0)}


def test_a_change_names_what_comes_and_what_goes_and_the_version_it_applies_to() -> None:
    wanted = dispatch.assignments(state_after(*CLUSTER, placed("i", "n1", "n2")), "n1")

    change = dispatch.change({("y", 1), ("x", 0)}, wanted, 7, {"y": "rank 0 failed"})

    assert change is not None
    assert (change.applies_to_version, change.results_in_version) == (7, 8)
    assert [(assignment.instance_id, assignment.rank) for assignment in change.assign] == [("i", 0)]
    gone = [(gone.instance_id, gone.rank, gone.reason) for gone in change.remove]
    assert gone == [("x", 0, ""), ("y", 1, "rank 0 failed")]


def test_no_difference_is_no_change() -> None:
    wanted = dispatch.assignments(state_after(*CLUSTER, placed("i", "n1", "n2")), "n1")

    assert dispatch.change(wanted.keys(), wanted, 7, {}) is None


def test_a_shard_is_untaken_until_its_runner_says_a_word_of_it() -> None:
    waiting = state_after(*CLUSTER, placed("i", "n1", "n2"))
    taken = state_after(*CLUSTER, placed("i", "n1", "n2"), said("i", 0, "n1", model_pb2.SHARD_PHASE_STARTING))

    assert dispatch.untaken(waiting, "n1") == {("i", 0)}
    assert dispatch.untaken(taken, "n1") == frozenset()


def test_a_shard_that_is_given_up_fails_its_instance_with_the_phase_and_the_reason() -> None:
    state = state_after(*CLUSTER, placed("i", "n1", "n2"), said("i", 0, "n1", model_pb2.SHARD_PHASE_LOADING))

    facts = dispatch.given_up(state, "n1", {("i", 0)}, "its runner has not been heard for 15 s")
    apply_fact(state, state.sequence + 1, 1, *facts)

    assert state.instances["i"].failure == "rank 0 on n1 failed while LOADING: its runner has not been heard for 15 s"
    assert state.instances["i"].state == model_pb2.INSTANCE_STATE_FAILED


def test_a_shard_of_an_instance_that_is_over_is_not_given_up_again() -> None:
    state = state_after(*CLUSTER, placed("i", "n1", "n2"), released("i"))

    assert dispatch.given_up(state, "n1", {("i", 0)}, "whatever") == []
