"""Requests and nodes at the edge of what makes sense: each gets the one answer that is right, and soon."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from google.protobuf import json_format

from services.master.allocator import place
from services.master.state import State
from tests.master.facts import instance_released
from tests.master.given_nodes import CRITICAL, GB, UNKNOWN, WARNING, Node, add, even, model, placed, spec, state_of
from tests.master.test_allocator_ways import measured
from ullage.v1 import model_pb2

FIXED = model_pb2.FixedLayers
ABC = (Node("a", 16 * GB), Node("b", 16 * GB), Node("c", 8 * GB))
TENSOR = model_pb2.PARALLELISM_TENSOR
MAX_32, MAX_64 = 2**32 - 1, 2**64 - 1


def answer(state: State, *silent: str, **asked: Any) -> str:
    """The nodes used with their layers, after what was forced; or the reason of the refusal."""
    outcome = place(state, spec(**asked), silent)
    if isinstance(outcome, model_pb2.Refusal):
        return _name(outcome.reason)
    layers = " ".join(f"{shard.node_id}:{shard.end_layer - shard.first_layer}" for shard in outcome.shards)
    return f"past {_name(outcome.forced_past.reason)} {layers}" if outcome.HasField("forced_past") else layers


def _name(reason: model_pb2.RefusalReason.ValueType) -> str:
    return model_pb2.RefusalReason.Name(reason).removeprefix("REFUSAL_REASON_")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"fixed_layers": [FIXED(node_id="a", layers=0)], "exclude_node_ids": ["a"]}, "b:40"),
        ({"fixed_layers": [FIXED(node_id="a", layers=5)], "exclude_node_ids": ["a"]}, "CONTRADICTORY_CONSTRAINTS"),
        ({"exclude_node_ids": ["a", "b", "c"], "force": True}, "NO_ELIGIBLE_NODES"),
        ({"exclude_node_ids": ["a", "a"]}, "b:40"),
        ({"require_node_ids": ["b", "b"]}, "b:40"),
        ({"fixed_layers": [FIXED(node_id="a", layers=30), FIXED(node_id="c", layers=10)]}, "a:30 c:10"),
        ({"fixed_layers": [FIXED(node_id="a", layers=40)], "require_node_ids": ["b"]}, "CONTRADICTORY_CONSTRAINTS"),
        ({"fixed_layers": [FIXED(node_id="a", layers=40)], "min_nodes": 2}, "CONTRADICTORY_CONSTRAINTS"),
        ({"fixed_layers": [FIXED(node_id="a", layers=39)], "min_nodes": 3}, "CONTRADICTORY_CONSTRAINTS"),
        ({"fixed_layers": [FIXED(node_id=each, layers=MAX_32) for each in "ab"]}, "CONTRADICTORY_CONSTRAINTS"),
        ({"fixed_layers": [FIXED(node_id="c", layers=39)]}, "FRAGMENTED"),
        ({"fixed_layers": [FIXED(node_id="c", layers=39)], "force": True}, "past FRAGMENTED a:1 c:39"),
        ({"min_nodes": 0}, "a:40"),
        ({"max_nodes": 0}, "CONTRADICTORY_CONSTRAINTS"),
        ({"min_nodes": MAX_32}, "CONTRADICTORY_CONSTRAINTS"),
        ({"max_nodes": MAX_32}, "a:40"),
        ({"min_nodes": 4, "force": True}, "TOO_FEW_NODES"),
        ({"warning_factor": float("inf")}, "INVALID_REQUEST"),
        ({"warning_factor": 1e-300}, "INVALID_REQUEST"),
        ({"admission": -1}, "INVALID_REQUEST"),
        ({"parallelism": 7}, "INVALID_REQUEST"),
        ({"prompt_tokens_hint": MAX_32}, "CONTEXT_TOO_LONG"),
        ({"replace_instance_id": "nobody", "force": True}, "INVALID_REQUEST"),
    ],
)
def test_constraints_at_their_edges(asked: dict[str, Any], expected: str) -> None:
    assert answer(state_of(ABC, model(even(12 * GB, 40))), **asked) == expected


@pytest.mark.parametrize(
    ("node", "asked", "expected"),
    [
        (Node("a", 16 * GB, CRITICAL), {"include_unknown": True}, "NO_ELIGIBLE_NODES"),
        (Node("a", 16 * GB, CRITICAL), {"require_node_ids": ["a"], "force": True}, "past NO_ELIGIBLE_NODES a:40"),
        (Node("a", None, UNKNOWN, ram=32 * GB), {"include_unknown": True}, "a:40"),
        (Node("a", None, UNKNOWN), {"include_unknown": True}, "NO_ELIGIBLE_NODES"),
        (Node("a", None, read=False), {"force": True}, "past NO_ELIGIBLE_NODES a:40"),
        (Node("a", 16 * GB, runner=False), {"require_node_ids": ["a"], "force": True}, "NO_ELIGIBLE_NODES"),
        (Node("a", 0), {}, "INSUFFICIENT_MEMORY"),
        (Node("a", MAX_64), {}, "a:40"),
        (Node("a", 16 * GB, overhead=MAX_64), {}, "INSUFFICIENT_MEMORY"),
        (Node("a", 16 * GB, device_limit=0), {}, "INSUFFICIENT_MEMORY"),
        (Node("a", 64 * GB, ram=8 * GB), {}, "INSUFFICIENT_MEMORY"),
        (Node("a", 20 * GB, WARNING), {"warning_factor": 0.1}, "a:40"),
        (Node("a", 20 * GB, WARNING), {"admission": model_pb2.ADMISSION_STRICT}, "a:40"),
        (Node("a", 19 * GB, WARNING), {"admission": model_pb2.ADMISSION_STRICT}, "INSUFFICIENT_MEMORY"),
    ],
)
def test_nodes_of_which_little_or_nonsense_is_known(node: Node, asked: dict[str, Any], expected: str) -> None:
    assert answer(state_of([node], model(even(12 * GB, 40))), **asked) == expected


@pytest.mark.parametrize(("level", "expected"), [(CRITICAL, "NO_ELIGIBLE_NODES"), (UNKNOWN, "b:40"), (WARNING, "b:40")])
def test_a_silent_node_gets_nothing_whatever_its_last_level(level: Any, expected: str) -> None:
    nodes = [Node("a", 16 * GB, level), Node("b", 16 * GB, level)]

    assert answer(state_of(nodes, model(even(12 * GB, 40))), "a", include_unknown=True) == expected


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (model([2**63] * 2), "INSUFFICIENT_MEMORY"),
        (model([MAX_64] * 4), "INSUFFICIENT_MEMORY"),
        (model([17 * GB, GB]), "LAYER_TOO_LARGE"),
        (model([GB] * 4, embedding=17 * GB), "ENDPOINT_TOO_LARGE"),
        (model([GB] * 4, embedding=13 * GB, tied_embedding=True), "a:2 b:2"),
        (model([GB] * 4, embedding=12 * GB, tied_embedding=True), "a:4"),
        (model(even(GB, 8), kv=2048, kv_allocation_step_tokens=MAX_32), "INSUFFICIENT_MEMORY"),
        (model(even(GB, 8), kv=2048), "a:8"),
    ],
)
def test_models_of_odd_sizes(shape: model_pb2.Model, expected: str) -> None:
    assert answer(state_of(ABC, shape), force=False) == expected


def test_replacing_credits_its_nodes_with_force_or_without_it() -> None:
    state = state_of([Node("a", 20 * GB)], model(even(12 * GB, 40)))
    add(state, placed("i1", _placed(state), spec()))

    assert answer(state) == "BLOCKED_BY_PROMISES"
    assert answer(state, force=True) == "past BLOCKED_BY_PROMISES a:40"
    assert answer(state, replace_instance_id="i1", force=True) == "a:40"
    add(state, instance_released("i1"))
    assert answer(state, replace_instance_id="i1") == "a:40"


def test_replacing_what_is_on_an_excluded_node_moves_it() -> None:
    state = state_of(ABC, model(even(12 * GB, 40)))
    add(state, placed("i1", _placed(state), spec()))

    assert answer(state, replace_instance_id="i1", exclude_node_ids=["a"]) == "b:40"


def _placed(state: State) -> model_pb2.Placement:
    outcome = place(state, spec(), ())
    assert isinstance(outcome, model_pb2.Placement)
    return outcome


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        ({"exclude_node_ids": ["a", "b", "c"]}, "Exclude no node"),
        ({"min_nodes": 4}, "Ask for fewer than 4 nodes"),
        ({"fixed_layers": [FIXED(node_id="c", layers=39)]}, "Fix no layers"),
        ({"require_node_ids": ["d"]}, "Require no node by name"),
    ],
)
def test_a_constraint_that_alone_is_in_the_way_is_what_to_give_up(asked: dict[str, Any], remedy: str) -> None:
    nodes = [*ABC, Node("d", 64 * GB, runner=False)]
    outcome = place(state_of(nodes, model(even(20 * GB, 40))), spec(**asked), ())

    assert isinstance(outcome, model_pb2.Refusal)
    assert remedy in [each.text for each in outcome.remedies]


def test_who_includes_unknown_nodes_is_not_told_to_do_so() -> None:
    outcome = place(state_of([Node("a", None, UNKNOWN)], model([1])), spec(include_unknown=True), ())

    assert isinstance(outcome, model_pb2.Refusal)
    assert outcome.remedies[0].text == "Start a probe on a"


def test_a_window_of_no_tokens_is_none() -> None:
    shape = model([GB] * 2, kv=1024)
    shape.layers[0].kv_window_tokens = 0
    outcome = place(state_of(ABC, shape), spec(context_tokens=4096), ())

    assert isinstance(outcome, model_pb2.Placement)
    assert outcome.shards[0].bytes.kv_bytes == 2 * 1024 * 2 * 4096


def test_heads_beyond_counting_are_divided_all_the_same() -> None:
    shape = model([GB] * 4, kv_heads=MAX_32, hidden_size=MAX_32)

    assert answer(state_of(ABC, shape), parallelism=TENSOR) == "TENSOR_NOT_RUNNABLE"
    assert answer(state_of(ABC, shape), parallelism=TENSOR, max_nodes=2) == "TENSOR_INDIVISIBLE"
    assert answer(state_of(ABC, model([GB], hidden_size=64)), parallelism=TENSOR) == "TENSOR_INDIVISIBLE"


def test_a_tensor_group_that_does_not_reach_each_other_is_not_said_to_be_too_small() -> None:
    state = state_of(ABC, model(even(20 * GB, 40), kv_heads=8, hidden_size=4096))
    outcome = place(measured(state, [("a", "b", None)]), spec(parallelism=TENSOR), ())

    assert isinstance(outcome, model_pb2.Refusal)
    assert "of 3 nodes too few hold 2.33 GiB and reach each other" in outcome.message


def test_links_to_oneself_and_to_nobody_change_nothing() -> None:
    state = state_of(ABC, model(even(20 * GB, 40)))

    assert answer(measured(state, [("a", "a", None), ("a", "zz", None), ("zz", "a", None)])) == "a:20 b:20"


@pytest.mark.parametrize("force", [False, True])
def test_a_node_that_would_need_more_bytes_than_there_are_numbers_is_refused(force: bool) -> None:
    shape = model([2**38, 2**39, 2**38, 2**37], hidden_size=2**24, kv_allocation_step_tokens=256)
    others = [Node(name, 2**40, ram=2**40) for name in "abc"]
    giant = Node("z", 2**40, ram=2**40, element_bytes=MAX_32)
    state = measured(state_of([*others, giant], shape), [("a", "b", None)])
    assert answer(state, context_tokens=4096).split(":")[0] in {"a", "b", "c"}
    assert answer(state, context_tokens=4096, require_node_ids=["z"], force=force) == "FRAGMENTED"


def test_a_time_that_no_duration_can_say_is_the_longest_that_one_can() -> None:
    state = state_of([Node("a", 2**62, ram=2**62, speed=1)], model([2**60]))
    placement = place(state, spec(), ())
    assert isinstance(placement, model_pb2.Placement)
    assert placement.time_per_token.ToTimedelta() > timedelta(days=3_000_000)
    json_format.MessageToJson(placement)
