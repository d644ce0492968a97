"""A checkpoint folds to the state it was made of, for every history a master writes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.master.checkpoint import RELEASE, checkpoint, restored
from services.master.state import State, apply_fact
from services.master.view import state_hash
from tests.master.facts import (
    GIB,
    instance_placed,
    instance_released,
    link_measured,
    memory_sampled,
    model_registered,
    node_announced,
    node_removed,
    runner_announced,
    shard_status,
    system_sampled,
    unknown_kind,
)
from ullage.v1 import event_pb2, model_pb2

NODE_IDS = st.sampled_from(["a", "b", "c"])
INSTANCE_IDS = st.sampled_from(["i0", "i1", "i2"])
BYTES = st.integers(0, 8 * GIB)
PHASES = st.sampled_from(model_pb2.ShardPhase.values())
FACTS = st.one_of(
    st.builds(memory_sampled, NODE_IDS, BYTES),
    st.builds(system_sampled, NODE_IDS, cpu_pct=st.floats(0, 100)),
    st.builds(node_announced, NODE_IDS, st.sampled_from(["1", "2"]), st.none() | st.text(max_size=5)),
    st.builds(node_removed, NODE_IDS),
    st.builds(runner_announced, NODE_IDS, st.sampled_from(["1", "2"])),
    st.builds(link_measured, NODE_IDS, NODE_IDS),
    st.builds(model_registered, digest=st.sampled_from(["d1", "d2"])),
    st.just(event_pb2.Fact(model_removed=event_pb2.ModelRemoved(model_id="m"))),
    st.lists(NODE_IDS, min_size=1, max_size=3, unique=True),  # An instance placed on these, with an id of its own.
    st.builds(
        lambda phase, instance, rank, size, why: shard_status(phase, instance, rank, "abc"[rank], size, why),
        PHASES,
        INSTANCE_IDS,
        st.integers(0, 2),
        st.none() | BYTES,
        st.sampled_from(["", "out of memory"]),
    ),
    st.builds(instance_released, INSTANCE_IDS),
    st.just(unknown_kind()),
)


def _history(drawn: list[event_pb2.Fact | list[str]]) -> State:
    """The state after what was drawn, as a master would let it happen: no node is removed with shards on it."""
    state = State()
    for each in drawn:
        fact = each if isinstance(each, event_pb2.Fact) else instance_placed(f"i{len(state.instances)}", each)
        node = state.nodes.get(fact.node_removed.node_id)
        if node is not None and node.shards:
            continue
        apply_fact(state, state.sequence + 1, 1000 * state.sequence, fact)
    return state


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(FACTS, max_size=40))
def test_a_checkpoint_folds_to_the_state_it_was_made_of(drawn: list[event_pb2.Fact | list[str]]) -> None:
    state = _history(drawn)
    made = checkpoint(state, {})
    assert made is not None
    again = restored(event_pb2.Checkpoint.FromString(made.SerializeToString()))
    assert state_hash(again) == state_hash(state)
    assert {id_: node.promised_bytes for id_, node in again.nodes.items()} == {
        id_: node.promised_bytes for id_, node in state.nodes.items()
    }
    assert again.requests == state.requests


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(FACTS, max_size=25), st.lists(FACTS, max_size=15))
def test_what_follows_a_checkpoint_has_the_same_effect_as_without_it(
    before: list[event_pb2.Fact | list[str]], after: list[event_pb2.Fact | list[str]]
) -> None:
    state = _history(before)
    made = checkpoint(state, {})
    assert made is not None
    again = restored(made)
    for each in after:
        fact = each if isinstance(each, event_pb2.Fact) else instance_placed(f"i{len(state.instances)}", each)
        node = state.nodes.get(fact.node_removed.node_id)
        if node is not None and node.shards:
            continue
        for one in (state, again):
            apply_fact(one, one.sequence + 1, 7, fact)
        assert state_hash(again) == state_hash(state)


@pytest.mark.parametrize("last", [model_pb2.SHARD_PHASE_UNLOADED, model_pb2.SHARD_PHASE_FAILED])
@pytest.mark.parametrize("released_first", [True, False])
def test_an_instance_that_ran_and_ended_is_told_as_it_was(
    last: model_pb2.ShardPhase.ValueType, released_first: bool
) -> None:
    ends = [instance_released("i"), shard_status(last, "i", 0, "a", resident_bytes=0, failure="its stream broke")]
    facts = [
        node_announced("a", friendly_name="anna"),
        memory_sampled("a"),
        instance_placed("i", ["a", "b"]),
        shard_status(model_pb2.SHARD_PHASE_RUNNING, "i", 0, "a", resident_bytes=GIB),
        *(ends if released_first else reversed(ends)),
        node_announced("a", friendly_name="renamed"),
    ]
    state = State()
    for fact in facts:
        apply_fact(state, state.sequence + 1, 0, fact)
    made = checkpoint(state, {})
    assert made is not None
    assert state_hash(restored(made)) == state_hash(state)


def test_a_history_no_master_writes_has_no_checkpoint() -> None:
    state = State()
    for fact in (instance_placed("i", ["a"]), node_removed("a"), memory_sampled("a")):
        apply_fact(state, state.sequence + 1, 0, fact)
    assert checkpoint(state, {}) is None


def test_a_checkpoint_says_what_every_source_had_said_and_who_made_it() -> None:
    made = checkpoint(State(), {"probe/b/1": 7, "probe/a/1": 3})
    assert made is not None
    assert [(mark.source, mark.source_sequence) for mark in made.sources] == [("probe/a/1", 3), ("probe/b/1", 7)]
    assert made.ullage_version == RELEASE


def test_the_length_of_a_checkpoint_does_not_grow_with_the_samples() -> None:
    state = State()
    for number in range(500):
        apply_fact(state, number + 1, 0, memory_sampled("a", available=number))
    made = checkpoint(state, {})
    assert made is not None
    assert len(made.events) == 2
