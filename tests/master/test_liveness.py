"""A node is heard or it is not, by the master's own clock."""

from __future__ import annotations

import pytest

from services.master.cluster import Cluster
from services.master.liveness import Bounds, fallen, liveness
from tests.clocks import FakeClock
from tests.master.facts import memory_sampled
from ullage.v1 import state_pb2

UNHEARD, LIVE, SUSPECTED, LOST = (
    state_pb2.LIVENESS_UNHEARD,
    state_pb2.LIVENESS_LIVE,
    state_pb2.LIVENESS_SUSPECTED,
    state_pb2.LIVENESS_LOST,
)


@pytest.mark.parametrize(
    ("heard_at", "now", "expected"),
    [
        (None, 0.0, UNHEARD),
        (None, 1e9, UNHEARD),
        (100.0, 100.0, LIVE),
        (100.0, 102.999, LIVE),
        (100.0, 103.0, SUSPECTED),
        (100.0, 129.999, SUSPECTED),
        (100.0, 130.0, LOST),
        (100.0, 1e9, LOST),
    ],
)
def test_silence_makes_a_node_suspected_then_lost(
    heard_at: float | None, now: float, expected: state_pb2.Liveness.ValueType
) -> None:
    assert liveness(heard_at, now, Bounds(3.0, 30.0)) == expected


def test_only_what_got_worse_is_told() -> None:
    before = {"a": LIVE, "b": LIVE, "c": SUSPECTED, "d": SUSPECTED, "e": LOST, "f": UNHEARD}
    after = {"a": LIVE, "b": SUSPECTED, "c": SUSPECTED, "d": LOST, "e": LIVE, "f": UNHEARD, "g": SUSPECTED}
    assert fallen(before, after) == [("b", SUSPECTED), ("d", LOST), ("g", SUSPECTED)]


async def test_a_silent_node_is_recorded_once_at_each_bound(cluster: Cluster, clock: FakeClock) -> None:
    await cluster.record("probe/a/1", [])
    await cluster.append(memory_sampled("a"))
    cluster.hear("a")
    recorded = []
    async with cluster.subscribe() as subscription:
        for seconds in (2.9, 0.2, 0.2, 26.6, 0.2, 100.0):
            clock.advance(seconds)
            await cluster.note_silences()
            while not subscription.empty:
                recorded += [(seconds, event.fact.WhichOneof("fact")) for event in await anext(subscription)]
    assert recorded == [(0.2, "node_suspected"), (0.2, "node_lost")]
    assert cluster.state.sequence == 3


async def test_a_node_that_comes_back_and_falls_silent_again_is_recorded_again(
    cluster: Cluster, clock: FakeClock
) -> None:
    await cluster.append(memory_sampled("a"))
    for _ in range(2):
        cluster.hear("a")
        await cluster.note_silences()
        assert cluster.silent_node_ids() == frozenset()
        clock.advance(5.0)
        await cluster.note_silences()
        assert cluster.silent_node_ids() == {"a"}
    assert cluster.state.sequence == 3


async def test_the_machines_clock_may_jump_without_anybody_being_lost(cluster: Cluster, clock: FakeClock) -> None:
    await cluster.append(memory_sampled("a"))
    cluster.hear("a")
    for jump_ns in (3_600_000_000_000, -7_200_000_000_000):
        clock.set_wall(clock.now_ns() + jump_ns)
        clock.advance(0.5)
        assert await cluster.append(memory_sampled("a")) == cluster.state.sequence
        assert cluster.liveness("a") == LIVE
