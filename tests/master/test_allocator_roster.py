"""Many nodes looked at together: kept from one decision to the next, copied for each, and never differing from new."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.master.allocator import Roster, decide, place, stands, understand
from services.master.allocator.request import Request
from services.master.state import State
from tests.master.facts import instance_released, node_removed, shard_status
from tests.master.given_nodes import (
    CRITICAL,
    GB,
    NORMAL,
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
from ullage.v1 import event_pb2, model_pb2, node_pb2

SHAPE = model([3, 4, 5, 4], embedding=2, head=1)


def kept_decision(roster: Roster, asked: model_pb2.PlacementSpec) -> model_pb2.Placement | model_pb2.Refusal:
    return decide(roster.survey("m"), understand(roster.state, asked), asked, frozenset())


def nodes() -> list[Node]:
    return [Node(f"n{i}", 20, speed=100 + i) for i in range(4)]


levels = st.sampled_from([NORMAL, WARNING, CRITICAL])
changes = st.lists(
    st.one_of(
        st.tuples(
            st.just("sample"), st.integers(0, 5), st.integers(0, 30), st.sampled_from([NORMAL, WARNING, CRITICAL])
        ),
        st.tuples(st.just("place")),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 5)),
        st.tuples(st.just("run"), st.integers(0, 9), st.integers(0, 20)),
        st.tuples(st.just("link"), st.integers(0, 5), st.integers(0, 5), st.booleans()),
    ),
    max_size=14,
)


def named(which: int | str) -> str:
    return which if isinstance(which, str) else f"n{which}"


def change(state: State, number: int, what: tuple[Any, ...]) -> None:
    match what:
        case ("sample", which, available, level):
            add(state, *facts_of(Node(f"n{which}", available, level, speed=100 + which)))
        case ("place",):
            outcome = place(state, spec(), ())
            if isinstance(outcome, model_pb2.Placement):
                add(state, placed(f"i{number}", outcome, spec()))
        case ("release", which):
            add(state, instance_released(f"i{which}"))
        case ("remove", which):
            add(state, node_removed(f"n{which}"))
        case ("run", which, resident):
            add(state, shard_status(model_pb2.SHARD_PHASE_RUNNING, f"i{which}", 0, "n0", resident))
        case ("link", sender, receiver, reachable):
            link = node_pb2.Link(from_node_id=named(sender), to_node_id=named(receiver), reachable=reachable)
            add(state, event_pb2.Fact(link_measured=event_pb2.LinkMeasured(link=link)))
        case _:
            raise AssertionError(what)


@settings(deadline=None, max_examples=60)
@given(changes=changes)
def test_a_roster_that_was_kept_decides_as_one_made_anew(changes: list[tuple[Any, ...]]) -> None:
    state = state_of(nodes(), SHAPE)
    roster = Roster(state)
    for number, what in enumerate(changes):
        change(state, number, what)
        assert kept_decision(roster, spec()) == place(state, spec(), ())


@settings(deadline=None, max_examples=40)
@given(changes=changes, pieces=st.lists(st.integers(0, 2), min_size=14, max_size=14))
def test_a_roster_that_catches_up_in_pieces_decides_as_one_made_anew(
    changes: list[tuple[Any, ...]], pieces: list[int]
) -> None:
    state = state_of(nodes(), SHAPE)
    roster = Roster(state)
    for number, (what, count) in enumerate(zip(changes, pieces, strict=False)):
        change(state, number, what)
        for _ in range(count):
            roster.catch_up(1)
    while not roster.catch_up(1):
        pass

    assert kept_decision(roster, spec()) == place(state, spec(), ())


def test_a_survey_stands_still_while_the_state_goes_on() -> None:
    state = state_of(nodes(), SHAPE)
    roster = Roster(state)
    before = roster.survey("m")
    request = understand(state, spec())
    expected = decide(before, request, spec(), frozenset())

    add(state, *facts_of(Node("n3", 1, CRITICAL)), *facts_of(Node("n9", 99)), node_removed("n2"))
    roster.survey("m")

    assert decide(before, request, spec(), frozenset()) == expected


def test_a_decision_stands_while_its_nodes_can_give_what_was_decided() -> None:
    state = state_of([Node("a", 20), Node("b", 10)], SHAPE)
    roster = Roster(state)
    survey, request = roster.survey("m"), understand(state, spec())
    chosen = decide(survey, request, spec(), frozenset())
    assert isinstance(chosen, model_pb2.Placement)
    assert isinstance(request, Request)
    assert layers_by_node(chosen) == {"a": 4}

    def stands_now(*silent: str) -> bool:
        return stands(chosen, survey, state, request, silent.__contains__)

    add(state, *facts_of(Node("a", 19)), *facts_of(Node("b", 0)))
    assert stands_now()
    assert not stands_now("a")
    add(state, *facts_of(Node("a", 18)))
    assert not stands_now()
    add(state, *facts_of(Node("a", 20)), node_removed("a"))
    assert not stands_now()


def test_a_decision_stands_while_each_of_its_ranks_reaches_the_next() -> None:
    state = state_of([Node("a", 12), Node("b", 12), Node("c", 12)], SHAPE)
    survey, request = Roster(state).survey("m"), understand(state, spec(max_nodes=2))
    assert isinstance(request, Request)
    chosen = decide(survey, request, spec(max_nodes=2), frozenset())
    assert isinstance(chosen, model_pb2.Placement), chosen.message
    assert layers_by_node(chosen).keys() == {"a", "b"}

    change(state, 0, ("link", "b", "c", False))
    assert stands(chosen, survey, state, request, lambda _: False)
    change(state, 0, ("link", "b", "a", False))
    assert not stands(chosen, survey, state, request, lambda _: False)


def test_a_decision_stands_while_one_that_has_the_models_files_is_heard() -> None:
    state = state_of([Node("a", 20, models=()), Node("b", 1)], SHAPE)
    survey, request = Roster(state).survey("m"), understand(state, spec())
    assert isinstance(request, Request)
    chosen = decide(survey, request, spec(), frozenset())
    assert isinstance(chosen, model_pb2.Placement)
    add(state, *facts_of(Node("a", 20, models=())))

    assert stands(chosen, survey, state, request, lambda _: False)
    assert not stands(chosen, survey, state, request, lambda node_id: node_id == "b")


def test_thousands_of_nodes_are_decided_alike_in_any_order_and_only_the_weightiest_are_kept() -> None:
    many = [Node(f"n{i:04}", (5 + i * 7919 % 40) * GB, speed=GB * (50 + i * 104_729 % 300)) for i in range(2000)]
    shape = model(even(60 * GB, 40), embedding=GB, head=GB)

    chosen = place(state_of(many, shape), spec(), ())
    again = place(state_of([many[i * 7 % 2000] for i in range(2000)], shape), spec(), ())

    assert isinstance(chosen, model_pb2.Placement)
    assert isinstance(again, model_pb2.Placement)
    again.decided_at_sequence = chosen.decided_at_sequence
    assert chosen == again
    assert len(chosen.nodes) == 64
    assert chosen.nodes_omitted == 1936
    assert {shard.node_id for shard in chosen.shards} <= {node.node_id for node in chosen.nodes}


def test_a_placement_over_more_nodes_than_are_kept_keeps_all_it_uses() -> None:
    many = [Node(f"n{i:04}", 2 * GB) for i in range(300)]

    chosen = place(state_of(many, model(even(100 * GB, 100))), spec(objective=model_pb2.OBJECTIVE_PROPORTIONAL), ())

    assert isinstance(chosen, model_pb2.Placement)
    assert len(chosen.shards) == len(chosen.nodes) == 100
    assert chosen.nodes_omitted == 200


def test_a_refusal_of_many_nodes_names_every_one() -> None:
    many = [Node(f"n{i:04}", GB) for i in range(500)]

    answer = place(state_of(many, model(even(600 * GB, 500))), spec(), ())

    assert isinstance(answer, model_pb2.Refusal)
    assert [node.node_id for node in answer.nodes] == [node.node_id for node in many]
    assert all(f"\n  {node.node_id}: " in answer.message for node in many)


def test_decisions_in_many_threads_on_one_survey_are_one_decision() -> None:
    state = state_of([replace(node, available=12) for node in nodes()], SHAPE)
    survey, request = Roster(state).survey("m"), understand(state, spec())

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: decide(survey, request, spec(), frozenset()), range(32)))

    assert all(outcome == outcomes[0] for outcome in outcomes)
