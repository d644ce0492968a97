"""A day of ten nodes at 2 Hz through the real log, in simulated time: memory flat, the log bounded, all of it told.

The suite has twenty minutes of it; the whole day: `pytest -m soak tests/master/test_log_day.py`.
"""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path
from typing import Final

import psutil
import pytest

from services.master.allocator import place
from services.master.cluster import Cluster, opened
from services.master.event_log import EventLog
from services.master.keeper import Keeper
from services.master.replay import state_at
from services.master.retention import Policy
from services.master.view import state_hash
from tests.clocks import FakeClock
from tests.master import given_nodes
from tests.master.facts import GIB, MIB, instance_released, memory_sampled
from ullage.v1 import event_pb2, model_pb2

NODES: Final = 10
HERTZ: Final = 2
SECONDS_IN_COMMIT: Final = 50
"""Samples of so many seconds are appended at once: a day's commits would only measure the disk."""

RESOLUTION_SECONDS: Final = 2 * 60
"""Of a minute one sample is kept, the earliest or the latest, and the one before it may be as far away."""

BEGUN_NS: Final = FakeClock().now_ns()

LOG_BYTES_MAX: Final = 200 * 10**6


async def live(
    path: Path, hours: float, policy: Policy, *, decide_seconds: int, compact_seconds: int
) -> tuple[str, list[int], list[int]]:
    """The cluster's life: the hash at its end, the states decided on, and the resident bytes after each compaction."""
    clock, resident = FakeClock(), []
    async with opened(path, clock) as cluster:
        assert isinstance(cluster.log, EventLog)
        keeper = Keeper(cluster, cluster.log, policy)
        await begin(cluster)
        for second in range(0, round(hours * 3600), SECONDS_IN_COMMIT):
            await cluster.append(*samples(second))
            clock.advance(SECONDS_IN_COMMIT)
            if second % decide_seconds == 0:
                await decide(cluster, f"i{second}")
            if second % 100 == 0:
                await keeper.checkpoint_if_due()
            if second % compact_seconds == 0:
                await keeper.compact(policy)
                gc.collect()
                resident.append(psutil.Process().memory_info().rss)
        await keeper.checkpoint()
        await cluster.append(*samples(0))
        decided = [record.placement.decided_at_sequence for record in cluster.state.instances.values()]
        return state_hash(cluster.state), decided, resident


async def begin(cluster: Cluster) -> None:
    for number in range(NODES):
        await cluster.append(*given_nodes.facts_of(given_nodes.Node(f"n{number}", 8 * GIB, ram=16 * GIB)))
    shape = given_nodes.model([100 * MIB] * 8)
    await cluster.append(event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=shape)))


def samples(second: int) -> list[event_pb2.Fact]:
    return [
        sample(number, second + tick / HERTZ) for tick in range(SECONDS_IN_COMMIT * HERTZ) for number in range(NODES)
    ]


def sample(number: int, second: float) -> event_pb2.Fact:
    fact = memory_sampled(f"n{number}", available=4 * GIB + round(HERTZ * second + number) % 1000 * MIB)
    fact.memory_sampled.sample.taken_at.FromNanoseconds(BEGUN_NS + round(second * 1e9))
    return fact


async def decide(cluster: Cluster, instance_id: str) -> None:
    spec = given_nodes.spec(min_nodes=2)
    outcome = place(cluster.state, spec, [])
    assert isinstance(outcome, model_pb2.Placement)
    await cluster.append(given_nodes.placed(instance_id, outcome, spec), instance_released(instance_id))


async def look(path: Path, digest: str, decided: list[int], moments: range) -> float:
    """Begin again, explain every decision, and see the nodes at these seconds; returns those until it had begun."""
    started = time.perf_counter()
    async with opened(path, FakeClock()) as cluster:
        seconds = time.perf_counter() - started
        assert state_hash(cluster.state) == digest
        for at, record in zip(decided, cluster.state.instances.values(), strict=True):
            before = state_at(cluster.log, at)
            assert place(before, record.spec, record.silent_node_ids) == record.placement
            assert len(before.nodes) == NODES
        for moment in moments:
            see(cluster, BEGUN_NS + moment * 10**9)
    return seconds


def see(cluster: Cluster, moment_ns: int) -> None:
    """At that time every node's memory was what it then had been, at the resolution that is kept."""
    then = state_at(cluster.log, cluster.log.last_until(moment_ns))
    assert len(then.nodes) == NODES
    for node in then.nodes.values():
        assert node.memory is not None
        assert abs(moment_ns - node.memory.taken_at.ToNanoseconds()) <= RESOLUTION_SECONDS * 10**9


def test_twenty_minutes_are_kept_short_and_every_decision_in_them_explained(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    life = live(path, 1 / 3, Policy(200, 600), decide_seconds=200, compact_seconds=300)
    digest, decided, _ = asyncio.run(life)
    assert len(decided) == 6
    asyncio.run(look(path, digest, decided, range(660, 1200, 60)))
    assert path.stat().st_size < 8 * 10**6


@pytest.mark.soak
def test_a_day_is_kept_short_and_every_decision_in_it_explained(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    policy = Policy()
    digest, decided, resident = asyncio.run(live(path, 24, policy, decide_seconds=600, compact_seconds=3600))
    steady = resident[3:]  # Once the first samples are old enough to be thinned.
    print(f"resident {min(steady) >> 20} to {max(steady) >> 20} MiB, log {path.stat().st_size / 1e6:.0f} MB")
    assert max(steady) <= 1.1 * min(steady)
    assert path.stat().st_size <= LOG_BYTES_MAX
    moments = range(0, 24 * 3600, 293)
    seconds = asyncio.run(look(path, digest, decided, moments))
    print(f"began again in {seconds:.3f} s, {len(decided)} decisions explained, {len(moments)} moments told")
    assert seconds < 5  # The figure is the benchmark's; this is for a machine that is busy.
