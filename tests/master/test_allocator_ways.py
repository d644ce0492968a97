"""Ways between nodes: one-way, missing, slow; and what a request may wish for beside memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf import duration_pb2

from services.master.allocator import place
from services.master.state import State
from tests.master.facts import instance_released
from tests.master.given_nodes import (
    CRITICAL,
    GB,
    GIB,
    NORMAL,
    WARNING,
    Node,
    add,
    even,
    layers_by_node,
    model,
    placed,
    spec,
    state_of,
)
from ullage.v1 import event_pb2, model_pb2, node_pb2

Way = tuple[str, str, float | None]
"""From, to, milliseconds; None where it was tried in vain."""


def measured(state: State, ways: Sequence[Way]) -> State:
    for sender, receiver, milliseconds in ways:
        link = node_pb2.Link(from_node_id=sender, to_node_id=receiver, reachable=milliseconds is not None)
        if milliseconds is not None:
            latency = duration_pb2.Duration()
            latency.FromNanoseconds(round(milliseconds * 1e6))
            link.latency.CopyFrom(latency)
        add(state, event_pb2.Fact(link_measured=event_pb2.LinkMeasured(link=link)))
    return state


def decision(state: State, **asked: Any) -> model_pb2.Placement:
    outcome = place(state, spec(**asked), ())
    assert isinstance(outcome, model_pb2.Placement), outcome.message
    return outcome


def refusal(state: State, **asked: Any) -> model_pb2.Refusal:
    outcome = place(state, spec(**asked), ())
    assert isinstance(outcome, model_pb2.Refusal)
    return outcome


def order(placement: model_pb2.Placement) -> list[str]:
    return [shard.node_id for shard in placement.shards]


THREE = [Node("a", 4 * GB, speed=GB), Node("b", 4 * GB, speed=GB), Node("c", 4 * GB, speed=GB)]
BOTH_WAYS_BROKEN: list[Way] = [("a", "b", None), ("b", "a", None)]


def test_nodes_that_do_not_reach_each_other_are_no_neighbours() -> None:
    state = measured(state_of(THREE, model(even(12 * GB, 12))), [("a", "b", None), ("b", "c", None), ("c", "a", None)])

    ring = order(decision(state))

    assert {(one, two) for one, two in zip(ring, [*ring[1:], ring[0]], strict=True)} == {
        ("a", "c"),
        ("c", "b"),
        ("b", "a"),
    }


def test_a_pair_that_does_not_reach_each_other_is_not_used_as_one() -> None:
    state = measured(state_of(THREE, model(even(8 * GB, 8))), BOTH_WAYS_BROKEN)

    assert "c" in layers_by_node(decision(state))


def test_a_ring_is_closed_by_the_sampled_token_so_a_one_way_pair_will_not_do() -> None:
    state = measured(state_of(THREE[:2], model(even(8 * GB, 8))), [("a", "b", None)])

    answer = refusal(state)

    assert answer.reason == model_pb2.REFUSAL_REASON_NO_PATH
    assert "its nodes fall into groups that do not reach each other both ways: {a} and {b}" in answer.message
    assert not any(remedy.force for remedy in answer.remedies)


def test_a_node_that_reaches_nobody_is_left_out_as_unreachable() -> None:
    state = measured(state_of(THREE, model(even(12 * GB, 12))), [("a", "b", None), ("a", "c", None)])

    answer = refusal(state)

    assert answer.reason == model_pb2.REFUSAL_REASON_NO_PATH
    assert {node.node_id: node.exclusion for node in answer.nodes if node.HasField("exclusion")} == {
        "a": model_pb2.EXCLUSION_UNREACHABLE
    }


def test_a_node_that_reaches_nobody_is_good_for_a_model_it_holds_alone() -> None:
    state = measured(state_of([Node("a", 9 * GB), Node("b", 4 * GB)], model(even(8 * GB, 8))), BOTH_WAYS_BROKEN)

    assert order(decision(state)) == ["a"]


def test_what_one_of_two_that_do_not_reach_each_other_needs_to_hold_it_alone_is_said() -> None:
    nodes = [Node("a", 8 * GIB, ram=8 * GIB), Node("b", 8 * GIB, ram=32 * GIB)]
    answer = refusal(measured(state_of(nodes, model(even(14 * GIB, 8))), BOTH_WAYS_BROKEN))

    assert answer.reason == model_pb2.REFUSAL_REASON_NO_PATH
    assert [remedy.text for remedy in answer.remedies] == ["Free 6.01 GiB on b"]
    assert answer.retryable


def test_a_model_that_more_ways_would_not_bring_on_is_refused_for_want_of_memory() -> None:
    nodes = [Node("a", 8 * GIB, ram=16 * GIB), Node("b", 8 * GIB, ram=32 * GIB)]
    answer = refusal(measured(state_of(nodes, model(even(30 * GIB, 8))), BOTH_WAYS_BROKEN))

    assert answer.reason == model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY
    assert "needs 30.0 GiB and 2 nodes can give 16.0 GiB: 14.0 GiB short" in answer.message
    assert answer.remedies[-1].force


@pytest.mark.parametrize("level", [NORMAL, CRITICAL])
def test_a_node_that_no_other_reaches_can_be_forced_to_hold_it_alone(level: Any) -> None:
    nodes = [Node("a", 8 * GIB, level, ram=8 * GIB), Node("b", 8 * GIB, level, ram=32 * GIB)]
    state = measured(state_of(nodes, model(even(14 * GIB, 8))), BOTH_WAYS_BROKEN)

    assert order(decision(state, force=True)) == ["b"]


def test_force_is_advised_where_the_nodes_left_out_are_out_of_reach() -> None:
    nodes = [Node("a", 8 * GIB, ram=16 * GIB), Node("b", 8 * GIB, CRITICAL, ram=16 * GIB)]
    state = measured(state_of(nodes, model(even(30 * GIB, 8))), BOTH_WAYS_BROKEN)

    assert refusal(state).remedies[-1].force
    assert order(decision(state, force=True)) == ["a"]


def test_many_nodes_of_which_some_do_not_reach_some_are_placed_on_those_that_do() -> None:
    nodes = [Node(f"n{i:02}", GB) for i in range(12)]
    state = state_of(nodes, model(even(9 * GB, 9)))
    measured(state, [(f"n{i:02}", "n03", None) for i in range(12) if i != 3])

    assert "n03" not in order(decision(state))


def test_the_order_of_ranks_takes_the_quickest_way_round() -> None:
    state = state_of(THREE, model(even(12 * GB, 12)))
    measured(state, [("a", "c", 0.1), ("c", "b", 0.1), ("b", "a", 0.1), ("a", "b", 9), ("b", "c", 9), ("c", "a", 9)])

    chosen = decision(state)

    ring = order(chosen)
    assert ring[(ring.index("a") + 1) % 3] == "c"
    assert [shard.hop_time.ToMicroseconds() for shard in chosen.shards] == [100, 100, 100]


def test_the_parts_of_the_predicted_time_add_up_to_it() -> None:
    chosen = decision(state_of(THREE, model(even(8 * GB, 8))))

    parts = [time.ToNanoseconds() for shard in chosen.shards for time in (shard.stage_time, shard.hop_time)]
    assert sum(parts) == chosen.time_per_token.ToNanoseconds()
    assert [shard.stage_time.ToMilliseconds() for shard in chosen.shards] == [4000, 4000]


def test_a_bandwidth_counts_with_the_activations_that_cross_it() -> None:
    nodes = [Node("a", 5 * GB, speed=GB), Node("b", 5 * GB, speed=GB)]
    state = state_of(nodes, model(even(8 * GB, 8), hidden_size=1000))
    for sender, receiver in (("a", "b"), ("b", "a")):
        link = node_pb2.Link(from_node_id=sender, to_node_id=receiver, reachable=True)
        link.latency.FromMilliseconds(1)
        link.bandwidth_bytes_per_second = 1_000_000
        add(state, event_pb2.Fact(link_measured=event_pb2.LinkMeasured(link=link)))

    # Two bytes for each of 1000 numbers onward; the token on its way back takes no bandwidth to speak of.
    assert [shard.hop_time.ToMilliseconds() for shard in decision(state).shards] == [3, 1]


def test_long_prompts_send_layers_to_whoever_computes_fast() -> None:
    state = state_of([Node("reader", 8 * GB, speed=2 * GB), Node("computer", 8 * GB, speed=GB)], model(even(4 * GB, 8)))
    for node_id, flops in (("reader", 1e10), ("computer", 1e13)):
        profile = node_pb2.RunnerProfile()
        runner = state.nodes[node_id].runner
        assert runner is not None
        profile.CopyFrom(runner)
        profile.flops_per_second = flops
        add(state, event_pb2.Fact(runner_announced=event_pb2.RunnerAnnounced(profile=profile)))

    assert order(decision(state, context_tokens=2048)) == ["reader"]
    assert order(decision(state, context_tokens=2048, prompt_tokens_hint=2000)) == ["computer"]


def test_the_factor_of_warning_can_be_chosen_and_is_recorded() -> None:
    state = state_of([Node("a", 10 * GB), Node("b", 10 * GB, WARNING)], model(even(12 * GB, 12)))

    assert layers_by_node(decision(state)) == {"a": 8, "b": 4}
    chosen = decision(state, warning_factor=1.0)
    assert layers_by_node(chosen) == {"a": 6, "b": 6}
    assert [node.pressure_factor for node in chosen.nodes] == [1.0, 1.0]


@pytest.mark.parametrize("factor", [0.0, -1.0, 0.05, 1.2, float("nan"), float("inf"), float("-inf")])
def test_a_factor_that_is_none_is_refused(factor: float) -> None:
    answer = refusal(state_of([Node("a", GB)], model([1])), warning_factor=factor)

    assert answer.reason == model_pb2.REFUSAL_REASON_INVALID_REQUEST
    assert "ask for 0.1 to 1" in answer.message


@pytest.mark.parametrize(("faster", "expected"), [(1.03, ["a"]), (1.10, ["b"])])
def test_a_replacement_stays_where_it_is_unless_elsewhere_is_better_by_more_than_noise(
    faster: float, expected: list[str]
) -> None:
    state = state_of([Node("a", 20 * GB, speed=GB), Node("b", 1)], model(even(8 * GB, 8)))
    first = decision(state)
    add(state, placed("i1", first, spec()))
    state_b = Node("b", 20 * GB, speed=faster * GB)
    again = state_of([Node("a", 20 * GB, speed=GB), state_b], model(even(8 * GB, 8)))
    add(again, placed("i1", first, spec()))

    assert order(decision(again, replace_instance_id="i1")) == expected
    add(again, instance_released("i1"))
    assert order(decision(again)) == ["b"]


HEADS = {"attention_heads": 32, "kv_heads": 8, "hidden_size": 4096}


def test_a_tensor_group_is_planned_and_not_run() -> None:
    nodes = [Node(name, 30 * GIB, speed=100 * GIB, name=name) for name in "abcd"]
    ways: list[Way] = [(one, two, 0.05) for one in "abcd" for two in "abcd" if one != two]
    state = measured(state_of(nodes, model(even(40 * GIB, 40), **HEADS)), ways)

    answer = refusal(state, parallelism=model_pb2.PARALLELISM_TENSOR, force=True)

    assert answer.reason == model_pb2.REFUSAL_REASON_TENSOR_NOT_RUNNABLE
    # A quarter of 40 GiB at 100 GiB/s, and six ways of 0.05 ms for each of 80 sums over four nodes, divided by four.
    assert "a, b, c and d would each hold 10.0 GiB and take 106.0 ms, 6.0 ms of it waiting" in answer.message
    assert [remedy.text for remedy in answer.remedies] == ["Ask for a pipeline"]


def test_tp_a_tensor_model_whose_share_the_smaller_node_does_not_hold_has_no_group() -> None:
    state = state_of([Node("a", 30 * GIB), Node("b", 8 * GIB)], model(even(36 * GIB, 36), **HEADS))

    answer = refusal(state, parallelism=model_pb2.PARALLELISM_TENSOR)

    assert answer.reason == model_pb2.REFUSAL_REASON_TENSOR_NOT_RUNNABLE
    assert "among 2, 4 and 8 nodes, and of 2 nodes too few hold" in answer.message


def test_heads_that_do_not_divide_are_told_with_the_counts_that_would() -> None:
    shape = model(even(GB, 4), attention_heads=52, kv_heads=4, hidden_size=6656)

    answer = refusal(
        state_of([Node("a", GB)], shape), parallelism=model_pb2.PARALLELISM_TENSOR, min_nodes=3, max_nodes=3
    )

    assert answer.reason == model_pb2.REFUSAL_REASON_TENSOR_INDIVISIBLE
    assert "which divide among groups of 2 and 4 nodes" in answer.message
