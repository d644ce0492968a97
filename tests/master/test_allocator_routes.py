"""More nodes than are decided exactly, of which some do not reach some: the answer is that of trying every order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from services.master.allocator import Request, Roster, place, understand
from services.master.allocator.arrangement import arranged
from services.master.allocator.case import Case, Fit
from services.master.allocator.demand import Form, Load, demand
from services.master.allocator.hops import Way, hops
from services.master.allocator.problem import Problem
from services.master.allocator.ranges import Candidate
from services.master.allocator.refusal import refuse
from services.master.allocator.routes import Arrangement
from tests.master.given_nodes import GB, Node, even, model, spec, state_of
from tests.master.test_allocator_ways import measured
from ullage.v1 import model_pb2, node_pb2

FORM = Form(node_pb2.WEIGHT_FORM_AS_STORED, 2, fused_attention=True)


@dataclass(frozen=True)
class Graph:
    """Nodes by what they have, the pairs of which the first does not reach the second, and a model's layers."""

    rooms: tuple[int, ...]
    missing: frozenset[tuple[int, int]]
    layers: tuple[int, ...]
    nodes_max: int | None

    def holds(self) -> bool:
        """Some ring holds the model: every set, every order and every cut, by which of them reach which boundary."""
        return any(room >= sum(self.layers) for room in self.rooms) or any(map(self.rings_from, range(len(self.rooms))))

    def rings_from(self, first: int) -> bool:
        """The same of rings that begin with `first`."""
        count, most = len(self.rooms), self.nodes_max or len(self.rooms)
        reached = {(1 << first, first): self.ends(first, {0})}
        for size in range(2, most + 1):
            below, reached = reached, {}
            for ((used, last), starts), after in product(below.items(), range(count)):
                if used >> after & 1 or (last, after) in self.missing or size > most:
                    continue
                ends = self.ends(after, starts)
                if len(self.layers) in ends and (after, first) not in self.missing:
                    return True
                reached.setdefault((used | 1 << after, after), set()).update(ends - {len(self.layers)})
        return False

    def ends(self, node: int, starts: set[int]) -> set[int]:
        """Where a node can end that begins at any of `starts`."""
        found = set()
        for start in starts:
            taken = 0
            for end in range(start + 1, len(self.layers) + 1):
                taken += self.layers[end - 1]
                if taken > self.rooms[node]:
                    break
                found.add(end)
        return found


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """From nine to eleven nodes, few of which are enough, with some or most of the ways missing."""
    count = draw(st.integers(9, 11))
    chance = draw(st.randoms(use_true_random=False))
    part = draw(st.sampled_from([0.0, 0.1, 0.4, 0.7, 0.85]))
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    layers = tuple(
        chance.choice(draw(st.sampled_from([[1], [3, 5], [2, 3, 7]]))) for _ in range(draw(st.integers(4, 9)))
    )
    share = sum(layers) * draw(st.sampled_from([1.0, 1.2, 1.6, 2.5])) / count
    return Graph(
        rooms=tuple(int(share * chance.uniform(0.3, 2.0)) for _ in range(count)),
        missing=frozenset(pair for pair in pairs if chance.random() < part),
        layers=layers,
        nodes_max=draw(st.sampled_from([None, None, 4, 9])),
    )


@settings(deadline=None, max_examples=40)
@given(graph=graphs())
def test_whether_many_nodes_hold_a_model_is_found_out_whatever_ways_are_missing(graph: Graph) -> None:
    nodes = [Node(f"n{i:02}", room) for i, room in enumerate(graph.rooms)]
    state = state_of(nodes, model(graph.layers))
    measured(state, [(f"n{i:02}", f"n{j:02}", None) for i, j in sorted(graph.missing)])

    outcome = place(state, spec(**({} if graph.nodes_max is None else {"max_nodes": graph.nodes_max})), ())

    assert isinstance(outcome, model_pb2.Placement) == graph.holds()
    if isinstance(outcome, model_pb2.Placement) and len(outcome.shards) > 1:
        ring = [int(shard.node_id[1:]) for shard in outcome.shards]
        assert not graph.missing & set(zip(ring, [*ring[1:], ring[0]], strict=True))


def problem(rooms: Sequence[int], layers: Sequence[int], ways: dict[str, dict[str, Way]]) -> Problem:
    needs = demand(model(layers), FORM, Load(1, 1))
    names = [f"n{i:02}" for i in range(len(rooms))]
    candidates = [Candidate(name, needs, room, room) for name, room in zip(names, rooms, strict=True)]
    return Problem(tuple(candidates), hops(names, ways, token_bytes=0, prompt_bytes=0))


def one_way_round(count: int) -> dict[str, dict[str, Way]]:
    """Nodes of which each reaches only the one that follows it."""
    names = [f"n{i:02}" for i in range(count)]
    return {
        sender: {
            to: Way(0.001 if (i + 1) % count == j else float("inf"), float("inf"))
            for j, to in enumerate(names)
            if i != j
        }
        for i, sender in enumerate(names)
    }


def test_the_only_ring_there_is_is_found_wherever_it_begins() -> None:
    ring = problem([3] * 12, [2] * 12, one_way_round(12))

    order = arranged(ring, most=False).order

    assert order is not None
    assert [(after - before) % 12 for before, after in zip(order, [*order[1:], order[0]], strict=True)] == [1] * 12


def test_a_refusal_says_where_not_every_order_was_tried() -> None:
    """Rooms and layers of which no order goes together, which takes some steps to find out."""
    rooms, layers = [5, 7, 5, 8, 9, 7, 9, 10, 5], [7, 3, 7, 3, 7, 7, 7, 7, 2, 3, 2, 7]
    state = state_of([Node(f"n{i:02}", room) for i, room in enumerate(rooms)], model(layers))
    request = understand(state, spec())
    assert isinstance(request, Request)

    whole, short = (Case(Roster(state).survey("m"), request, frozenset(), steps_max=steps) for steps in (400_000, 20))

    assert "Not every order of its nodes could be tried" in refuse(short).message
    assert "Not every order" not in refuse(whole).message


def test_a_ring_of_more_ranks_than_are_tried_is_given_up_and_not_denied() -> None:
    ring = problem([3] * 260, [2] * 260, one_way_round(260))

    assert arranged(ring, most=False) == Arrangement(None, proved=False)


def test_far_more_nodes_than_are_needed_are_placed_though_the_roomiest_reach_only_one_other_each() -> None:
    nodes = [Node(f"n{i:03}", 3 * GB if i < 40 else 2 * GB) for i in range(300)]
    state = state_of(nodes, model(even(6 * GB, 6)))
    measured(
        state, [(f"n{i:03}", f"n{j:03}", None) for i in range(40) for j in range(300) if j not in {i, (i + 1) % 40}]
    )

    outcome = place(state, spec(), ())

    assert isinstance(outcome, model_pb2.Placement), outcome.message
    assert len(outcome.shards) == 3


def test_a_required_node_that_can_hold_no_layer_is_no_riddle() -> None:
    """Sixty nodes of which many do not reach each other would else be tried in every order."""
    state = state_of([Node(f"n{i:02}", 9 if i else 1) for i in range(60)], model([4, 5] * 40))
    measured(state, [(f"n{i:02}", f"n{j:02}", None) for i in range(60) for j in range(60) if (i * j) % 3 == 1])
    request = understand(state, spec(require_node_ids=["n00"]))
    assert isinstance(request, Request)

    assert Case(Roster(state).survey("m"), request, frozenset(), steps_max=1).fit == Fit(holds=False)


def test_layers_that_are_fixed_count_as_what_their_node_holds() -> None:
    """Three nodes of up to 30 layers and one that gets 5 of them, however large it is, do not hold 100."""
    state = state_of([Node(f"n{i:02}", 30 if i else 90) for i in range(40)], model([1] * 100))
    measured(state, [(f"n{i:02}", f"n{j:02}", None) for i in range(40) for j in range(40) if (i + 2 * j) % 7 == 1])
    fixed = model_pb2.FixedLayers(node_id="n00", layers=5)
    request = understand(state, spec(fixed_layers=[fixed], max_nodes=4))
    assert isinstance(request, Request)

    assert Case(Roster(state).survey("m"), request, frozenset(), steps_max=1).fit == Fit(holds=False)


def test_what_many_nodes_lack_beside_the_few_that_hold_a_model_alone() -> None:
    """The fastest nodes have next to nothing free: those that hold it alone are each other's runners-up."""
    busy = [Node(f"a{i:02}", 2 * GB, speed=900e9) for i in range(60)]
    roomy = [Node(f"b{i}", 80 * GB, speed=(400 - i) * 1e9) for i in range(5)]
    state = state_of([*busy, *roomy], model(even(40 * GB, 40)))

    outcome = place(state, spec(max_nodes=1), ())

    assert isinstance(outcome, model_pb2.Placement), outcome.message
    assert [shard.node_id for shard in outcome.shards] == ["b0"]
    assert [each.shards[0].node_id for each in outcome.alternatives] == ["b1", "b2", "b3"]
