"""A master's log is killed with kill -9 at random points: what was acknowledged is there once, and folds the same.

The long form kills a hundred processes: `pytest -m crashes tests/master/test_crash.py`.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest

from services.master.event_log import ReadOnlyLog
from services.master.log_check import check_file
from services.master.replay import state_at
from services.master.view import state_hash

WRITER: Final = """
import asyncio, sys
from pathlib import Path
from services.clock import SystemClock
from services.master.cluster import opened
from services.master.keeper import Keeper
from services.master.retention import Policy
from services.master.view import state_hash
from tests.master.facts import memory_sampled, observations

async def main():
    async with opened(Path(sys.argv[1]), SystemClock()) as cluster:
        keeper = Keeper(cluster, cluster.log, Policy())
        said = cluster.acknowledged("probe/a/1")
        asyncio.create_task(forever(keeper))
        while True:
            facts = [memory_sampled("abc"[n % 3], available=n) for n in range(said + 1, said + 8)]
            # Two of them again: a probe sends what was not acknowledged.
            sent = observations(*facts, first=said + 1)
            said = await cluster.record("probe/a/1", sent)
            print(said, cluster.state.sequence, state_hash(cluster.state), flush=True)
            await asyncio.sleep(0)

async def forever(keeper):
    while True:
        await keeper.checkpoint()
        await keeper.compact(Policy(0.05, 0.1))
        await asyncio.sleep(0.02)

asyncio.run(main())
"""


def kill_at_random(path: Path, rounds: int, seed: int) -> None:
    """Let a process write until it is killed, look at what it left, and let the next one go on from there."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    for _ in range(rounds):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            first = writer.stdout.readline()
            time.sleep(chance.uniform(0, 0.3))
            writer.kill()
            told = [first, *writer.stdout.read().splitlines()]
        whole = [line.split() for line in told if len(line.split()) == 3 and len(line.split()[2]) == 64]
        _look(path, *whole[-1])


def _look(path: Path, said: str, sequence: str, digest: str) -> None:
    """Everything up to what was acknowledged last is there, once, and makes the state that was acted on."""
    assert check_file(path).findings == []
    log = ReadOnlyLog(path)
    try:
        assert log.head() >= int(sequence)
        assert state_hash(state_at(log, int(sequence))) == digest
        rows = [row for row in log.read(1, log.head()) if row.source == "probe/a/1"]
        numbers = [row.source_sequence for row in rows]
        assert numbers == sorted(set(numbers))
        assert log.sources()["probe/a/1"] >= int(said)
        assert log.sources()["probe/a/1"] == numbers[-1]
    finally:
        log.close()


def test_nothing_acknowledged_is_lost_to_kill_minus_nine(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "events.db", rounds=3, seed=1)


@pytest.mark.crashes
def test_nothing_acknowledged_is_lost_to_a_hundred_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "events.db", rounds=100, seed=2)
