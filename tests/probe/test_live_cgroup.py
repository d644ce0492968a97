"""A real probe in a real memory cgroup beside a process that fills it, caches a file, and presses until it stalls."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services import rpc
from services.probe.failures import Failures
from services.probe.linux.alarms import Alarms
from tests.memory_cgroup import MIB, Actor, MemoryCgroup, Unavailable, memory_cgroup, uncached_file
from ullage.v1 import node_pb2, probe_service_pb2, probe_service_pb2_grpc

LIMIT = 384 * MIB

NORMAL = node_pb2.PRESSURE_LEVEL_NORMAL
WARNING = node_pb2.PRESSURE_LEVEL_WARNING
CRITICAL = node_pb2.PRESSURE_LEVEL_CRITICAL

HICCUP = 16 * MIB
"""What interpreters and the kernel's own bookkeeping may take more or less of."""


class Watched:
    """What a probe says, and when."""

    def __init__(self, call: probe_service_pb2_grpc.ProbeServiceAsyncStub) -> None:
        self._call = call.WatchSamples(probe_service_pb2.WatchSamplesRequest())
        self._evident_ns = 0

    async def until(self, wanted: Callable[[node_pb2.MemorySample], bool], seconds: float) -> node_pb2.MemorySample:
        """The first sample that was not read yet and is as wanted."""
        last: node_pb2.MemorySample | None = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    said = await self._call.read()
                    assert isinstance(said, probe_service_pb2.WatchSamplesResponse)
                    last = said.memory
                    if any(reason.level == CRITICAL and reason.signal != "hold" for reason in last.pressure_reasons):
                        self._evident_ns = last.taken_at.ToNanoseconds()
                    if wanted(last):
                        return last
        except TimeoutError:
            pytest.fail(f"not within {seconds} s; the last sample: {last}")

    async def from_now(self, available_bytes: int) -> node_pb2.MemorySample:
        """The first sample taken from now on that has so much available, but for a hiccup: the kernel counts late."""
        now_ns = time.time_ns()
        return await self.until(
            lambda sample: (
                sample.taken_at.ToNanoseconds() > now_ns and abs(sample.ram_available_bytes - available_bytes) < HICCUP
            ),
            60,
        )

    def critical_before_s(self, sample: node_pb2.MemorySample) -> float:
        """How long before `sample` the last one was taken that was CRITICAL by itself, and not by being held."""
        return (sample.taken_at.ToNanoseconds() - self._evident_ns) / 1e9


@asynccontextmanager
async def probe(group: MemoryCgroup, folder: Path) -> AsyncIterator[Watched]:
    ready = folder / "ready"
    options = ("--listen", "127.0.0.1:0", "--master", "127.0.0.1:1", "--state-dir", str(folder))
    process = await asyncio.create_subprocess_exec(
        *group.command([sys.executable, "-m", "services.probe", *options, "--ready-file", str(ready)]),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(60):
            while not ready.exists():  # noqa: ASYNC110 - another process makes the file
                await asyncio.sleep(0.02)
        async with rpc.channel(ready.read_text().strip()) as channel:
            stub: probe_service_pb2_grpc.ProbeServiceAsyncStub = probe_service_pb2_grpc.ProbeServiceStub(channel)
            yield Watched(stub)
    finally:
        process.terminate()
        await process.wait()


def signals(sample: node_pb2.MemorySample) -> set[str]:
    return {reason.signal for reason in sample.pressure_reasons}


async def test_a_probe_in_a_cgroup_tells_the_room_the_cache_and_the_stalls(tmp_path: Path) -> None:
    try:
        with memory_cgroup(LIMIT) as group:
            async with probe(group, tmp_path) as watched:
                await _is_filled_and_pressed(watched, group, tmp_path)
                await _leaves_critical(watched)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.holds
async def test_a_level_comes_back_through_both_of_its_holds(tmp_path: Path) -> None:
    try:
        with memory_cgroup(LIMIT) as group:
            async with probe(group, tmp_path) as watched:
                await _is_filled_and_pressed(watched, group, tmp_path)
                await _leaves_critical(watched)
                calm = await watched.until(lambda sample: sample.pressure_level == NORMAL, 120)
                assert watched.critical_before_s(calm) >= 40
    except Unavailable as error:
        pytest.skip(str(error))


async def _is_filled_and_pressed(watched: Watched, group: MemoryCgroup, folder: Path) -> None:
    large, small = uncached_file(folder / "large", LIMIT), uncached_file(folder / "small", 64 * MIB)
    actor = Actor(group)
    try:
        await _fills_up(watched, actor, group, small)
        await _is_pressed(watched, actor, large)
    finally:
        actor.end()


async def _fills_up(watched: Watched, actor: Actor, group: MemoryCgroup, file: Path) -> None:
    # The machine's own stalls count too, and it may have had some just now.
    before = await watched.until(lambda sample: sample.pressure_level == NORMAL, 120)
    assert (before.ram_total_bytes, before.cgroup_limit_bytes) == (LIMIT, LIMIT)
    assert node_pb2.MEMORY_FLAG_CGROUP_LIMITED in before.flags

    actor.hold(96 * MIB)
    holding = await watched.from_now(before.ram_available_bytes - 96 * MIB)
    assert holding.ram_available_bytes == LIMIT - holding.cgroup_used_bytes

    used_bytes = group.usage_bytes
    actor.cache(file)
    assert group.usage_bytes - used_bytes > 48 * MIB
    cached = await watched.from_now(holding.ram_available_bytes)
    assert not signals(cached) & {"available", "oom_kill", "cgroup_limit", "reclaim"}

    actor.hold(104 * MIB)
    await watched.from_now(cached.ram_available_bytes - 104 * MIB)


async def _is_pressed(watched: Watched, actor: Actor, file: Path) -> None:
    actor.press(file)
    pressed = await watched.until(lambda sample: sample.pressure_level == CRITICAL and sample.stall_full_pct >= 20, 120)
    assert "psi_full" in signals(pressed)
    assert pressed.pressure_pct >= 80
    assert (pressed.strict_available_bytes, pressed.ceiling_available_bytes) == (0, 0)


async def _leaves_critical(watched: Watched) -> None:
    warned = await watched.until(lambda sample: sample.pressure_level == WARNING, 120)
    assert watched.critical_before_s(warned) >= 10
    assert "hold" in signals(warned)


def test_what_a_test_makes_it_takes_away() -> None:
    try:
        with memory_cgroup(64 * MIB) as group:
            actor = Actor(group)
            actor.hold(8 * MIB)
            assert 8 * MIB < group.usage_bytes <= 64 * MIB
            actor.end()
    except Unavailable as error:
        pytest.skip(str(error))
    own = f"ullage-test-{os.getpid()}"
    assert not [
        path for path in (Path("/sys/fs/cgroup", own), *Path("/sys/fs/cgroup").glob(f"*/{own}")) if path.exists()
    ]


async def test_the_kernels_trigger_rings_when_a_cgroup_stalls(tmp_path: Path) -> None:
    file = uncached_file(tmp_path / "large", LIMIT)
    failures = Failures()
    rang = asyncio.Event()
    try:
        with memory_cgroup(LIMIT) as group:
            alarms = Alarms([tmp_path / "missing", group.pressure_file], [], failures)
            alarms.watch(rang.set)
            actor = Actor(group)
            try:
                actor.hold(200 * MIB)
                assert not alarms.stalled()
                actor.press(file)
                async with asyncio.timeout(120):
                    await rang.wait()
            finally:
                actor.end()
                alarms.close()
    except Unavailable as error:
        pytest.skip(str(error))
    assert (alarms.stalled(), alarms.stalled()) == (True, False)
    assert not failures.counts


async def test_what_cannot_be_watched_is_counted_and_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "memory.pressure").write_text("a file that takes no trigger and cannot be polled")
    failures = Failures()
    alarms = Alarms([tmp_path / "memory.pressure"], [tmp_path / "memory.pressure", tmp_path / "missing"], failures)
    alarms.watch(lambda: None)
    assert failures.counts == {f"alarm {tmp_path / 'memory.pressure'}": 2}
    assert not alarms.stalled()
    alarms.close()
