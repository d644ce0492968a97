"""A master's log is killed with kill -9 at random points: what was acknowledged is there once, and folds the same.

The long form kills a hundred processes: `pytest -m crashes tests/master/test_crash.py`.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from services.master.event_log import ReadOnlyLog
from services.master.log_check import check_file
from services.master.replay import state_at
from services.master.retention import SAMPLE_KINDS
from services.master.view import state_hash
from tests.master import facts
from ullage.v1 import event_pb2, model_pb2

WRITER: Final = """
import asyncio, json, random, sys
from itertools import count
from pathlib import Path
from zlib import crc32
from services import log_format
from services.clock import SystemClock
from services.master.batch import batch
from services.master.cluster import opened
from services.master.keeper import Keeper
from services.master.retention import Policy
from services.master.view import state_hash
from tests.master.test_crash import any_fact
from tests.master.facts import memory_sampled, observations

chance = random.Random(int(sys.argv[2]))

async def main():
    async with opened(Path(sys.argv[1]), SystemClock()) as cluster:
        keeper = Keeper(cluster, cluster.log, Policy())
        said = cluster.acknowledged("probe/a/1")
        asyncio.create_task(forever(keeper))
        while True:
            facts = [any_fact(chance, cluster.state.sequence + n) for n in range(chance.randint(1, 5))]
            last = await cluster.append(*facts)
            tell(cluster, said, last, facts)
            facts = [memory_sampled("abc"[n % 3], available=n) for n in range(said + 1, said + 8)]
            # Some of them again: a probe sends what was not acknowledged.
            sent = observations(*facts, first=said + 1)
            await cluster.record("probe/a/1", sent[:4])
            stored = await cluster.submit("probe/a/1", batch((each.source_sequence, each.fact) for each in sent))
            said = stored.acknowledged
            tell(cluster, said, stored.last_sequence, facts[4:])
            await asyncio.sleep(0)

def tell(cluster, said, last, facts):
    # They were stored together, so their sequences follow each other.
    stored = [(log_format.kind(fact), crc32(fact.SerializeToString())) for fact in facts]
    digest = state_hash(cluster.state)
    told = {"said": said, "sequence": cluster.state.sequence, "last": last, "stored": stored, "digest": digest}
    print(json.dumps(told), flush=True)

async def forever(keeper):
    while True:
        await keeper.checkpoint()
        await keeper.compact(Policy(0.05, 0.1))
        await asyncio.sleep(0.02)

asyncio.run(main())
"""


def any_fact(chance: random.Random, number: int) -> event_pb2.Fact:
    """A fact of any kind, about one of three nodes, or an instance of not long ago."""
    node_id, instance_id = chance.choice("abc"), f"i{max(0, number - chance.randrange(20))}"
    phase = chance.choice(list(model_pb2.ShardPhase.values()))
    return chance.choice(
        [
            facts.node_announced(node_id, str(chance.randrange(3))),
            facts.runner_announced(node_id, str(chance.randrange(3))),
            facts.link_measured(node_id, chance.choice("abc")),
            facts.model_registered(digest=str(chance.randrange(3))),
            facts.instance_placed(f"i{number}", chance.sample("abc", 2), chance.randrange(facts.GIB)),
            facts.shard_status(phase, instance_id, 0, node_id, chance.randrange(facts.GIB)),
            facts.instance_released(instance_id),
            facts.node_removed("d"),
            facts.unknown_kind(),
            facts.system_sampled(node_id, cpu_pct=float(chance.randrange(100))),
        ]
    )


def kill_at_random(path: Path, rounds: int, seed: int) -> None:
    """Let a process write until it is killed, look at what it left, and let the next one go on from there."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    for each in range(rounds):
        command = [sys.executable, "-c", WRITER, str(path), str(1000 * seed + each)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            told = [next(line for line in writer.stdout if line.startswith("{"))]
            time.sleep(chance.uniform(0, 0.3))
            writer.kill()
            told += writer.stdout
        # Log lines between them, and a last one that was cut short.
        _look(path, [json.loads(line) for line in told if line.startswith("{") and line.endswith("\n")])


def _look(path: Path, told: list[dict[str, Any]]) -> None:
    """Everything that was acknowledged is there, once, and makes the states that were acted on."""
    assert check_file(path).findings == []
    log = ReadOnlyLog(path)
    try:
        rows = {row.sequence: row for row in log.read(1, log.head())}
        for commit in told:
            first = commit["last"] - len(commit["stored"]) + 1
            for sequence, (kind, crc) in enumerate(commit["stored"], first):
                if sequence in rows:
                    assert (rows[sequence].kind, rows[sequence].crc) == (kind, crc)
                else:
                    assert kind in SAMPLE_KINDS
                    assert sequence <= log.mark()
        for commit in (told[0], told[-1]):
            if commit["sequence"] >= log.mark():
                assert state_hash(state_at(log, commit["sequence"])) == commit["digest"]
        numbers = [row.source_sequence for row in rows.values() if row.source == "probe/a/1"]
        assert numbers == sorted(set(numbers))
        assert log.sources().get("probe/a/1", 0) >= told[-1]["said"]
    finally:
        log.close()


def test_nothing_acknowledged_is_lost_to_kill_minus_nine(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "events.db", rounds=2, seed=1)


@pytest.mark.crashes
def test_nothing_acknowledged_is_lost_to_a_hundred_kills(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "events.db", rounds=100, seed=2)
