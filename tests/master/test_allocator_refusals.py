"""Every no has a type, numbers that prove it, every node's name, and a remedy that was tried."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.master.allocator import place
from services.master.state import State
from tests.master.facts import instance_released, shard_status
from tests.master.given_nodes import (
    CRITICAL,
    GB,
    GIB,
    NORMAL,
    UNKNOWN,
    WARNING,
    Node,
    add,
    even,
    facts_of,
    layers_by_node,
    model,
    placed,
    spec,
    state_of,
)
from ullage.v1 import model_pb2

MIB = 2**20
FIXED = model_pb2.FixedLayers


def refusal(state: State, *silent: str, **asked: Any) -> model_pb2.Refusal:
    outcome = place(state, spec(**asked), silent)
    assert isinstance(outcome, model_pb2.Refusal), outcome.explanation
    return outcome


def reason(state: State, *silent: str, **asked: Any) -> str:
    return model_pb2.RefusalReason.Name(refusal(state, *silent, **asked).reason).removeprefix("REFUSAL_REASON_")


def exclusions(answer: model_pb2.Refusal) -> dict[str, str]:
    return {
        budget.node_id: model_pb2.Exclusion.Name(budget.exclusion).removeprefix("EXCLUSION_")
        for budget in answer.nodes
        if budget.HasField("exclusion")
    }


def test_the_whole_message_of_a_refusal_for_want_of_memory() -> None:
    nodes = [
        Node("1f", 6 * GIB, overhead=GIB, name="anna"),
        Node("2f", 4 * GIB, WARNING, overhead=GIB, name="berta"),
        Node("3f", 64 * GIB, CRITICAL, overhead=GIB, name="clara"),
    ]
    answer = refusal(state_of(nodes, model(even(12 * GIB, 12), kv=2**17)), context_tokens=2048, concurrent_sequences=2)

    assert answer.message == (
        "m with 2048 tokens of context for 2 sequences needs 24.5 GiB and 2 nodes can give 8.00 GiB: 16.5 GiB short.\n"
        "  anna: NORMAL x1, 6.00 GiB available - 0 promised - 1.00 GiB overhead = 5.00 GiB: 2 of 12 layers\n"
        "  berta: WARNING x0.6, 4.00 GiB available - 0 promised - 1.00 GiB overhead = 3.00 GiB: 1 of 12 layers\n"
        "  clara: CRITICAL x0, 64.0 GiB available - 0 promised - 1.00 GiB overhead = 63.0 GiB; "
        "left out: its memory pressure is CRITICAL\n"
        "What would help:\n"
        "  Free 17.51 GiB on anna\n"
        "  Free 17.51 GiB on berta\n"
        "  Force it, and risk swapping or a killed process"
    )
    assert answer.needed_bytes == 24 * GIB + 512 * MIB
    assert answer.offered_bytes == 8 * GIB
    assert answer.retryable


def test_x10_no_node_at_all() -> None:
    answer = refusal(state_of([], model([1])))

    assert answer.reason == model_pb2.REFUSAL_REASON_NO_NODES
    assert answer.message == "No node has been heard of: start `ullage node` on a machine, then see `ullage status`."
    assert answer.retryable


def test_x10_every_node_critical_and_every_node_unknown_are_told_apart() -> None:
    shape = model([1])
    pressed = refusal(state_of([Node("a", 9, CRITICAL), Node("b", 9, CRITICAL)], shape))
    unknown = refusal(state_of([Node("a", 9, UNKNOWN), Node("b", 9, UNKNOWN)], shape))

    assert pressed.reason == unknown.reason == model_pb2.REFUSAL_REASON_NO_ELIGIBLE_NODES
    assert exclusions(pressed) == {"a": "CRITICAL", "b": "CRITICAL"}
    assert exclusions(unknown) == {"a": "UNKNOWN_LEVEL", "b": "UNKNOWN_LEVEL"}
    assert "Include nodes whose level or memory is unknown, at your own risk" in [
        remedy.text for remedy in unknown.remedies
    ]


def test_x9_three_nodes_three_reasons() -> None:
    nodes = [Node("a", 64 * GB, CRITICAL), Node("b", 16 * GB), Node("c", 8 * GB)]
    answer = refusal(state_of(nodes, model(even(20 * GB, 32))), "c")

    assert answer.reason == model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY
    assert exclusions(answer) == {"a": "CRITICAL", "c": "STALE"}
    assert "a: CRITICAL" in answer.message
    assert "b: NORMAL x1, 14.9 GiB available" in answer.message
    assert "c: NORMAL x1, 7.45 GiB available - 0 promised - 0 overhead = 7.45 GiB; left out: silent" in answer.message


@pytest.mark.parametrize(
    ("node", "silent", "expected", "words"),
    [
        (Node("a", 9, CRITICAL), False, "CRITICAL", "its memory pressure is CRITICAL"),
        (Node("a", 9, UNKNOWN), False, "UNKNOWN_LEVEL", "its pressure level is unknown"),
        (Node("a", None), False, "NO_MEMORY_READING", "no memory reading"),
        (Node("a", 9, read=False), False, "NO_MEMORY_READING", "no memory reading"),
        (Node("a", 9), True, "STALE", "silent, its probe or its runner has not been heard of late"),
        (Node("a", 9, runner=False), False, "NO_RUNNER", "no runner has announced itself there"),
        (Node("a", 9, models=("other",)), False, "MODEL_ABSENT", "run `ullage models add` there"),
        (Node("a", 9, CRITICAL), True, "STALE", "silent, its probe or its runner has not been heard of late"),
        (Node("a", 9, runner=False), True, "NO_RUNNER", "no runner has announced itself there"),
    ],
)
def test_a_node_is_left_out_for_the_weightiest_reason(node: Node, *, silent: bool, expected: str, words: str) -> None:
    answer = refusal(state_of([node], model([1])), *(["a"] if silent else []))

    assert answer.reason == model_pb2.REFUSAL_REASON_NO_ELIGIBLE_NODES
    assert exclusions(answer) == {"a": expected}
    assert words in answer.message


def test_a_node_without_the_model_can_take_layers_while_one_that_has_it_is_heard() -> None:
    nodes = [Node("a", 9 * GB, models=("other",)), Node("b", 9 * GB)]

    assert exclusions(refusal(state_of(nodes, model(even(40 * GB, 40))))).get("a") is None
    assert exclusions(refusal(state_of(nodes, model(even(40 * GB, 40))), "b")) == {"a": "MODEL_ABSENT", "b": "STALE"}


def test_a_reading_without_a_level_is_of_unknown_level() -> None:
    state = state_of([Node("a", 9)], model([1]))
    memory = state.nodes["a"].memory
    assert memory is not None
    memory.ClearField("pressure_level")

    assert exclusions(refusal(state)) == {"a": "UNKNOWN_LEVEL"}


def test_fit_leaves_nothing_for_the_process_and_says_exactly_what_is_short() -> None:
    node = Node("a", 8 * GIB, ram=16 * GIB, overhead=200 * MIB)
    answer = refusal(state_of([node], model(even(8 * GIB, 32))))

    assert answer.reason == model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY
    assert (answer.needed_bytes or 0) - (answer.offered_bytes or 0) == 200 * MIB
    assert answer.remedies[0].text == "Free 0.20 GiB on a"
    assert answer.remedies[0].more_bytes == 200 * MIB


def test_bytes_in_pieces_too_small_for_whole_layers_are_fragmented() -> None:
    assert reason(state_of([Node("a", 10), Node("b", 10)], model([6] * 3))) == "FRAGMENTED"


def test_a_layer_larger_than_any_node_is_named() -> None:
    answer = refusal(state_of([Node("a", 10), Node("b", 10), Node("c", 10)], model([1, 11, 1])))

    assert answer.reason == model_pb2.REFUSAL_REASON_LAYER_TOO_LARGE
    assert "its largest layer needs 11 bytes on one node and none has more than 10 bytes" in answer.message


def test_an_embedding_larger_than_any_node_is_named() -> None:
    answer = refusal(state_of([Node("a", 10), Node("b", 10), Node("c", 10)], model([2, 2, 2], embedding=9)))

    assert answer.reason == model_pb2.REFUSAL_REASON_ENDPOINT_TOO_LARGE
    assert "its first layer with the embedding needs 11 bytes" in answer.message


def test_too_few_nodes_for_those_asked_for() -> None:
    nodes = [Node("a", 10), Node("b", 10, CRITICAL)]
    answer = refusal(state_of(nodes, model([1, 1])), min_nodes=2)

    assert answer.reason == model_pb2.REFUSAL_REASON_TOO_FEW_NODES
    assert "at least 2 nodes are asked for and 1 can be used" in answer.message


def test_a_required_node_that_is_left_out_is_named() -> None:
    nodes = [Node("a", 10), Node("b", 10, CRITICAL, name="berta")]
    answer = refusal(state_of(nodes, model([1, 1])), require_node_ids=["b"])

    assert answer.reason == model_pb2.REFUSAL_REASON_TOO_FEW_NODES
    assert "berta must get layers and is left out: its memory pressure is CRITICAL" in answer.message
    assert "Relieve the memory of berta" in [remedy.text for remedy in answer.remedies]


@pytest.mark.parametrize(
    ("asked", "expected", "words"),
    [
        ({"model_id": "x"}, "INVALID_REQUEST", "no model is called 'x'"),
        ({"context_tokens": 0}, "INVALID_REQUEST", "a context of 0 tokens holds nothing"),
        ({"concurrent_sequences": 0}, "INVALID_REQUEST", "ask for 1 to 65536"),
        ({"concurrent_sequences": 2**32 - 1}, "INVALID_REQUEST", "ask for 1 to 65536"),
        ({"admission": 77}, "INVALID_REQUEST", "does not know the admission"),
        ({"objective": 77}, "INVALID_REQUEST", "does not know the admission or the objective"),
        ({"parallelism": 77}, "INVALID_REQUEST", "does not know the parallelism"),
        ({"replace_instance_id": "gone"}, "INVALID_REQUEST", "no instance is called 'gone'"),
        ({"context_tokens": 131_073}, "CONTEXT_TOO_LONG", "takes at most 131072 tokens of context"),
        ({"context_tokens": 2**64 - 1, "force": True}, "CONTEXT_TOO_LONG", "force does not lift this"),
        ({"context_tokens": 10, "prompt_tokens_hint": 11}, "CONTEXT_TOO_LONG", "prompts of 11 tokens do not fit"),
        (
            {"parallelism": model_pb2.PARALLELISM_TENSOR},
            "TENSOR_INDIVISIBLE",
            "of no number of nodes: ask",
        ),
        ({"require_node_ids": ["z"]}, "UNKNOWN_NODE", "no node is called 'z'; known are: a and b"),
        ({"exclude_node_ids": ["z"]}, "UNKNOWN_NODE", "no node is called 'z'"),
        ({"fixed_layers": [FIXED(node_id="z", layers=1)]}, "UNKNOWN_NODE", "no node is called 'z'"),
        (
            {"require_node_ids": ["a"], "exclude_node_ids": ["a"]},
            "CONTRADICTORY_CONSTRAINTS",
            "node a is required and excluded",
        ),
        (
            {"fixed_layers": [FIXED(node_id="a", layers=1)], "exclude_node_ids": ["a"]},
            "CONTRADICTORY_CONSTRAINTS",
            "node a is required and excluded",
        ),
        (
            {"fixed_layers": [FIXED(node_id="a", layers=0)], "require_node_ids": ["a"]},
            "CONTRADICTORY_CONSTRAINTS",
            "node a is required and fixed at 0 layers",
        ),
        (
            {"fixed_layers": [FIXED(node_id="a", layers=1), FIXED(node_id="a", layers=2)]},
            "CONTRADICTORY_CONSTRAINTS",
            "node a has its layers fixed twice",
        ),
        (
            {"fixed_layers": [FIXED(node_id="a", layers=2), FIXED(node_id="b", layers=2)]},
            "CONTRADICTORY_CONSTRAINTS",
            "4 layers are fixed and the model has 3",
        ),
        ({"min_nodes": 2, "max_nodes": 1}, "CONTRADICTORY_CONSTRAINTS", "at most 1 nodes, but at least 2"),
        ({"max_nodes": 0}, "CONTRADICTORY_CONSTRAINTS", "at most 0 nodes, but at least 1"),
        (
            {"max_nodes": 1, "require_node_ids": ["a", "b"]},
            "CONTRADICTORY_CONSTRAINTS",
            "at most 1 nodes, but at least 2",
        ),
        ({"min_nodes": 4}, "CONTRADICTORY_CONSTRAINTS", "4 nodes are asked for and the model has 3 layers"),
        (
            {"max_nodes": 1, "fixed_layers": [FIXED(node_id="a", layers=2)]},
            "CONTRADICTORY_CONSTRAINTS",
            "every one of at most 1 nodes has its layers fixed, and 1 layers are left over",
        ),
        (
            {"fixed_layers": [FIXED(node_id="a", layers=1), FIXED(node_id="b", layers=1)]},
            "TOO_FEW_NODES",
            "the layers fixed leave others over, and no further node can be used for them",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_told_so(asked: dict[str, Any], expected: str, words: str) -> None:
    state = state_of([Node("a", 10), Node("b", 10)], model([1, 1, 1]))
    answer = refusal(state, **asked)

    assert model_pb2.RefusalReason.Name(answer.reason) == f"REFUSAL_REASON_{expected}"
    assert words in answer.message
    assert answer.decided_at_sequence == state.sequence


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("layers", "m is registered without layers"),
        ("weight", "layer 1 of m is registered without its weight"),
        ("embedding", "m is registered without the weight of its embedding or head"),
    ],
)
def test_an_incomplete_model_is_refused_before_any_node_is_looked_at(broken: str, words: str) -> None:
    shape = model([1, 1])
    if broken == "weight":
        shape.layers[1].ClearField("weight")
    else:
        shape.ClearField("layers" if broken == "layers" else "embedding")
    answer = refusal(state_of([Node("a", 10)], shape), force=True)

    assert answer.reason == model_pb2.REFUSAL_REASON_MODEL_INCOMPLETE
    assert answer.message == f"{words}: add the model again with `ullage models add`"
    assert not answer.retryable


def test_absurd_sizes_are_refused_and_never_overflow() -> None:
    shape = model([2**63 - 1] * 3, kv=2**62, vocabulary_size=2**63, hidden_size=2**63, context_tokens_max=0)
    state = state_of([Node("a", 2**63, ram=2**63)], shape)

    answer = refusal(state, context_tokens=2**27, concurrent_sequences=65_536, force=True)

    assert reason(state, context_tokens=1) == "INSUFFICIENT_MEMORY"
    assert answer.reason == model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY
    assert answer.needed_bytes == 2**64 - 1


def test_the_same_bytes_are_not_given_twice() -> None:
    state = state_of([Node("a", 30 * GIB)], model(even(24 * GIB, 48)))
    first = place(state, spec(), ())
    assert isinstance(first, model_pb2.Placement)
    add(state, placed("i1", first, spec()))

    answer = refusal(state)

    assert answer.reason == model_pb2.REFUSAL_REASON_BLOCKED_BY_PROMISES
    assert answer.message.splitlines()[0] == (
        "m with 1 token of context needs 24.0 GiB and would fit but for what is promised to i1 (24.0 GiB)."
    )
    assert answer.remedies[0].text == "Release i1 of m, which holds 24.0 GiB"
    assert answer.nodes[0].promised_bytes == 24 * GIB


def test_o2_promised_bytes_are_reconciled_with_what_the_node_reads_later() -> None:
    """20 available; 12 placed; the reading falls to 8 as they load; then the shard fails and 20 are back."""
    node = Node("a", 20 * GIB)
    big, small = model(even(12 * GIB, 12)), model(even(7 * GIB, 7))
    small.model_id = "small"
    state = state_of([Node("a", 20 * GIB, models=("m", "small"))], big)
    state.models["small"] = small
    first = place(state, spec(), ())
    assert isinstance(first, model_pb2.Placement)
    add(state, placed("i", first, spec()))
    assert reason(state) == "BLOCKED_BY_PROMISES"

    add(state, shard_status(model_pb2.SHARD_PHASE_RUNNING, resident_bytes=12 * GIB))
    loaded = facts_of(Node("a", 8 * GIB))[-1]
    add(state, loaded, loaded)
    assert isinstance(place(state, spec(model_id="small"), ()), model_pb2.Placement)
    assert reason(state) == "INSUFFICIENT_MEMORY"

    add(state, shard_status(model_pb2.SHARD_PHASE_FAILED), facts_of(node)[-1])
    assert isinstance(place(state, spec(), ()), model_pb2.Placement)


def test_an_operators_figure_does_not_sink_so_what_is_resident_stays_subtracted() -> None:
    node = Node("a", 20 * GIB, overridden=True)
    state = state_of([node], model(even(12 * GIB, 12)))
    first = place(state, spec(), ())
    assert isinstance(first, model_pb2.Placement)
    running = shard_status(model_pb2.SHARD_PHASE_RUNNING, resident_bytes=12 * GIB)
    add(state, placed("i", first, spec()), running, facts_of(node)[-1], facts_of(node)[-1])

    assert reason(state) == "BLOCKED_BY_PROMISES"


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("overridden", [False, True])
def test_what_a_replaced_instance_holds_is_credited(*, loaded: bool, overridden: bool) -> None:
    node = Node("a", 20 * GIB, overridden=overridden)
    state = state_of([node], model(even(12 * GIB, 12)))
    first = place(state, spec(), ())
    assert isinstance(first, model_pb2.Placement)
    add(state, placed("i", first, spec()))
    if loaded:
        after = facts_of(Node("a", (20 if overridden else 8) * GIB, overridden=overridden))[-1]
        add(state, shard_status(model_pb2.SHARD_PHASE_RUNNING, resident_bytes=12 * GIB), after, after)

    second = place(state, spec(replace_instance_id="i"), ())

    assert isinstance(second, model_pb2.Placement)
    assert second.nodes[0].budget_bytes == 20 * GIB


def test_what_a_released_shard_still_holds_is_not_given_away_on_a_reading_of_before_it_grew() -> None:
    state = state_of([Node("a", 20 * GIB)], model(even(12 * GIB, 12)))
    first = place(state, spec(), ())
    assert isinstance(first, model_pb2.Placement)
    add(state, placed("i", first, spec()))
    add(state, shard_status(model_pb2.SHARD_PHASE_LOADING, resident_bytes=9 * GIB), instance_released())

    answer = refusal(state)
    assert answer.reason == model_pb2.REFUSAL_REASON_BLOCKED_BY_PROMISES
    assert answer.nodes[0].promised_bytes == 9 * GIB

    # The reading has caught up: what it shows as taken is not taken off once more.
    taken = facts_of(Node("a", 11 * GIB))[-1]
    add(state, taken, taken)
    assert refusal(state).nodes[0].promised_bytes == 0

    add(state, shard_status(model_pb2.SHARD_PHASE_UNLOADED), facts_of(Node("a", 20 * GIB))[-1])
    assert isinstance(place(state, spec(), ()), model_pb2.Placement)


def test_a_released_instance_that_was_never_taken_up_blocks_nothing() -> None:
    state = state_of([Node("a", 20 * GIB)], model(even(12 * GIB, 12)))
    first = place(state, spec(), ())
    assert isinstance(first, model_pb2.Placement)
    add(state, placed("i", first, spec()), instance_released())

    assert isinstance(place(state, spec(), ()), model_pb2.Placement)


def test_a_remedy_names_the_context_and_the_sequences_that_would_fit() -> None:
    shape = model(even(GIB, 4), kv=2**15, kv_allocation_step_tokens=256)
    state = state_of([Node("a", 2 * GIB)], shape)
    answer = refusal(state, context_tokens=8192, concurrent_sequences=2)

    smaller = next(remedy for remedy in answer.remedies if remedy.HasField("context_tokens"))
    assert smaller.text == "Ask for a context of 1536 tokens or less"
    assert isinstance(place(state, spec(context_tokens=1536, concurrent_sequences=2), ()), model_pb2.Placement)
    assert isinstance(place(state, spec(context_tokens=1537, concurrent_sequences=2), ()), model_pb2.Refusal)

    answer = refusal(state, context_tokens=1536, concurrent_sequences=4)
    fewer = next(remedy for remedy in answer.remedies if remedy.HasField("concurrent_sequences"))
    assert (fewer.text, fewer.concurrent_sequences) == ("Ask for 2 sequences at once", 2)


def test_no_node_is_to_free_more_than_it_has() -> None:
    nodes = [Node("a", 7 * GB, ram=8 * GB), Node("b", 5 * GB, ram=8 * GB), Node("c", 4 * GB, ram=8 * GB)]

    by_name = {
        remedy.node_id for remedy in refusal(state_of(nodes, model(even(18 * GB, 18)))).remedies if remedy.more_bytes
    }

    assert by_name == {"b", "c"}


@pytest.mark.parametrize("free", [1, 3 * MIB + 7, 299 * MIB + 1, 9 * GIB + 5 * MIB - 3, 30 * GIB + 40 * MIB])
def test_whoever_frees_no_byte_more_than_is_said_has_freed_enough(free: int) -> None:
    shape = model(even(40 * GIB, 40))
    node = Node("a", 40 * GIB - free, ram=64 * GIB)
    _, amount, unit, *_ = refusal(state_of([node], shape)).remedies[0].text.split()
    said = round(float(amount) * {"GiB": GIB, "MiB": MIB}[unit])

    after = state_of([replace(node, available=40 * GIB - free + said)], shape)
    assert isinstance(place(after, spec(), ()), model_pb2.Placement)


def test_where_an_operator_says_what_a_node_may_give_it_is_that_figure_to_be_raised() -> None:
    answer = refusal(state_of([Node("a", 8 * GIB, ram=16 * GIB, overridden=True)], model(even(12 * GIB, 12))))

    assert [remedy.text for remedy in answer.remedies][:1] == ["Raise --memory on a by 4.01 GiB"]
    assert answer.remedies[0].node_id == "a"


def test_force_is_not_advised_where_it_would_not_do() -> None:
    assert not any(remedy.force for remedy in refusal(state_of([Node("a", 8 * GB)], model([2**63, 2**63]))).remedies)


def test_a_prompt_must_fit_in_the_context_nobody_chose() -> None:
    answer = place(
        state_of([Node("a", GB)], model([1])), model_pb2.PlacementSpec(model_id="m", prompt_tokens_hint=2049), ()
    )

    assert isinstance(answer, model_pb2.Refusal)
    assert answer.message == "prompts of 2049 tokens do not fit in a context of 2048: ask for a longer context"


def test_a_remedy_says_that_more_nodes_would_do() -> None:
    state = state_of([Node("a", 10), Node("b", 10)], model([3] * 6))

    answer = refusal(state, max_nodes=1)

    assert "needs 18 bytes and the roomiest 1 of 2 nodes can give 10 bytes: 8 bytes short" in answer.message
    assert "Allow more than 1 node" in [remedy.text for remedy in answer.remedies]


def test_a_model_that_all_the_memory_of_the_nodes_could_not_hold_is_not_worth_trying_again() -> None:
    shape = model(even(20 * GIB, 20))

    assert refusal(state_of([Node("a", 8 * GIB, ram=32 * GIB)], shape)).retryable
    assert not refusal(state_of([Node("a", 8 * GIB, ram=16 * GIB)], shape)).retryable


def forced(state: State, *silent: str, **asked: Any) -> model_pb2.Placement:
    outcome = place(state, spec(force=True, **asked), silent)
    assert isinstance(outcome, model_pb2.Placement), outcome.message
    return outcome


def test_force_places_past_a_refusal_and_keeps_it() -> None:
    nodes = [Node("a", 10 * GIB, ram=16 * GIB), Node("b", 5 * GIB, ram=8 * GIB)]
    chosen = forced(state_of(nodes, model(even(18 * GIB, 36))))

    assert layers_by_node(chosen) == {"a": 24, "b": 12}
    assert chosen.forced_past.reason == model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY
    assert chosen.explanation.startswith("Forced past INSUFFICIENT_MEMORY: 36 layers on a and b because")


def test_force_that_was_not_needed_leaves_no_trace() -> None:
    assert not forced(state_of([Node("a", 10)], model([1]))).HasField("forced_past")


def test_force_uses_nodes_that_are_left_out_only_when_the_others_cannot_do_it() -> None:
    nodes = [Node("a", 10 * GIB), Node("b", 10 * GIB, UNKNOWN), Node("c", 10 * GIB)]
    shape = model(even(18 * GIB, 18))

    assert layers_by_node(forced(state_of(nodes, shape))) == {"a": 9, "c": 9}
    assert layers_by_node(forced(state_of(nodes[:2], shape))) == {"a": 10, "b": 8}


def test_force_places_on_nodes_under_critical_pressure_when_there_are_no_others() -> None:
    chosen = forced(state_of([Node("a", 0, CRITICAL, ram=16 * GIB)], model(even(4 * GIB, 4))))

    assert layers_by_node(chosen) == {"a": 4}
    assert chosen.forced_past.reason == model_pb2.REFUSAL_REASON_NO_ELIGIBLE_NODES


def test_nothing_is_forced_onto_a_node_without_a_runner() -> None:
    state = state_of([Node("a", 10, runner=False)], model([1]))

    assert reason(state, force=True) == "NO_ELIGIBLE_NODES"
    assert not any(remedy.force for remedy in refusal(state).remedies)


def test_force_respects_the_nodes_asked_for() -> None:
    nodes = [Node("a", 2 * GIB, NORMAL), Node("b", 8 * GIB, NORMAL)]
    chosen = forced(state_of(nodes, model(even(4 * GIB, 4))), exclude_node_ids=["b"])

    assert layers_by_node(chosen) == {"a": 4}


def test_two_nodes_of_one_name_are_told_apart_by_their_ids() -> None:
    nodes = [Node("1f", 1, name="mac"), Node("2f", 1, name="mac")]
    answer = refusal(state_of(nodes, model([5])))

    assert "mac (1f):" in answer.message
    assert "mac (2f):" in answer.message
