"""Nodes whose runner computes in a card's own memory, which others use too."""

from __future__ import annotations

from services.master.allocator import place
from services.master.state import State
from tests.master.facts import shard_status
from tests.master.given_nodes import GB, Node, add, model, placed, spec, state_of
from ullage.v1 import event_pb2, model_pb2, node_pb2


def read(state: State, *, free: float, name: str = "RTX 4070") -> State:
    """What the node's probe says of its cards: the one computed on, and one within the processor."""
    cards = [
        node_pb2.Gpu(name="in the processor", unified=True),
        node_pb2.Gpu(name="another", memory_total_bytes=12 * GB, memory_available_bytes=3 * GB),
        node_pb2.Gpu(name=name, memory_total_bytes=12 * GB, memory_available_bytes=int(free)),
    ]
    sample = node_pb2.SystemSample(gpus=cards)
    add(state, event_pb2.Fact(system_sampled=event_pb2.SystemSampled(node_id="a", sample=sample)))
    return state


def card(layers: int) -> State:
    """A node of 32 GB with a card, and a model of so many layers of a gigabyte."""
    node = Node("a", 30 * GB, ram=32 * GB, device="cuda", device_name="RTX 4070", device_limit=12.9 * GB)
    return state_of([node], model([GB] * layers))


def budget(state: State) -> model_pb2.NodeBudget:
    return place(state, spec(), ()).nodes[0]


def test_m13_a_card_gives_what_others_leave_of_its_memory_and_not_the_nodes() -> None:
    fits, falls_short = (place(read(card(layers), free=11.5 * GB), spec(), ()) for layers in (11, 12))

    assert isinstance(fits, model_pb2.Placement)
    assert fits.nodes[0].budget_bytes == fits.nodes[0].device_free_bytes == 11_500_000_000
    assert isinstance(falls_short, model_pb2.Refusal)
    assert ", its card has 10.7 GiB free = 10.7 GiB: 11 of 12 layers" in falls_short.message


def test_its_limit_holds_where_nothing_is_read_of_a_card() -> None:
    assert budget(card(1)).budget_bytes == 12_900_000_000
    assert not budget(card(1)).HasField("device_free_bytes")


def test_what_is_promised_on_a_card_counts_once_before_it_is_loaded_and_once_after() -> None:
    state = read(card(5), free=11 * GB)
    outcome = place(state, spec(), ())
    assert isinstance(outcome, model_pb2.Placement)

    add(state, placed("i0", outcome, spec()))
    assert budget(state).device_free_bytes == 6 * GB

    add(state, shard_status(model_pb2.SHARD_PHASE_RUNNING, "i0", 0, "a", GB))
    assert budget(read(state, free=6 * GB)).device_free_bytes == 6 * GB


def test_what_a_replaced_instance_holds_of_a_card_is_credited() -> None:
    state = read(card(8), free=11 * GB)
    outcome = place(state, spec(), ())
    assert isinstance(outcome, model_pb2.Placement)
    add(state, placed("i0", outcome, spec()))

    assert isinstance(place(state, spec(), ()), model_pb2.Refusal)
    assert isinstance(place(state, spec(replace_instance_id="i0"), ()), model_pb2.Placement)


def test_a_card_is_nothing_to_a_runner_that_computes_in_ram() -> None:
    state = read(state_of([Node("a", 30 * GB, device="cpu")], model([GB] * 20)), free=GB)

    assert isinstance(place(state, spec(), ()), model_pb2.Placement)
    assert not budget(state).HasField("device_free_bytes")
