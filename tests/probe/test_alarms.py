"""What a v1 cgroup announces, of a real one that is pressed and runs out of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.probe.failures import Failures
from services.probe.linux.alarms import REST_SECONDS, Alarms
from tests.memory_cgroup import MIB, Actor, MemoryCgroup, Unavailable, memory_cgroup, uncached_file

LIMIT = 64 * MIB


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    try:
        with memory_cgroup(LIMIT) as made:
            if not (made.limiting / "memory.pressure_level").exists():
                pytest.skip("this kernel limits by cgroup v2, which announces nothing by eventfd")
            yield made
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def actor(group: MemoryCgroup) -> Iterator[Actor]:
    started = Actor(group)
    yield started
    started.end()


class Rings:
    """When it rang, in seconds of the event loop."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def ring(self) -> None:
        self.at_s.append(asyncio.get_running_loop().time())

    async def until(self, times: int) -> None:
        """Return when it has rung so often."""
        async with asyncio.timeout(60):
            while len(self.at_s) < times:  # noqa: ASYNC110 - what rings is counted, and may be late
                await asyncio.sleep(0.01)


async def test_a_v1_cgroup_announces_that_little_can_be_taken_back_and_rests_between(
    group: MemoryCgroup, actor: Actor, tmp_path: Path
) -> None:
    failures, rings = Failures(), Rings()
    alarms = Alarms([], [], failures, group.limiting)
    alarms.watch(rings.ring)
    actor.hold(LIMIT // 2)
    assert not alarms.hard_to_reclaim()
    actor.press(uncached_file(tmp_path / "large", LIMIT))
    await rings.until(3)
    alarms.close()
    assert (alarms.hard_to_reclaim(), alarms.hard_to_reclaim()) == (True, False)
    assert all(after - before >= REST_SECONDS for before, after in zip(rings.at_s, rings.at_s[1:], strict=False))
    assert not failures.counts


async def test_a_v1_cgroup_announces_that_it_runs_out(group: MemoryCgroup, actor: Actor) -> None:
    failures, rings = Failures(), Rings()
    alarms = Alarms([], [], failures, group.limiting)
    alarms.watch(rings.ring)
    with pytest.raises(AssertionError):  # It is killed, and so says nothing.
        actor.hold(2 * LIMIT)
    await rings.until(1)
    alarms.close()
    assert "\noom_kill 1\n" in (group.limiting / "memory.oom_control").read_text()
    assert not failures.counts


async def test_a_v1_cgroup_that_may_not_be_asked_is_counted_and_no_hindrance(tmp_path: Path) -> None:
    for name in ("memory.pressure_level", "memory.oom_control"):
        (tmp_path / name).touch()
    (tmp_path / "cgroup.event_control").mkdir()
    failures = Failures()
    alarms = Alarms([], [], failures, tmp_path)
    alarms.watch(lambda: None)
    assert failures.counts == {f"alarm {tmp_path}": 2}
    assert not alarms.hard_to_reclaim()
    alarms.close()
