"""The probe's beat, with time in the tests' hands."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from services.probe.estimator import Override
from services.probe.fact_buffer import FactBuffer
from services.probe.failures import Failures
from services.probe.latest import Latest
from services.probe.loop import Loop
from services.probe.machine import Machine
from services.probe.own_memory import OwnMemory
from services.probe.reading import Reading
from services.probe.reporter import Reporter
from services.probe.system import SystemSampler
from ullage.v1 import node_pb2

GIB = 1 << 30


class BeatClock:
    """Sleeping takes no time, and ends the test's patience after so many beats."""

    def __init__(self, beats: int) -> None:
        self.now_s = 100.0
        self.sleeps: list[float] = []
        self._beats = beats

    def monotonic(self) -> float:
        return self.now_s

    def now_ns(self) -> int:
        return int(self.now_s * 1e9)

    async def sleep(self, seconds: float) -> None:
        self.sleeps.append(round(seconds, 6))
        self.now_s += seconds
        await asyncio.sleep(0)
        if len(self.sleeps) == self._beats:
            raise asyncio.CancelledError


class FixedSampler:
    """Reads the same every time, taking `cost_s` of the clock."""

    def __init__(self, clock: BeatClock, reading: Reading, cost_s: float = 0.0) -> None:
        self._clock = clock
        self._reading = reading
        self._cost_s = cost_s

    def read(self) -> Reading:
        self._clock.now_s += self._cost_s
        return self._reading


class Probe:
    """A loop and what hangs on it."""

    def __init__(
        self, beats: int, *, available: int = 12 * GIB, cost_s: float = 0.0, names: Sequence[str] = ()
    ) -> None:
        self.clock = BeatClock(beats)
        self.latest = Latest()
        self.buffer = FactBuffer()
        self.reporter = Reporter("127.0.0.1:1", node_pb2.NodeIdentity(node_id="n"), self.clock, buffer=self.buffer)
        reading = Reading(node_pb2.MEMORY_SOURCE_PROCFS, ram_total_bytes=16 * GIB, ram_available_bytes=available)
        self.loop = Loop(
            machine=Machine(FixedSampler(self.clock, reading, cost_s), OwnMemory(Path("/nowhere"))),
            system=SystemSampler(Path("/"), Path("/"), Failures()),
            override=Override(size_bytes=GIB),
            node_id="n",
            reporter=self.reporter,
            latest=self.latest,
            clock=self.clock,
            period_s=0.5,
            system_period_s=2.0,
            host_name=partial(next, iter(names)) if names else None,
        )

    async def beat(self) -> list[str | None]:
        """Run to the end of the clock's patience; the kinds of the facts that were reported."""
        with pytest.raises(asyncio.CancelledError):
            await self.loop.run()
        return [observation.fact.WhichOneof("fact") for observation in self.buffer.oldest(1000)]


async def test_memory_is_sampled_every_period_and_the_system_every_fourth() -> None:
    probe = Probe(beats=9)
    kinds = await probe.beat()
    assert probe.clock.sleeps == [0.5] * 9
    four = ["memory_sampled"] * 4
    assert kinds == [
        "node_announced",
        "memory_sampled",
        "system_sampled",
        *four,
        "system_sampled",
        *four,
        "system_sampled",
    ]


async def test_a_host_that_is_renamed_is_announced_anew() -> None:
    probe = Probe(beats=13, names=("anna", "anna", "", "berta"))
    await probe.beat()
    facts = [observation.fact for observation in probe.buffer.oldest(1000)]
    announced = [fact.node_announced.identity for fact in facts if fact.HasField("node_announced")]
    assert [identity.friendly_name for identity in announced] == ["", "anna", "berta"]
    assert {identity.node_id for identity in announced} == {"n"}
    assert probe.reporter.identity == announced[-1]


async def test_a_system_sample_holds_the_memory_sample_of_its_moment() -> None:
    probe = Probe(beats=1)
    await probe.beat()
    memory, system = (observation.fact for observation in probe.buffer.oldest(9)[1:])
    assert system.system_sampled.sample.memory == memory.memory_sampled.sample
    assert memory.memory_sampled.sample.taken_at.ToNanoseconds() == 100_000_000_000
    assert (probe.latest.memory, probe.latest.system) == (memory.memory_sampled.sample, system.system_sampled.sample)


async def test_the_time_a_reading_takes_does_not_shift_the_beat() -> None:
    probe = Probe(beats=3, cost_s=0.1)
    await probe.beat()
    assert probe.clock.sleeps == [0.4] * 3


async def test_missed_beats_are_not_made_up_for() -> None:
    probe = Probe(beats=3, cost_s=1.2)
    await probe.beat()
    assert probe.clock.sleeps == [0.0] * 3


async def test_the_masters_wish_sets_the_period_within_bounds() -> None:
    probe = Probe(beats=1)
    probe.reporter.memory_period_s = 1.5
    await probe.beat()
    assert probe.clock.sleeps == [1.5]
    greedy = Probe(beats=1)
    greedy.reporter.memory_period_s = 0.0
    await greedy.beat()
    assert greedy.clock.sleeps == [0.1]


async def test_an_override_does_not_hide_pressure() -> None:
    probe = Probe(beats=1, available=GIB // 4)
    await probe.beat()
    assert probe.latest.memory is not None
    assert probe.latest.memory.pressure_level == node_pb2.PRESSURE_LEVEL_CRITICAL
    assert probe.latest.memory.balanced_available_bytes == 0


async def test_a_watcher_gets_the_next_sample_and_an_end() -> None:
    latest = Latest()
    watching = asyncio.create_task(latest.next_memory())
    await asyncio.sleep(0)
    latest.publish(node_pb2.MemorySample(ram_total_bytes=1))
    assert await watching == node_pb2.MemorySample(ram_total_bytes=1)
    watching = asyncio.create_task(latest.next_memory())
    await asyncio.sleep(0)
    latest.close()
    assert await watching is None
    assert await latest.next_memory() is None
