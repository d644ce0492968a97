"""What must hold for any cluster: exactness against brute force, monotony, order, no byte given twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.master.allocator import Roster, decide, place, understand
from services.master.state import State
from tests.master.facts import instance_released
from tests.master.given_nodes import (
    CRITICAL,
    FLOAT32,
    NORMAL,
    STORED,
    UNKNOWN,
    WARNING,
    Node,
    add,
    layers_by_node,
    model,
    placed,
    spec,
    state_of,
)
from ullage.v1 import model_pb2

CONTRADICTORY = model_pb2.REFUSAL_REASON_CONTRADICTORY_CONSTRAINTS
LOOK = settings(deadline=None, max_examples=60)


@dataclass(frozen=True)
class Shape:
    """A model small enough to be placed by trying everything."""

    layers: tuple[int, ...]
    embedding: int
    head: int
    tied: bool
    kv: int

    def model(self) -> model_pb2.Model:
        return model(self.layers, embedding=self.embedding, head=self.head, tied_embedding=self.tied, kv=self.kv)

    def bytes_of(self, node: Node, start: int, end: int) -> int:
        """What a shard takes on `node`, written down once more from the design."""
        per_byte = 4 if node.form == FLOAT32 else 1
        kv = self.kv * node.element_bytes
        taken = sum(self.layers[start:end]) * per_byte + kv * (end - start) + kv
        if start == 0:
            taken += self.embedding * per_byte
        if end == len(self.layers):
            taken += (self.head + (self.embedding if self.tied and start > 0 else 0)) * per_byte
        return taken + node.overhead


shapes = st.builds(
    Shape,
    layers=st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple),
    embedding=st.integers(0, 6),
    head=st.integers(0, 6),
    tied=st.booleans(),
    kv=st.integers(0, 2),
)


def nodes_of(count: int, available: st.SearchStrategy[int], levels: Sequence[Any] = (NORMAL, WARNING)) -> Any:
    """Up to `count` nodes in two forms, with more or less available."""
    node = st.builds(
        Node,
        node_id=st.just(""),
        available=available,
        level=st.sampled_from(levels),
        overhead=st.integers(0, 3),
        form=st.sampled_from([STORED, STORED, FLOAT32]),
    )
    return st.lists(node, min_size=1, max_size=count).map(
        lambda found: [replace(each, node_id=f"n{i:02}") for i, each in enumerate(found)]
    )


def cuts(layers: int, parts: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, layers), parts - 1):
        yield (0, *inner, layers)


def brute_force_fits(shape: Shape, nodes: Sequence[Node], asked: dict[str, Any]) -> bool:
    """Every order of every set with every cut, tried one after the other."""
    layers = len(shape.layers)
    fixed = {each.node_id: each.layers for each in asked.get("fixed_layers", [])}
    required = set(asked.get("require_node_ids", [])) | set(fixed)
    for size in range(asked.get("min_nodes", 1), min(asked.get("max_nodes", 99), len(nodes), layers) + 1):
        for order in permutations(nodes, size):
            if not required <= {node.node_id for node in order}:
                continue
            for bounds in cuts(layers, size):
                ranges = list(zip(order, bounds, bounds[1:], strict=False))
                if all(
                    shape.bytes_of(node, start, end) <= (node.available or 0)
                    and fixed.get(node.node_id, end - start) == end - start
                    for node, start, end in ranges
                ):
                    return True
    return False


@st.composite
def constraints(draw: st.DrawFn, nodes: Sequence[Node], layers: int) -> dict[str, Any]:
    """Wishes that do not contradict each other."""
    asked: dict[str, Any] = {}
    ids = [node.node_id for node in nodes]
    if draw(st.booleans()):
        asked["require_node_ids"] = [draw(st.sampled_from(ids))]
    if draw(st.booleans()):
        asked["min_nodes"] = draw(st.integers(1, min(layers, len(ids))))
    if draw(st.booleans()):
        asked["max_nodes"] = draw(st.integers(asked.get("min_nodes", 1), 6))
    if draw(st.booleans()):
        asked["fixed_layers"] = [
            model_pb2.FixedLayers(node_id=draw(st.sampled_from(ids)), layers=draw(st.integers(1, layers)))
        ]
    return asked


@LOOK
@given(shape=shapes, nodes=nodes_of(5, st.integers(0, 40)), data=st.data())
def test_a_model_is_placed_exactly_when_some_order_and_cut_holds_it(shape: Shape, nodes: list[Node], data: Any) -> None:
    asked = data.draw(constraints(nodes, len(shape.layers))) if data.draw(st.booleans()) else {}
    outcome = place(state_of(nodes, shape.model()), spec(**asked), ())
    if isinstance(outcome, model_pb2.Refusal) and outcome.reason == CONTRADICTORY:
        return

    assert isinstance(outcome, model_pb2.Placement) == brute_force_fits(shape, nodes, asked)


@LOOK
@given(
    shape=shapes,
    nodes=nodes_of(10, st.integers(0, 40)),
    objective=st.sampled_from(model_pb2.Objective.values()),
    speeds=st.booleans(),
)
def test_every_shard_fits_its_node_and_every_layer_is_held_once(
    shape: Shape, nodes: list[Node], objective: model_pb2.Objective.ValueType, *, speeds: bool
) -> None:
    nodes = [replace(node, speed=1000 + 100 * i if speeds else None) for i, node in enumerate(nodes)]
    outcome = place(state_of(nodes, shape.model()), spec(objective=objective), ())
    if isinstance(outcome, model_pb2.Refusal):
        return

    by_id = {node.node_id: node for node in nodes}
    bounds = [shard.first_layer for shard in outcome.shards] + [outcome.shards[-1].end_layer]
    assert bounds[0] == 0
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == len(shape.layers)
    assert len({shard.node_id for shard in outcome.shards}) == len(outcome.shards)
    for shard in outcome.shards:
        node = by_id[shard.node_id]
        assert shard.bytes.total_bytes == shape.bytes_of(node, shard.first_layer, shard.end_layer)
        assert shard.bytes.total_bytes <= (node.available or 0)
    assert {budget.node_id: budget.layers for budget in outcome.nodes if budget.layers} == layers_by_node(outcome)


@LOOK
@given(shape=shapes, nodes=nodes_of(11, st.integers(5, 60)), more=st.integers(1, 20), data=st.data())
def test_more_memory_or_another_node_never_turns_a_yes_into_a_no(
    shape: Shape, nodes: list[Node], more: int, data: Any
) -> None:
    shape = replace(shape, layers=shape.layers * 3)
    *before, newcomer = nodes
    asked = data.draw(st.sampled_from([{}, {"min_nodes": 2}, {"max_nodes": 3}, {"max_nodes": 9}]))
    if not before or isinstance(place(state_of(before, shape.model()), spec(**asked), ()), model_pb2.Refusal):
        return

    assert isinstance(place(state_of([*before, newcomer], shape.model()), spec(**asked), ()), model_pb2.Placement)
    luckier = data.draw(st.integers(0, len(before) - 1))
    richer = [replace(each, available=(each.available or 0) + more * (i == luckier)) for i, each in enumerate(before)]
    assert isinstance(place(state_of(richer, shape.model()), spec(**asked), ()), model_pb2.Placement)


@LOOK
@given(shape=shapes, nodes=nodes_of(10, st.integers(0, 30), (NORMAL, WARNING, CRITICAL, UNKNOWN)), data=st.data())
def test_the_order_in_which_nodes_joined_changes_nothing(shape: Shape, nodes: list[Node], data: Any) -> None:
    shuffled = data.draw(st.permutations(nodes))

    assert place(state_of(nodes, shape.model()), spec(), ()) == place(state_of(shuffled, shape.model()), spec(), ())


@LOOK
@given(
    shape=shapes,
    nodes=nodes_of(10, st.integers(0, 30), (NORMAL, WARNING, CRITICAL, UNKNOWN)),
    silent=st.sets(st.sampled_from(["n00", "n01", "n02"])),
)
def test_every_refusal_names_every_node_and_proves_its_numbers(
    shape: Shape, nodes: list[Node], silent: set[str]
) -> None:
    outcome = place(state_of(nodes, shape.model()), spec(), silent)
    if isinstance(outcome, model_pb2.Placement):
        return

    assert [budget.node_id for budget in outcome.nodes] == [node.node_id for node in nodes]
    assert all(f"\n  {node.node_id}: " in outcome.message for node in nodes)
    if outcome.reason == model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY:
        assert outcome.needed_bytes > outcome.offered_bytes
    if outcome.reason == model_pb2.REFUSAL_REASON_FRAGMENTED:
        assert outcome.needed_bytes <= outcome.offered_bytes


@LOOK
@given(shape=shapes, nodes=nodes_of(10, st.integers(0, 30), (NORMAL,)))
def test_a_remedy_in_bytes_is_the_least_that_does_it(shape: Shape, nodes: list[Node]) -> None:
    outcome = place(state_of(nodes, shape.model()), spec(), ())
    if isinstance(outcome, model_pb2.Placement):
        return

    def with_more(node_id: str, more: int) -> object:
        richer = [replace(each, available=(each.available or 0) + more * (each.node_id == node_id)) for each in nodes]
        return place(state_of(richer, shape.model()), spec(), ())

    for remedy in outcome.remedies:
        if remedy.HasField("more_bytes"):
            assert isinstance(with_more(remedy.node_id, remedy.more_bytes), model_pb2.Placement)
            assert isinstance(with_more(remedy.node_id, remedy.more_bytes - 1), model_pb2.Refusal)
            assert not remedy.text.endswith("less may do")


def promised_bytes(state: State) -> dict[str, int]:
    return {node_id: record.promised_bytes for node_id, record in state.nodes.items()}


@LOOK
@given(
    shape=shapes,
    nodes=nodes_of(6, st.integers(0, 120)),
    steps=st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=12),
)
def test_no_sequence_of_placements_and_releases_promises_more_than_there_is(
    shape: Shape, nodes: list[Node], steps: list[int | None]
) -> None:
    """None places once more, a number releases that instance."""
    state = state_of(nodes, shape.model())
    for number, step in enumerate(steps):
        if step is not None:
            add(state, instance_released(f"i{step}"))
            continue
        outcome = place(state, spec(), ())
        if isinstance(outcome, model_pb2.Placement):
            add(state, placed(f"i{number}", outcome, spec()))
        assert all(promised_bytes(state)[node.node_id] <= (node.available or 0) for node in nodes)


@LOOK
@given(shape=shapes, nodes=nodes_of(6, st.integers(0, 30), (NORMAL, WARNING, CRITICAL, UNKNOWN)))
def test_force_places_wherever_there_is_a_runner(shape: Shape, nodes: list[Node]) -> None:
    outcome = place(state_of(nodes, shape.model()), spec(force=True), ())

    assert isinstance(outcome, model_pb2.Placement)


@LOOK
@given(shape=shapes, nodes=nodes_of(7, st.integers(0, 60)), speeds=st.lists(st.integers(1, 9), min_size=7, max_size=7))
def test_the_runners_up_are_the_best_of_all_other_sets(shape: Shape, nodes: list[Node], speeds: list[int]) -> None:
    fast = [replace(node, speed=100 * speed) for node, speed in zip(nodes, speeds, strict=False)]
    state = state_of(fast, shape.model())

    few, all_of_them = (
        decide(Roster(state).survey("m"), understand(state, spec()), spec(), (), runners_up) for runners_up in (3, 200)
    )

    if isinstance(few, model_pb2.Placement) and isinstance(all_of_them, model_pb2.Placement):
        assert few.shards == all_of_them.shards
        assert list(few.alternatives) == list(all_of_them.alternatives)[:3]
