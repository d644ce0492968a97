"""Nothing is applied, told or acknowledged before it is stored; and what is applied is what a replay makes."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.log_format import KIND_NAMES
from services.master import errors
from services.master import subscription as subscriptions
from services.master.cluster import Cluster, attached, opened
from services.master.replay import fold
from services.master.state import State, apply_fact, apply_facts, superseded
from services.master.view import cluster_state, state_hash
from tests.clocks import FakeClock
from tests.master.facts import (
    GIB,
    instance_placed,
    instance_released,
    link_measured,
    memory_sampled,
    model_registered,
    node_announced,
    node_removed,
    observations,
    runner_announced,
    shard_status,
    system_sampled,
    unknown_kind,
)
from ullage.v1 import event_pb2, model_pb2, state_pb2

NODE_IDS = st.sampled_from(["a", "b", "c"])
INSTANCE_IDS = st.sampled_from(["i", "j"])
BYTES = st.integers(0, 8 * GIB)
FACTS = st.one_of(
    st.builds(memory_sampled, NODE_IDS, BYTES),
    st.builds(system_sampled, NODE_IDS, cpu_pct=st.floats(0, 100)),
    st.builds(node_announced, NODE_IDS, st.sampled_from(["1", "2"]), st.none() | st.text(max_size=5)),
    st.builds(node_removed, NODE_IDS),
    st.builds(runner_announced, NODE_IDS, st.sampled_from(["1", "2"])),
    st.builds(link_measured, NODE_IDS, NODE_IDS),
    st.builds(model_registered, digest=st.sampled_from(["d1", "d2"])),
    st.builds(instance_placed, INSTANCE_IDS, st.lists(NODE_IDS, min_size=1, max_size=3), BYTES, st.text(max_size=2)),
    st.builds(
        shard_status,
        st.sampled_from(model_pb2.ShardPhase.values()),
        INSTANCE_IDS,
        st.integers(0, 3),
        NODE_IDS,
        st.none() | BYTES,
    ),
    st.builds(instance_released, INSTANCE_IDS),
    st.builds(unknown_kind),
    # Every other kind of fact, empty: a log of a release to come may hold what this one would not write.
    st.sampled_from(sorted(KIND_NAMES.values())).map(lambda name: event_pb2.Fact.FromString(_empty(name))),
)


def _empty(name: str) -> bytes:
    fact = event_pb2.Fact()
    getattr(fact, name).SetInParent()
    return fact.SerializeToString()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(FACTS, min_size=1, max_size=4), max_size=10))
def test_the_live_state_is_the_replayed_state_at_every_sequence(commits: list[list[event_pb2.Fact]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_compare(Path(folder) / "events.db", commits))


async def _compare(path: Path, commits: list[list[event_pb2.Fact]]) -> None:
    live: dict[int, str] = {}
    async with opened(path, FakeClock()) as cluster:
        for facts in commits:
            await cluster.append(*facts)
            live[cluster.state.sequence] = state_hash(cluster.state)
        state = State()
        for sequence in range(1, cluster.state.sequence + 1):
            list(fold(cluster.log, state, sequence))
            assert state.sequence == sequence
            assert live.get(sequence, state_hash(state)) == state_hash(state)
        assert state == cluster.state
        at_once = State()
        list(fold(cluster.log, at_once, cluster.state.sequence))
        assert at_once == cluster.state


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(FACTS, max_size=40))
def test_facts_applied_together_are_what_they_are_one_by_one(facts: list[event_pb2.Fact]) -> None:
    one_by_one, together = State(), State()
    events = [(sequence, 10 * sequence, fact) for sequence, fact in enumerate(facts, start=1)]
    for event in events:
        apply_fact(one_by_one, *event)
    apply_facts(together, events)
    assert together == one_by_one


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(FACTS, max_size=40), st.lists(BYTES, min_size=1, max_size=5))
def test_of_samples_one_right_after_the_other_the_superseded_ones_leave_nothing(
    before: list[event_pb2.Fact], available: list[int]
) -> None:
    whole, short = State(), State()
    events = [(sequence, 10 * sequence, fact) for sequence, fact in enumerate(before, start=1)]
    samples = [(100 + n, 1000, memory_sampled("a", bytes_)) for n, bytes_ in enumerate(available)]
    apply_facts(whole, [*events, *samples])
    apply_facts(short, events)
    apply_facts(short, samples[superseded(short, "a", len(samples)) :])
    assert short == whole


def test_all_but_two_samples_of_a_known_node_are_superseded() -> None:
    state = State()
    assert superseded(state, "a", 64) == 0
    apply_facts(state, [(1, 10, memory_sampled("a"))])
    assert [superseded(state, "a", samples) for samples in (1, 2, 3, 64)] == [0, 0, 1, 62]
    assert superseded(state, None, 64) == 0


async def test_a_fact_is_applied_and_published_before_it_is_acknowledged(cluster: Cluster) -> None:
    async with cluster.subscribe() as subscription:
        assert await cluster.append(memory_sampled("a"), memory_sampled("b")) == 2
        assert sorted(cluster.state.nodes) == ["a", "b"]
        assert not subscription.empty
        events = await anext(subscription)
    assert [event.sequence for event in events] == [1, 2]
    assert [event.fact for event in events] == [memory_sampled("a"), memory_sampled("b")]
    assert {event.row.source for event in events} == {"master"}


async def test_a_subscriber_sees_what_comes_after_it_began(cluster: Cluster) -> None:
    await cluster.append(memory_sampled("a"))
    async with cluster.subscribe() as subscription:
        assert subscription.empty
        await cluster.append(memory_sampled("b"))
        (event,) = await anext(subscription)
    assert event.sequence == 2


async def test_what_comes_in_the_turn_in_which_the_time_runs_out_has_arrived() -> None:
    subscription = subscriptions.Subscription(None, 0)
    waiting = asyncio.create_task(subscription.arrived(0.01))
    await asyncio.sleep(0)
    time.sleep(0.02)  # noqa: ASYNC251 - the loop stands still, as that of a busy machine does
    await asyncio.sleep(0)  # To the turn in which the timer rings, after this.
    subscription.put(subscriptions.Happenings([]))
    assert await waiting


async def test_a_subscriber_to_some_kinds_sees_only_these(cluster: Cluster) -> None:
    async with cluster.subscribe(["node_removed"]) as subscription:
        await cluster.append(memory_sampled("a"), node_removed("a"))
        (event,) = await anext(subscription)
    assert event.sequence == 2


async def test_a_slow_subscriber_is_cut_off_and_told_where_to_go_on(cluster: Cluster) -> None:
    batch = [memory_sampled()] * 4096
    async with cluster.subscribe() as slow, cluster.subscribe(["node_removed"]) as other:
        await cluster.append(node_removed("a"))
        await anext(slow)
        for _ in range(subscriptions.SUBSCRIPTION_EVENTS_MAX // len(batch) + 1):
            await cluster.append(*batch)
        with pytest.raises(errors.SubscriberTooSlow, match="follow again from sequence 2"):
            await anext(slow)
        (event,) = await anext(other)
        assert event.sequence == 1


async def test_subscribers_are_told_that_the_master_stops_after_what_they_have_not_read(cluster: Cluster) -> None:
    async with cluster.subscribe() as subscription:
        await cluster.append(memory_sampled())
        cluster.stop_streams()
        assert len(await anext(subscription)) == 1
        with pytest.raises(errors.Unavailable):
            await anext(subscription)
    async with cluster.subscribe() as late:
        with pytest.raises(errors.Unavailable):
            await anext(late)


async def test_a_subscriber_is_cut_off_by_the_bytes_that_wait_for_it_too(cluster: Cluster) -> None:
    large = node_announced("a", friendly_name="x" * (3 << 20 >> 1))
    fitting = subscriptions.SUBSCRIPTION_BYTES_MAX // len(large.SerializeToString())
    async with cluster.subscribe() as slow, cluster.subscribe(["node_removed"]) as other:
        for _ in range(fitting):
            await cluster.append(large)
        assert not slow.empty
        await cluster.append(large)
        with pytest.raises(errors.SubscriberTooSlow, match="follow again from sequence 1"):
            await anext(slow)
        assert other.empty


async def test_all_who_want_the_same_are_told_by_one_object(cluster: Cluster) -> None:
    made = []
    async with cluster.subscribe() as one, cluster.subscribe() as two, cluster.subscribe(["node_removed"]) as three:
        await cluster.append(memory_sampled("a"), node_removed("a"))
        events = await anext(one)
        assert await anext(two) is events
        assert [event.sequence for event in await anext(three)] == [2]
    for key in ("this", "this", "that"):
        events.once(key, lambda events: made.append(len(events)))
    assert made == [2, 2]


async def test_what_is_submitted_before_the_replay_is_done_is_sent_away(log_path: Path, clock: FakeClock) -> None:
    async with attached(log_path, clock) as cluster:
        with pytest.raises(errors.Unavailable, match="replaying"):
            await cluster.append(memory_sampled())


async def test_a_waiter_that_gives_up_leaves_its_fact_stored(cluster: Cluster) -> None:
    waiting = asyncio.create_task(cluster.append(memory_sampled("a")))
    await asyncio.sleep(0)
    waiting.cancel()
    await cluster.append(memory_sampled("b"))
    assert sorted(cluster.state.nodes) == ["a", "b"]


async def test_a_restart_revives_instances_and_promises_but_nobodys_liveness(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(model_registered(), memory_sampled("a"), instance_placed(total_bytes=GIB))
        cluster.hear("a")
        assert cluster.liveness("a") == state_pb2.LIVENESS_LIVE
        before = state_hash(cluster.state)
    async with opened(log_path, clock) as cluster:
        assert state_hash(cluster.state) == before
        assert cluster.state.nodes["a"].promised_bytes == GIB
        assert cluster.liveness("a") == state_pb2.LIVENESS_UNHEARD
        assert cluster.silent_node_ids() == {"a"}


async def test_a_node_is_silent_when_it_or_its_runner_was_not_heard_for_the_bound(
    cluster: Cluster, clock: FakeClock
) -> None:
    await cluster.append(*(memory_sampled(node_id) for node_id in "abcd"), runner_announced("a"), runner_announced("b"))
    cluster.hear_runner("a")
    cluster.hear("b")
    cluster.hear("c")
    assert cluster.silent_node_ids() == {"b", "d"}

    clock.advance(2.9)
    cluster.hear("b")
    clock.advance(0.1)
    cluster.hear("c")

    assert cluster.silent_node_ids() == {"a", "b", "d"}
    assert {node_id for node_id in "abcde" if cluster.is_silent(node_id)} == {"a", "b", "d", "e"}


async def test_what_was_released_stays_released_after_a_restart(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(model_registered(), instance_placed(), instance_released())
    async with opened(log_path, clock) as cluster:
        assert cluster.state.instances["i"].state == model_pb2.INSTANCE_STATE_RELEASED
        assert cluster.state.nodes["a"].shards == {}


async def test_the_view_is_ordered_by_id_whatever_came_first(log_path: Path, clock: FakeClock, tmp_path: Path) -> None:
    facts = [memory_sampled("a"), memory_sampled("b"), link_measured("a", "c"), link_measured("a", "b")]
    async with opened(log_path, clock) as cluster:
        await cluster.append(*facts)
        view = cluster_state(cluster.state)
    assert [node.identity.node_id for node in view.nodes] == ["a", "b"]
    assert [link.to_node_id for link in view.nodes[0].links] == ["b", "c"]
    assert not any(node.HasField("liveness") for node in view.nodes)


async def test_the_hash_changes_with_every_event_and_not_with_liveness(cluster: Cluster) -> None:
    await cluster.append(memory_sampled("a"))
    first = state_hash(cluster.state)
    cluster.hear("a")
    assert state_hash(cluster.state) == first
    await cluster.record("probe/a/1", observations(memory_sampled("a")))
    assert state_hash(cluster.state) != first
