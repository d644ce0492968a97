"""What is wrong with a log is found and named, whichever byte it is; or nothing that was stored has changed."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any, Final

from services.clock import SystemClock
from services.master.cluster import opened
from services.master.event_log import EventLog
from services.master.keeper import Keeper
from services.master.log_check import check_file
from services.master.log_file import LogFileError
from services.master.retention import Policy
from tests.clocks import FakeClock
from tests.master.facts import memory_sampled, node_announced, observations
from tests.master.test_event_log import write

STRIDE: Final = 97
TABLES: Final = ("sources", "events", "chain", "checkpoints", "compacted")


async def small_log(path: Path) -> None:
    """A log with a checkpoint, a compacted range, and events behind both."""
    clock = FakeClock()
    async with opened(path, clock) as cluster:
        assert isinstance(cluster.log, EventLog)
        keeper = Keeper(cluster, cluster.log, Policy())
        await cluster.append(*[node_announced(node_id) for node_id in "ab"])
        for number in range(1, 5):
            said = observations(*[memory_sampled(node_id, available=number) for node_id in "abab"], first=number * 4)
            await cluster.record("probe/a/1", said)
            clock.advance(20)
        clock.advance(20_000)
        await cluster.record("probe/b/1", observations(memory_sampled("b")))
        await keeper.compact(Policy())
        await cluster.append(memory_sampled("a"))


def dump(path: Path) -> list[Any]:
    raw = sqlite3.connect(path.resolve().as_uri() + "?mode=ro&immutable=1", uri=True)
    try:
        return [raw.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall() for table in TABLES]  # noqa: S608 - our own
    finally:
        raw.close()


def test_every_97th_byte_flipped_is_found_or_changes_nothing(log_path: Path, tmp_path: Path) -> None:
    asyncio.run(small_log(log_path))
    whole, content = dump(log_path), log_path.read_bytes()
    assert check_file(log_path).findings == []
    flipped = tmp_path / "flipped.db"
    found = 0
    for at in range(0, len(content), STRIDE):
        flipped.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
        try:
            findings = check_file(flipped).findings
        except LogFileError:
            findings = ["it is no log"]
        if findings:
            found += 1
        else:
            assert dump(flipped) == whole, f"byte {at} was changed, and nobody noticed"
    assert found > 10


def test_a_whole_log_has_no_findings_and_its_size_is_told(log_path: Path) -> None:
    write(log_path, [memory_sampled("a"), memory_sampled("b")], [node_announced("a")])
    report = check_file(log_path)
    assert (report.findings, report.head_sequence, report.events, report.commits) == ([], 3, 3, 2)


def test_a_sample_that_goes_behind_the_back_of_the_master_is_missed(log_path: Path) -> None:
    write(log_path, *[[memory_sampled(node_id)] for node_id in "abc"])
    raw = sqlite3.connect(log_path)
    raw.execute("DROP TRIGGER events_never_deleted")
    raw.execute("DELETE FROM events WHERE seq = 2")
    raw.commit()
    raw.close()
    findings = check_file(log_path).findings
    assert "schema: events_never_deleted is not as the migrations make it" in findings
    assert "event 2 is missing" in findings
    assert "commit up to 2: it does not match its hash" in findings


async def test_a_sample_that_goes_from_a_compacted_range_breaks_its_seal(log_path: Path) -> None:
    await small_log(log_path)
    assert check_file(log_path).ranges == 1
    raw = sqlite3.connect(log_path)
    raw.execute("DELETE FROM events WHERE seq = (SELECT min(seq) FROM events WHERE kind = 12)")
    raw.commit()
    raw.close()
    [finding] = check_file(log_path).findings
    assert finding.endswith("what is left does not match its seal")


async def test_a_log_is_checked_while_it_is_written(log_path: Path) -> None:
    async with opened(log_path, SystemClock()) as cluster:
        await cluster.append(memory_sampled("a"))
        assert check_file(log_path).findings == []
