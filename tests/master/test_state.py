"""What facts mean: each kind's effect, and what is promised while shards load, run and end."""

from __future__ import annotations

from services.master.state import State, apply_fact
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
from ullage.v1 import event_pb2, model_pb2, node_pb2

ASSIGNED, LOADING, RUNNING, FAILED, UNLOADED = (
    model_pb2.SHARD_PHASE_ASSIGNED,
    model_pb2.SHARD_PHASE_LOADING,
    model_pb2.SHARD_PHASE_RUNNING,
    model_pb2.SHARD_PHASE_FAILED,
    model_pb2.SHARD_PHASE_UNLOADED,
)


def after(*facts: event_pb2.Fact) -> State:
    """The state these facts make."""
    state = State()
    for sequence, fact in enumerate(facts, start=1):
        apply_fact(state, sequence, sequence * 1000, fact)
    return state


def test_a_sample_from_a_node_never_announced_makes_the_node_with_its_identity_unknown() -> None:
    state = after(memory_sampled("a", available=5))
    assert list(state.nodes) == ["a"]
    node = state.nodes["a"]
    assert node.identity == node_pb2.NodeIdentity(node_id="a")
    assert not node.identity.HasField("friendly_name")
    assert not node.identity.HasField("chip")
    assert not node.identity.HasField("model")
    assert node.memory is not None
    assert node.memory.ram_available_bytes == 5
    assert node.system is None
    assert node.links == {}


def test_a_sample_from_a_known_node_changes_its_memory_alone() -> None:
    known = (node_announced("a", friendly_name="desk"), system_sampled("a", cpu_pct=3.0), link_measured("a", "b"))
    before, state = after(*known), after(*known, memory_sampled("a", available=5))
    assert state.nodes["a"].memory == memory_sampled("a", available=5).memory_sampled.sample
    assert state.nodes["a"].identity == before.nodes["a"].identity
    assert state.nodes["a"].system == before.nodes["a"].system
    assert state.nodes["a"].links == before.nodes["a"].links


def test_a_node_that_announces_itself_later_keeps_what_it_sampled() -> None:
    state = after(memory_sampled("a", available=5), node_announced("a", friendly_name="desk"))
    assert state.nodes["a"].identity.friendly_name == "desk"
    assert state.nodes["a"].memory is not None
    assert state.nodes["a"].memory.ram_available_bytes == 5


def test_the_full_profile_brings_its_memory_with_it() -> None:
    fact = system_sampled("a", cpu_pct=3.0)
    fact.system_sampled.sample.memory.ram_available_bytes = 7
    state = after(memory_sampled("a", available=5), fact, system_sampled("a", cpu_pct=4.0))
    assert state.nodes["a"].memory is not None
    assert state.nodes["a"].memory.ram_available_bytes == 7
    assert state.nodes["a"].system is not None
    assert state.nodes["a"].system.cpu_pct == 4.0


def test_ten_restarts_of_a_node_leave_one_node() -> None:
    state = after(*[node_announced("a", boot_id=f"boot-{n}") for n in range(10)])
    assert [node.identity.boot_id for node in state.nodes.values()] == ["boot-9"]


def test_a_removed_node_is_gone_until_it_is_heard_again() -> None:
    assert after(memory_sampled("a"), node_removed("a")).nodes == {}
    assert list(after(memory_sampled("a"), node_removed("a"), memory_sampled("a")).nodes) == ["a"]


def test_a_fact_of_an_unknown_kind_is_counted_and_changes_nothing_else() -> None:
    state = after(memory_sampled("a"), unknown_kind(), unknown_kind())
    assert state.unapplied_events == 2
    assert state.sequence == 3
    assert list(state.nodes) == ["a"]


def test_facts_about_what_is_not_there_are_taken_without_effect() -> None:
    state = after(
        instance_released("none"),
        shard_status(RUNNING, "none"),
        node_removed("none"),
        event_pb2.Fact(model_removed=event_pb2.ModelRemoved(model_id="none")),
    )
    assert (state.nodes, state.models, state.instances) == ({}, {}, {})


def test_a_placed_shard_is_promised_whole_until_samples_show_it_taken() -> None:
    placed = (model_registered(), memory_sampled(), instance_placed(total_bytes=4 * GIB))
    assert after(*placed).nodes["a"].promised_bytes == 4 * GIB
    grown = (*placed, shard_status(LOADING, resident_bytes=3 * GIB))
    assert after(*grown).nodes["a"].promised_bytes == 4 * GIB
    # The first sample after the report may have been read before the shard grew.
    assert after(*grown, memory_sampled()).nodes["a"].promised_bytes == 4 * GIB
    assert after(*grown, memory_sampled(), memory_sampled()).nodes["a"].promised_bytes == GIB


def test_on_a_node_with_an_operators_figure_a_running_shard_stays_promised() -> None:
    sample = memory_sampled("a")
    sample.memory_sampled.sample.flags.append(node_pb2.MEMORY_FLAG_OVERRIDDEN)
    running = (
        model_registered(),
        sample,
        instance_placed(total_bytes=4 * GIB),
        shard_status(RUNNING, resident_bytes=3 * GIB),
    )
    assert after(*running, sample, sample, sample).nodes["a"].promised_bytes == 4 * GIB


def test_a_shard_larger_than_its_promise_owes_nothing_more() -> None:
    state = after(
        model_registered(),
        instance_placed(total_bytes=GIB),
        shard_status(RUNNING, resident_bytes=2 * GIB),
        memory_sampled(),
        memory_sampled(),
    )
    assert state.nodes["a"].promised_bytes == 0


def test_a_release_frees_at_once_what_no_runner_has_taken_up() -> None:
    state = after(model_registered(), instance_placed(node_ids=["a", "b"]), instance_released())
    assert state.instances["i"].state == model_pb2.INSTANCE_STATE_RELEASED
    assert [node.promised_bytes for node in state.nodes.values()] == [0, 0]
    assert [node.shards for node in state.nodes.values()] == [{}, {}]


def test_a_release_waits_for_shards_that_are_there() -> None:
    running = (model_registered(), instance_placed(), shard_status(RUNNING, resident_bytes=GIB), instance_released())
    state = after(*running)
    assert state.instances["i"].state == model_pb2.INSTANCE_STATE_RELEASING
    assert state.nodes["a"].shards["i", 0].resident_bytes == GIB
    # No sample shows yet that it holds them: until one does, or it has ended, they are not there for another.
    assert state.nodes["a"].promised_bytes == GIB
    assert after(*running, memory_sampled(), memory_sampled()).nodes["a"].promised_bytes == 0
    state = after(*running, shard_status(UNLOADED))
    assert state.instances["i"].state == model_pb2.INSTANCE_STATE_RELEASED
    assert state.nodes["a"].shards == {}


def test_an_instance_runs_when_all_its_shards_do() -> None:
    placed = (model_registered(), instance_placed(node_ids=["a", "b"]))
    assert after(*placed).instances["i"].state == model_pb2.INSTANCE_STATE_PLACED
    one = (*placed, shard_status(RUNNING))
    assert after(*one).instances["i"].state == model_pb2.INSTANCE_STATE_LOADING
    both = (*one, shard_status(RUNNING, rank=1, node_id="b"))
    assert after(*both).instances["i"].state == model_pb2.INSTANCE_STATE_RUNNING


def test_a_failed_shard_fails_its_instance_by_name_and_frees_what_was_not_taken() -> None:
    state = after(
        model_registered(),
        node_announced("b", friendly_name="shelf"),
        instance_placed(node_ids=["a", "b"], total_bytes=GIB),
        shard_status(LOADING, rank=0, resident_bytes=GIB // 2),
        shard_status(FAILED, rank=1, node_id="b", failure="killed by the kernel"),
    )
    assert state.instances["i"].state == model_pb2.INSTANCE_STATE_FAILED
    assert state.instances["i"].failure == "rank 1 on shelf failed while LOADING: killed by the kernel"
    assert [state.nodes[node_id].promised_bytes for node_id in "ab"] == [GIB // 2, 0]
    assert list(state.nodes["a"].shards) == [("i", 0)]
    assert state.nodes["b"].shards == {}


def test_a_status_that_was_overtaken_changes_nothing() -> None:
    state = after(model_registered(), instance_placed(), shard_status(RUNNING), shard_status(LOADING))
    assert state.instances["i"].shards[0].status.phase == RUNNING
    state = after(model_registered(), instance_placed(), shard_status(FAILED), shard_status(RUNNING))
    assert state.instances["i"].shards[0].status.phase == FAILED


def test_a_runner_that_was_restarted_has_lost_its_shards() -> None:
    state = after(
        model_registered(),
        runner_announced("a", "first"),
        instance_placed(),
        shard_status(RUNNING, resident_bytes=GIB),
        runner_announced("a", "second"),
    )
    assert state.instances["i"].state == model_pb2.INSTANCE_STATE_FAILED
    assert "its runner was restarted" in state.instances["i"].failure
    assert state.nodes["a"].shards == {}


def test_a_runner_that_dials_again_keeps_its_shards() -> None:
    state = after(
        model_registered(),
        runner_announced("a", "first"),
        instance_placed(),
        shard_status(RUNNING),
        runner_announced("a", "first"),
    )
    assert state.instances["i"].state == model_pb2.INSTANCE_STATE_RUNNING


def test_a_request_is_remembered_with_its_instance() -> None:
    assert after(model_registered(), instance_placed(request_id="r")).requests == {"r": "i"}


def test_an_instance_keeps_the_model_it_was_placed_with() -> None:
    state = after(model_registered(digest="d1"), instance_placed(), model_registered(digest="d2"))
    assert state.instances["i"].model.digest == "d1"
    assert state.models["m"].digest == "d2"


def test_applying_a_fact_leaves_the_fact_as_it_was() -> None:
    facts = [model_registered(), instance_placed(), shard_status(ASSIGNED, resident_bytes=1), instance_released()]
    before = [fact.SerializeToString() for fact in facts]
    after(*facts)
    assert [fact.SerializeToString() for fact in facts] == before
