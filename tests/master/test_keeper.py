"""Old samples go, and nothing else: every minute and every decision can still be told."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services import log_format
from services.master import keeper as keepers
from services.master import view
from services.master.allocator import place
from services.master.cluster import Cluster, opened
from services.master.event_log import EventLog
from services.master.keeper import Keeper
from services.master.log_reader import Range
from services.master.replay import fold, state_at
from services.master.retention import Policy, Thinning
from services.master.state import State
from tests.clocks import FakeClock
from tests.master import given_nodes
from tests.master.facts import GIB, MIB, memory_sampled, observations, shard_status, system_sampled
from ullage.v1 import event_pb2, model_pb2

NODE_IDS = ("a", "b", "c")
KEEP = Policy(samples_seconds=300, minutes_seconds=1800)


async def day(cluster: Cluster, clock: FakeClock, minutes: int, period_seconds: float = 10.0) -> None:
    """Nodes that read their memory every few seconds, and a model placed and released every ten minutes."""
    for node_id in NODE_IDS:
        described = given_nodes.facts_of(given_nodes.Node(node_id, 8 * GIB, ram=16 * GIB))
        await cluster.append(*described)
    shape = given_nodes.model([100 * MIB] * 8)
    await cluster.append(event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=shape)))
    ticks = round(minutes * 60 / period_seconds)
    for tick in range(ticks):
        facts = [memory_sampled(node_id, available=4 * GIB + tick * MIB) for node_id in NODE_IDS]
        if tick % 4 == 0:
            facts += [system_sampled(node_id, cpu_pct=tick % 100) for node_id in NODE_IDS]
        if tick % 60 == 45:
            loading = model_pb2.SHARD_PHASE_LOADING
            facts.append(shard_status(loading, f"i{tick - 15}", node_id="a", resident_bytes=MIB))
        await cluster.append(*facts)
        if tick % 60 == 30:
            await _place(cluster, f"i{tick}")
        clock.advance(period_seconds)


async def _place(cluster: Cluster, instance_id: str) -> None:
    spec = given_nodes.spec(min_nodes=2)
    outcome = place(cluster.state, spec, [])
    assert isinstance(outcome, model_pb2.Placement)
    await cluster.append(given_nodes.placed(instance_id, outcome, spec))


@pytest.fixture
async def kept(log_path: Path, clock: FakeClock) -> AsyncIterator[Cluster]:
    """An hour of three nodes, of which five minutes are to be kept whole and half an hour by the minute."""
    async with opened(log_path, clock) as cluster:
        await day(cluster, clock, minutes=60)
        yield cluster


def looking_after(cluster: Cluster) -> Keeper:
    assert isinstance(cluster.log, EventLog)
    return Keeper(cluster, cluster.log, KEEP)


async def test_compaction_keeps_every_decision_explained_and_every_minute_told(kept: Cluster, clock: FakeClock) -> None:
    head = kept.state.sequence
    asked = [record.placement.decided_at_sequence for record in kept.state.instances.values()]
    before = {at: view.state_hash(state_at(kept.log, at)) for at in (*asked, head)}
    removed = await looking_after(kept).compact(KEEP)
    assert removed > 3 * 330 * 0.75
    assert {at: view.state_hash(state_at(kept.log, at)) for at in (*asked, head)} == before
    for record in kept.state.instances.values():
        at = state_at(kept.log, record.placement.decided_at_sequence)
        assert place(at, record.spec, record.silent_node_ids) == record.placement
    mark = kept.log.mark()
    start_ns = clock.now_ns() - round(1800 * 1e9)
    first = kept.log.first_since(start_ns)
    assert first is not None
    rows = kept.log.read(first, mark, kinds=[log_format.KIND_NUMBERS["memory_sampled"]])
    minutes = {
        (log_format.event(row).fact.memory_sampled.node_id, row.recorded_at_ns // 60_000_000_000) for row in rows
    }
    assert len(minutes) >= 3 * 24


async def test_what_is_not_a_sample_is_never_lost(kept: Cluster) -> None:
    kinds = [number for name, number in log_format.KIND_NUMBERS.items() if not name.endswith(("sampled", "measured"))]
    before = kept.log.read(1, kept.state.sequence, kinds=kinds)
    await looking_after(kept).compact(KEEP)
    assert kept.log.read(1, before[-1].sequence, kinds=kinds) == before


async def test_compacting_twice_is_compacting_once(kept: Cluster) -> None:
    keeper = looking_after(kept)
    assert await keeper.compact(KEEP) > 0
    assert await keeper.compact(KEEP) == 0


async def test_a_log_begins_again_from_its_checkpoint_and_equals_the_live_state(
    log_path: Path, clock: FakeClock
) -> None:
    async with opened(log_path, clock) as cluster:
        await day(cluster, clock, minutes=10)
        keeper = looking_after(cluster)
        made_at = await keeper.checkpoint()
        assert made_at == cluster.state.sequence
        await cluster.append(memory_sampled("late"))
        await keeper.compact(KEEP)
        live = view.state_hash(cluster.state)
    async with opened(log_path, clock) as cluster:
        assert view.state_hash(cluster.state) == live
        whole = State()
        list(fold(cluster.log, whole, cluster.log.head()))
        assert view.state_hash(whole) == live


async def test_a_damaged_checkpoint_means_a_longer_replay_and_the_same_state(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await day(cluster, clock, minutes=2)
        await looking_after(cluster).checkpoint()
        live = view.state_hash(cluster.state)
    raw = sqlite3.connect(log_path)
    raw.execute("UPDATE checkpoints SET payload = zeroblob(length(payload))")
    raw.commit()
    raw.close()
    async with opened(log_path, clock) as cluster:
        assert view.state_hash(cluster.state) == live


async def test_a_compaction_that_was_interrupted_is_finished_and_sealed(kept: Cluster) -> None:
    keeper = looking_after(kept)
    range_ = Range(1, kept.log.commit_before(kept.state.sequence - 300))
    assert isinstance(kept.log, EventLog)
    kept.log.do(lambda connection: keepers._begin(connection, range_)).result()
    assert await keeper.compact(KEEP) > 0
    assert set(keepers.standing(kept.log)) <= keepers.seals(kept.log).keys()
    for standing in keepers.standing(kept.log):
        assert keepers.sealed(kept.log, standing) == keepers.seals(kept.log)[standing]


async def test_what_a_source_said_is_known_after_its_samples_have_gone(log_path: Path, clock: FakeClock) -> None:
    said = observations(*[memory_sampled("a", available=n) for n in range(200)])
    async with opened(log_path, clock) as cluster:
        await cluster.record("probe/a/1", said)
        clock.advance(10_000)
        await cluster.append(memory_sampled("b"), memory_sampled("b"))
        assert await looking_after(cluster).compact(KEEP) == 198
    async with opened(log_path, clock) as cluster:
        assert cluster.acknowledged("probe/a/1") == 200
        assert await cluster.record("probe/a/1", said) == 200


async def logged(capsys: pytest.CaptureFixture[str], words: str) -> None:
    """Return when somebody has logged so."""
    said = ""
    async with asyncio.timeout(60):
        while words not in (said := said + capsys.readouterr().out):  # noqa: ASYNC110 - what is printed tells nobody
            await asyncio.sleep(0.01)


async def test_what_cannot_be_written_does_not_end_the_keeper(
    log_path: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    async with opened(log_path, clock) as cluster:
        await day(cluster, clock, minutes=1)
        raw = sqlite3.connect(log_path)
        raw.execute("DROP TABLE compacted")  # As good as a full disk.
        raw.commit()
        raw.close()
        task = asyncio.create_task(looking_after(cluster).run())
        await logged(capsys, "the log was not looked after")
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_samples_do_not_go_by_a_clock_that_just_jumped(
    log_path: Path, clock: FakeClock, capsys: pytest.CaptureFixture[str]
) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(*[memory_sampled("a")] * 10)
        await cluster.append(memory_sampled("a"))
        keeper = looking_after(cluster)
        clock.set_wall(clock.now_ns() + 3600 * 10**9)
        await cluster.append(memory_sampled("a"))
        async with cluster.subscribe(["log_compacted"]) as compactions, asyncio.timeout(60):
            task = asyncio.create_task(keeper.run())
            await logged(capsys, "the clock jumped")
            await asyncio.sleep(0.2)
            assert cluster.log.mark() == 0
            clock.advance(keepers.COMPACT_SECONDS)  # It is still what it was set to: so it is the time.
            assert len(await anext(compactions)) == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_of_memory_the_last_two_before_each_decision_stay_and_of_the_rest_the_last() -> None:
    memory, system = ("memory", "a"), ("system", "a")
    samples = [(10, 0, memory), (9, 0, system), (8, 0, system), (7, 0, memory), (6, 0, memory), (5, 0, memory)]
    assert list(Thinning(10, [], 1).surplus(samples)) == [8, 6, 5]
    assert list(Thinning(10, [6], 1).surplus(samples)) == [8]


def test_one_sample_a_minute_stays_of_each_subject() -> None:
    minute = 60_000_000_000
    samples = [(n, n * minute // 4, ("memory", "a")) for n in range(16, 0, -1)]
    assert list(Thinning(16, [], 0).surplus(samples)) == [14, 13, 12, 10, 9, 8, 6, 5, 4, 2, 1]
