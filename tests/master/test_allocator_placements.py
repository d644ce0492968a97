"""Who gets which layers: public bug reports and exo's own tests as tables, then each rule by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from services.master.allocator import place
from tests.master.given_nodes import (
    CRITICAL,
    FLOAT32,
    GB,
    GIB,
    NORMAL,
    STORED,
    UNKNOWN,
    WARNING,
    Node,
    even,
    layers_by_node,
    model,
    spec,
    state_of,
)
from ullage.v1 import model_pb2, node_pb2

STRICT = model_pb2.ADMISSION_STRICT
Pressed = tuple[float, node_pb2.PressureLevel.ValueType]


@dataclass(frozen=True)
class Row:
    """Nodes n0, n1, … with what is available in GB, a model, and the layers each node gets (0 for none)."""

    name: str
    available_gb: list[float | Pressed]
    model_gb: float
    layers: int
    expected: list[int] | model_pb2.RefusalReason.ValueType
    asked: dict[str, Any] = field(default_factory=dict)

    def nodes(self) -> list[Node]:
        pairs = [each if isinstance(each, tuple) else (each, NORMAL) for each in self.available_gb]
        return [Node(f"n{i}", available * GB, level) for i, (available, level) in enumerate(pairs)]


INSUFFICIENT = model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY
FRAGMENTED = model_pb2.REFUSAL_REASON_FRAGMENTED

REPORTED = [
    Row("X1 under STRICT", [16, (16, WARNING)], 19, 40, [25, 15], {"admission": STRICT}),
    Row("X2 under STRICT", [48, (24, WARNING)], 45.6, 48, [37, 11], {"admission": STRICT, "min_nodes": 2}),
    Row("X2, but two nodes only when asked for", [48, (24, WARNING)], 45.6, 48, [48, 0], {"admission": STRICT}),
    Row("X3: the only split that fits", [48, 24, 4], 72, 32, [21, 10, 1]),
    Row("X5: no layer for a node that holds none", [12, 12, 4], 17, 4, [2, 2, 0]),
    Row("X9: one CRITICAL, the others too small", [(64, CRITICAL), 16, 3], 20, 32, INSUFFICIENT),
    Row("P1: both NORMAL", [8, 8], 12, 40, [20, 20]),
    Row("P1: one WARNING under STRICT", [8, (8, WARNING)], 12, 40, [25, 15], {"admission": STRICT}),
    Row("P1: both WARNING under STRICT", [(8, WARNING), (8, WARNING)], 12, 40, INSUFFICIENT, {"admission": STRICT}),
    Row("P1: both WARNING under BALANCED", [(8, WARNING), (8, WARNING)], 12, 40, [20, 20]),
    Row("P3: drops the node too small for a layer", [64, 64, 1], 96, 32, [16, 16, 0]),
    Row("P4: the sum is enough, the pieces are not", [10, 10], 18, 3, FRAGMENTED),
    Row("P11: one node where one will do", [12, 12], 8, 32, [32, 0]),
    Row("P11: two nodes when asked for", [12, 12], 8, 32, [16, 16], {"min_nodes": 2}),
    Row("P11: gemma on 16 and 32", [16, 32], 24, 24, [8, 16], {"min_nodes": 2}),
    Row("P18: over three nodes of 3 GB when asked for", [3, 3, 3], 4.5, 32, [11, 11, 10], {"min_nodes": 3}),
    Row("P20: in proportion, not equal", [128, 192], 300, 80, [32, 48]),
    Row("CE1", [1.95, 3.0], 4, 4, [1, 3]),
    Row("CE2", [1.5, 1.5, 1.5, 1.5], 4, 4, [1, 1, 1, 1]),
    Row("CE3", [3.0, 1.95, 1.0], 4, 4, [3, 1, 0]),
    Row("a weaker node is not used without need", [30, 30], 20, 10, [10, 0]),
    Row("WARNING weighs 0.6 of its room under BALANCED", [10, (10, WARNING)], 12, 16, [10, 6]),
    Row("WARNING gives all it has when that is needed", [10, (10, WARNING)], 20, 20, [10, 10]),
    Row("a healthy node before one under WARNING", [(20, WARNING), 16], 12, 12, [0, 12]),
]

EXO = [
    Row("1: three nodes 500, 500, 1000", [500, 500, 1000], 2000, 12, [3, 3, 6]),
    Row("2: three equal nodes", [500, 500, 500], 1500, 12, [4, 4, 4]),
    Row("3: 312, 468, 1092", [312, 468, 1092], 1872, 12, [2, 3, 7]),
    Row("4, where no process needs memory of its own: an exact fit", [1000], 1000, 10, [10]),
    Row("5: room to spare", [1001], 1000, 10, [10]),
    Row("6: one too many", [1000], 1001, 10, INSUFFICIENT),
    Row("21, but one node where exo's filter keeps the pair", [1000, 1000], 1, 1, [1, 0]),
    Row("22: more than both have", [1000, 1000], 2001, 10, INSUFFICIENT),
    Row("23, but two of three nodes, since paths need not be cycles", [500, 500, 1000], 1500, 12, [4, 0, 8]),
    Row("24: the smallest set", [500, 500, 1000], 1000, 12, [0, 0, 12]),
    Row("25a: on three nodes", [500, 500, 1000], 1000, 12, [3, 3, 6], {"min_nodes": 3}),
    Row("25b: on three nodes", [500, 500, 500], 1000, 12, [4, 4, 4], {"min_nodes": 3}),
    Row("25c: on three nodes", [312, 518, 1024], 1000, 12, [2, 3, 7], {"min_nodes": 3}),
    Row("25c, but one node where one will do", [312, 518, 1024], 1000, 12, [0, 0, 12]),
    Row("25d: on three nodes", [900, 50, 50], 1000, 20, [18, 1, 1], {"min_nodes": 3}),
    Row("26", [900, 50, 10], 1000, 20, INSUFFICIENT, {"min_nodes": 3}),
    Row("28: no node", [], 1000, 12, model_pb2.REFUSAL_REASON_NO_NODES),
    Row(
        "28: fewer layers than nodes asked for",
        [10, 10, 10],
        2,
        2,
        model_pb2.REFUSAL_REASON_CONTRADICTORY_CONSTRAINTS,
        {"min_nodes": 3},
    ),
    Row("28, but two of three nodes for two layers", [10, 10, 10], 20, 2, [1, 1, 0]),
    Row("29a", [250, 250, 250, 250], 960, 12, [3, 3, 3, 3]),
    Row("29b", [250, 250, 500], 960, 12, [3, 3, 6]),
    Row("29c", [975, 12.5, 12.5], 240, 20, [18, 1, 1], {"min_nodes": 3}),
    Row("29d", [1000], 960, 10, [10]),
    Row("29e", [330, 330, 340], 960, 3, [1, 1, 1]),
]


@pytest.mark.parametrize("row", [*REPORTED, *EXO], ids=lambda row: row.name)
def test_layers_go_as_the_table_says(row: Row) -> None:
    nodes = row.nodes()

    outcome = place(state_of(nodes, model(even(row.model_gb * GB, row.layers))), spec(**row.asked), ())

    if isinstance(outcome, model_pb2.Refusal):
        assert outcome.reason == row.expected, outcome.message
    else:
        got = layers_by_node(outcome)
        assert [got.get(node.node_id, 0) for node in nodes] == row.expected


def decision(nodes: list[Node], shape: model_pb2.Model, **asked: Any) -> model_pb2.Placement:
    outcome = place(state_of(nodes, shape), spec(**asked), ())
    assert isinstance(outcome, model_pb2.Placement), outcome.message
    return outcome


def test_shards_are_contiguous_ranges_by_rank_over_all_layers() -> None:
    chosen = decision([Node("a", 48), Node("b", 24), Node("c", 4)], model([2] * 36), min_nodes=3)

    assert [(shard.rank, shard.node_id, shard.first_layer, shard.end_layer) for shard in chosen.shards] == [
        (0, "a", 0, 23),
        (1, "b", 23, 34),
        (2, "c", 34, 36),
    ]


def test_layers_of_unequal_bytes_are_placed_by_their_bytes_and_not_by_their_number() -> None:
    chosen = decision([Node("a", 10), Node("b", 10)], model([8, 1, 1, 2, 2, 2, 2, 2]))

    assert layers_by_node(chosen) == {"a": 3, "b": 5}


def test_an_order_is_found_where_the_preferred_one_does_not_fit() -> None:
    """The roomier node first would leave a last layer too large for the other."""
    chosen = decision([Node("a", 6), Node("b", 3)], model([3, 2, 4]))

    assert [(shard.node_id, shard.end_layer) for shard in chosen.shards] == [("b", 1), ("a", 3)]


def test_bytes_are_counted_by_part_on_each_rank() -> None:
    shape = model([1000] * 4, embedding=500, head=7, tied_embedding=True, kv=3, kv_allocation_step_tokens=256)
    chosen = decision([Node("a", 19_000, overhead=100), Node("b", 18_000, overhead=100)], shape, context_tokens=257)

    kv = 3 * 2 * 512
    growing = kv
    # Kept when freed: the caches of all four layers as they were after the first of two steps.
    freed = 4 * kv // 2
    first, last = (shard.bytes for shard in chosen.shards)
    assert first == model_pb2.ShardBytes(
        layers_bytes=2000,
        embedding_bytes=500,
        kv_bytes=2 * kv,
        activation_bytes=growing + freed,
        overhead_bytes=100,
        total_bytes=2000 + 500 + 3 * kv + freed + 100,
    )
    assert last == model_pb2.ShardBytes(
        layers_bytes=2000,
        head_bytes=507,
        kv_bytes=2 * kv,
        activation_bytes=growing + freed,
        overhead_bytes=100,
        total_bytes=2000 + 507 + 3 * kv + freed + 100,
    )


def test_a_tied_head_on_a_single_rank_costs_no_second_embedding() -> None:
    chosen = decision([Node("a", 4507)], model([1000] * 4, embedding=500, head=7, tied_embedding=True))

    assert (chosen.shards[0].bytes.embedding_bytes, chosen.shards[0].bytes.head_bytes) == (500, 7)


def test_a_runner_that_dequantises_is_charged_four_bytes_for_each_parameter() -> None:
    chosen = decision([Node("a", 100_000, form=FLOAT32)], model([1000] * 4, embedding=10, head=10))

    assert chosen.shards[0].bytes.layers_bytes == 16_000


def test_nodes_that_hold_the_model_in_other_forms_are_charged_each_by_its_own() -> None:
    chosen = decision([Node("a", 8000, form=FLOAT32), Node("b", 2000)], model([1000] * 4))

    assert {shard.node_id: shard.bytes.layers_bytes for shard in chosen.shards} == {"a": 8000, "b": 2000}


def test_weights_are_held_as_stored_only_where_they_fit_in_no_other_form() -> None:
    tight = [Node("a", 10_000, form=FLOAT32, can_hold_as_stored=True, speed=1e6)]
    roomy = [Node("a", 100_000, form=FLOAT32, can_hold_as_stored=True, speed=1e6)]
    shape = model([1000] * 4)

    stored, floats = decision(tight, shape), decision(roomy, shape)

    assert stored.shards[0].bytes.layers_bytes == 4000
    assert stored.shards[0].weight_form == STORED
    assert "weights fit only as they are stored on a, where that is slower" in stored.explanation
    assert not stored.HasField("time_per_token"), "the speed was measured with floats"
    assert floats.HasField("time_per_token")
    assert floats.shards[0].bytes.layers_bytes == 16_000
    assert floats.shards[0].weight_form == node_pb2.WEIGHT_FORM_UNSPECIFIED


def test_a_runner_that_was_told_to_hold_floats_is_not_asked_to_hold_less() -> None:
    state = state_of([Node("a", 10_000, form=FLOAT32)], model([1000] * 4))
    assert isinstance(place(state, spec(), ()), model_pb2.Refusal)


def test_a_sliding_window_keeps_the_window_and_the_chunk_that_goes_through() -> None:
    shape = model([1000, 1000], kv=1, kv_allocation_step_tokens=256)
    shape.layers[0].kv_window_tokens = 512
    chosen = decision([Node("a", GIB, element_bytes=4)], shape, context_tokens=4096)

    assert chosen.shards[0].bytes.kv_bytes == 4 * (768 + 4096)


def test_a_state_of_constant_size_is_charged_for_each_sequence_whatever_the_context() -> None:
    shape = model([1000, 1000], kv=1, kv_allocation_step_tokens=256)
    shape.layers[0].kv_elements_per_token = 0
    shape.layers[0].state_elements = 5000
    asked = {
        context: decision([Node("a", GIB, element_bytes=2)], shape, context_tokens=context) for context in (1, 512)
    }

    kept = {context: chosen.shards[0].bytes.kv_bytes for context, chosen in asked.items()}
    assert kept == {1: 4 * 5000 + 2 * 256, 512: 4 * 5000 + 2 * 512}


def test_a_cpu_is_charged_for_the_scores_of_attention_which_metal_never_holds() -> None:
    shape = model([1000], hidden_size=64, intermediate_size=128, attention_heads=9, vocabulary_size=1000)
    on_cpu = decision([Node("a", GIB, device="cpu", element_bytes=4)], shape, context_tokens=2048)
    on_metal = decision([Node("a", GIB, device="metal", element_bytes=4)], shape, context_tokens=2048)

    widest = 128 * (2 * 64 + 2 * 128) * 4
    scored = 1000 * 8
    attention = 2 * 128 * 9 * 2048 * 4
    # Once in use, and once more as freed buffers that are kept.
    assert on_metal.shards[0].bytes.activation_bytes == 2 * widest + scored
    assert on_cpu.shards[0].bytes.activation_bytes == 2 * (widest + attention) + scored


def test_no_more_freed_buffers_are_charged_than_a_runner_keeps() -> None:
    shape = model([1000], hidden_size=2**16, intermediate_size=2**17)
    chosen = decision([Node("a", GIB, element_bytes=4)], shape)

    widest = 128 * (2 * 2**16 + 2 * 2**17) * 4
    assert chosen.shards[0].bytes.activation_bytes == widest + 32 * 2**20


@pytest.mark.parametrize(("context", "fits"), [(8192, True), (32_768, True), (131_072, False)])
def test_o1_the_context_decides_when_nodes_barely_hold_the_weights(context: int, *, fits: bool) -> None:
    """80 layers, 8 KV heads of 128 in fp16: 320 KiB for each token of context, and no weights at all beside."""
    shape = model(even(40 * GIB, 80), kv=2 * 8 * 128, kv_allocation_step_tokens=256)
    outcome = place(state_of([Node("a", 28 * GIB), Node("b", 28 * GIB)], shape), spec(context_tokens=context), ())

    assert isinstance(outcome, model_pb2.Placement) is fits


def test_each_sequence_served_at_once_has_a_cache_of_its_own() -> None:
    shape = model([1000] * 2, kv=10, kv_allocation_step_tokens=1)
    one = decision([Node("a", GIB)], shape, context_tokens=100)
    four = decision([Node("a", GIB)], shape, context_tokens=100, concurrent_sequences=4)

    assert (one.shards[0].bytes.kv_bytes, four.shards[0].bytes.kv_bytes) == (4000, 16_000)


def test_p13_the_devices_limit_holds_below_what_is_available() -> None:
    shape = model(even(108.01 * GB, 100))
    low = place(state_of([Node("a", 120 * GB, ram=128 * GB, device_limit=107.52 * GB)], shape), spec(), ())
    high = place(state_of([Node("a", 120 * GB, ram=128 * GB, device_limit=112 * GB)], shape), spec(), ())

    assert isinstance(low, model_pb2.Refusal)
    assert "the device's limit of 100.1 GiB holds" in low.message
    assert isinstance(high, model_pb2.Placement)


def test_p13_a_model_above_one_devices_limit_is_split() -> None:
    nodes = [Node("a", 120 * GB, device_limit=107.52 * GB), Node("b", 20 * GB)]
    chosen = decision(nodes, model(even(108 * GB, 100)))

    assert layers_by_node(chosen) == {"a": 84, "b": 16}


def test_an_assumed_device_limit_gives_way_to_the_one_the_runner_read() -> None:
    state = state_of([Node("a", 100, device_limit=10)], model([20]))
    record = state.nodes["a"]
    assert record.memory is not None
    assert record.runner is not None
    record.runner.device_limit_bytes = 50
    assert isinstance(place(state, spec(), ()), model_pb2.Refusal)

    record.memory.flags.append(node_pb2.MEMORY_FLAG_DEVICE_LIMIT_ASSUMED)
    assert isinstance(place(state, spec(), ()), model_pb2.Placement)


def test_p12_the_fast_node_is_chosen_where_speeds_are_known() -> None:
    nodes = [Node("big", 64 * GB, speed=100e9), Node("fast", 24 * GB, speed=400e9)]
    chosen = decision(nodes, model(even(20 * GB, 20)))

    assert layers_by_node(chosen) == {"fast": 20}
    assert chosen.time_per_token.ToMilliseconds() == 50
    assert chosen.explanation == "20 layers on fast because that is the least predicted time for a token, 50.0 ms."
    assert [(layers_by_node(model_pb2.Placement(shards=each.shards)), each.reason) for each in chosen.alternatives] == [
        ({"fast": 19, "big": 1}, "9.5 ms more for each token"),
        ({"big": 20}, "150.0 ms more for each token"),
    ]


def test_the_fastest_nodes_are_filled_first_where_speeds_are_known() -> None:
    nodes = [Node("slow", 40 * GB, speed=100e9), Node("fast", 20 * GB, speed=400e9)]
    chosen = decision(nodes, model(even(30 * GB, 30)))

    assert layers_by_node(chosen) == {"fast": 20, "slow": 10}


def test_pressure_slows_a_node_in_the_prediction() -> None:
    nodes = [Node("a", 24 * GB, WARNING, speed=400e9), Node("b", 24 * GB, speed=300e9)]

    assert layers_by_node(decision(nodes, model(even(20 * GB, 20)))) == {"b": 20}


def test_one_unknown_speed_and_memory_decides_alone() -> None:
    nodes = [Node("big", 64 * GB), Node("fast", 24 * GB, speed=400e9)]
    chosen = decision(nodes, model(even(20 * GB, 40)))

    assert layers_by_node(chosen) == {"big": 40}
    assert not chosen.HasField("time_per_token")


def test_throughput_evens_out_what_each_rank_takes() -> None:
    nodes = [Node("a", 64 * GB, speed=300e9), Node("b", 64 * GB, speed=100e9)]
    chosen = decision(nodes, model(even(40 * GB, 40)), objective=model_pb2.OBJECTIVE_THROUGHPUT)

    assert layers_by_node(chosen) == {"a": 30, "b": 10}


def test_proportional_uses_every_node_that_holds_a_layer() -> None:
    nodes = [Node("a", 30 * GB), Node("b", 10 * GB), Node("c", 0.1 * GB)]
    chosen = decision(nodes, model(even(8 * GB, 8)), objective=model_pb2.OBJECTIVE_PROPORTIONAL)

    assert layers_by_node(chosen) == {"a": 6, "b": 2}


def test_proportional_over_more_nodes_than_are_decided_exactly() -> None:
    nodes = [Node(f"n{i:02}", 10 * GB) for i in range(12)]
    chosen = decision(nodes, model(even(24 * GB, 24)), objective=model_pb2.OBJECTIVE_PROPORTIONAL)

    assert layers_by_node(chosen) == {node.node_id: 2 for node in nodes}


def test_fewest_nodes_is_kept_to_even_where_two_were_faster() -> None:
    nodes = [Node("big", 64 * GB, speed=10e9), Node("x", 15 * GB, speed=400e9), Node("y", 15 * GB, speed=400e9)]
    shape = model(even(20 * GB, 40))

    assert len(decision(nodes, shape).shards) == 2
    assert layers_by_node(decision(nodes, shape, objective=model_pb2.OBJECTIVE_FEWEST_NODES)) == {"big": 40}


def test_a_model_that_needs_more_nodes_than_are_decided_exactly_is_placed() -> None:
    chosen = decision([Node(f"n{i:02}", 2 * GB + 1) for i in range(20)], model(even(30 * GB, 30)))

    assert len(chosen.shards) == 15


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"require_node_ids": ["c"]}, {"c": 10}),
        ({"exclude_node_ids": ["a"]}, {"b": 10}),
        ({"min_nodes": 3}, {"a": 5, "b": 3, "c": 2}),
        ({"min_nodes": 2, "require_node_ids": ["c"]}, {"a": 7, "c": 3}),
        ({"fixed_layers": [model_pb2.FixedLayers(node_id="b", layers=1)]}, {"a": 9, "b": 1}),
        ({"fixed_layers": [model_pb2.FixedLayers(node_id="a", layers=0)]}, {"b": 10}),
        ({"fixed_layers": [model_pb2.FixedLayers(node_id="c", layers=10)], "max_nodes": 1}, {"c": 10}),
    ],
)
def test_f5_nodes_and_layers_can_be_chosen(asked: dict[str, Any], expected: dict[str, int]) -> None:
    nodes = [Node("a", 50), Node("b", 30), Node("c", 20)]

    assert layers_by_node(decision(nodes, model([2] * 10), **asked)) == expected


def test_a_node_of_unknown_level_is_used_when_that_is_asked_for() -> None:
    nodes = [Node("a", 100, UNKNOWN), Node("b", None, UNKNOWN, ram=200)]
    refused = place(state_of(nodes, model([20] * 10)), spec(), ())
    chosen = decision(nodes, model([20] * 10), include_unknown=True)

    assert isinstance(refused, model_pb2.Refusal)
    assert layers_by_node(chosen) == {"b": 10}
    assert [budget.budget_bytes for budget in chosen.nodes] == [100, 200]


def test_every_node_is_in_the_decision_with_its_numbers() -> None:
    nodes = [Node("a", 100, ram=160, overhead=10, name="anna"), Node("b", 50, CRITICAL), Node("c", 40, runner=False)]
    chosen = decision(nodes, model([5] * 10))

    assert list(chosen.nodes) == [
        model_pb2.NodeBudget(
            node_id="a",
            friendly_name="anna",
            pressure_level=NORMAL,
            ram_total_bytes=160,
            available_bytes=100,
            overhead_bytes=10,
            budget_bytes=90,
            pressure_factor=1.0,
            layers_max=10,
            layers=10,
        ),
        model_pb2.NodeBudget(
            node_id="b",
            pressure_level=CRITICAL,
            exclusion=model_pb2.EXCLUSION_CRITICAL,
            available_bytes=50,
            budget_bytes=50,
            pressure_factor=0.0,
            layers_max=10,
        ),
        model_pb2.NodeBudget(
            node_id="c",
            pressure_level=NORMAL,
            exclusion=model_pb2.EXCLUSION_NO_RUNNER,
            available_bytes=40,
            budget_bytes=40,
            pressure_factor=1.0,
        ),
    ]
    assert chosen.decided_at_sequence == 9
    assert chosen.explanation == "10 layers on anna because it can hold the whole model and no other node is needed."


def test_the_runners_up_say_what_they_lacked() -> None:
    chosen = decision([Node("a", 3 * GIB), Node("b", 2 * GIB), Node("c", 2 * GIB)], model(even(GIB, 4)))

    assert [(each.shards[0].node_id, each.reason) for each in chosen.alternatives] == [
        ("b", "1.00 GiB less weighted memory"),
        ("c", "1.00 GiB less weighted memory"),
        ("a", "1 node more"),
    ]


def test_a_link_that_was_measured_counts_with_its_latency() -> None:
    nodes = [Node("a", 20 * GB, speed=100e9), Node("b", 20 * GB, speed=100e9)]
    state = state_of(nodes, model(even(30 * GB, 30)))
    link = node_pb2.Link(from_node_id="a", to_node_id="b", reachable=True)
    link.latency.FromMilliseconds(20)
    state.nodes["a"].links["b"] = link

    outcome = place(state, spec(), ())

    assert isinstance(outcome, model_pb2.Placement)
    assert outcome.time_per_token.ToMilliseconds() == 300 + 20 + 1
