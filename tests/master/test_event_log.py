"""The log's contract: what is acknowledged is there, once, in order, unchanged."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine

from services import log_format
from services.clock import SystemClock
from services.log_format import CorruptEventError
from services.master import errors, log_file, tables
from services.master.batch import batch
from services.master.cluster import Cluster, attached, opened
from services.master.event_log import (
    FACT_BYTES_MAX,
    QUEUE_BYTES_MAX,
    Append,
    Commit,
    EventLog,
    ReadOnlyLog,
)
from services.master.log_file import LogFileError
from services.master.log_head import head_path
from services.master.log_lock import LogLockedError
from services.master.log_reader import Scan
from services.master.replay import fold
from services.master.state import State
from tests.clocks import FakeClock
from tests.master.facts import memory_sampled, node_announced, observations, unknown_kind
from ullage.v1 import event_pb2


def write(path: Path, *commits: list[event_pb2.Fact]) -> None:
    """Make a log at `path` of these commits."""

    async def append() -> None:
        async with opened(path, FakeClock()) as cluster:
            for facts in commits:
                await cluster.append(*facts)

    asyncio.run(append())


async def test_facts_are_read_back_in_order_without_gaps(log_path: Path, clock: FakeClock) -> None:
    facts = [memory_sampled("a", available=n) for n in range(300)]
    async with opened(log_path, clock) as cluster:
        assert await cluster.append(*facts) == 300
        rows = cluster.log.read(1, 300)
    assert [row.sequence for row in rows] == list(range(1, 301))
    assert [log_format.event(row).fact for row in rows] == facts
    assert {row.source for row in rows} == {"master"}
    assert {row.recorded_at_ns for row in rows} == {clock.now_ns()}


async def test_what_a_source_said_before_is_stored_once(log_path: Path, clock: FakeClock) -> None:
    said = observations(*[memory_sampled("a", available=n) for n in range(10)])
    async with opened(log_path, clock) as cluster:
        assert await cluster.record("probe/a/1", said[:6]) == 6
        assert await cluster.record("probe/a/1", said[3:]) == 10
        assert await cluster.record("probe/a/1", said) == 10
        assert await cluster.record("probe/a/2", said[:1]) == 1
    async with opened(log_path, clock) as cluster:
        assert cluster.acknowledged("probe/a/1") == 10
        assert await cluster.record("probe/a/1", said) == 10
        rows = cluster.log.read(1, 100)
    assert [(row.source, row.source_sequence) for row in rows] == [
        *(("probe/a/1", n) for n in range(1, 11)),
        ("probe/a/2", 1),
    ]


async def test_a_pipelined_batch_is_refused_when_the_one_before_it_is_not_stored(
    log_path: Path, clock: FakeClock
) -> None:
    async with opened(log_path, clock) as cluster:
        second = cluster.submit("probe/a/1", batch([(65, memory_sampled())]), after=64)
        with pytest.raises(errors.Unavailable, match="connect again"):
            await second
        assert cluster.state.sequence == 0
        assert cluster.acknowledged("probe/a/1") == 0


def test_a_second_master_is_told_which_process_has_the_log(log_path: Path, clock: FakeClock) -> None:
    script = (
        "import sys; from pathlib import Path; from services.master.log_lock import LogLock;"
        "lock = LogLock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    log_path.parent.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", script, str(log_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        holder.stdout.readline()
        with pytest.raises(LogLockedError, match=rf"another master \(pid {holder.pid}\) writes"):
            EventLog(log_path, clock, lambda commit: None)
        holder.stdin.close()
    EventLog(log_path, clock, lambda commit: None).close()


@pytest.mark.parametrize(
    ("statement", "refusal"),
    [
        ("PRAGMA user_version = 99", "written by a newer release .format 99"),
        ("UPDATE alembic_version SET version_num = '2099_01_01_later'", "written by a newer release .schema 2099"),
        ("PRAGMA application_id = 7", "a SQLite file of another program"),
    ],
)
def test_a_log_this_release_cannot_write_is_left_as_it_was(
    statement: str, refusal: str, log_path: Path, clock: FakeClock
) -> None:
    write(log_path, [node_announced("a")])
    raw = sqlite3.connect(log_path)
    raw.execute(statement)
    raw.commit()
    raw.close()
    before = log_path.read_bytes()
    with pytest.raises(LogFileError, match=refusal):
        EventLog(log_path, clock, lambda commit: None)
    assert log_path.read_bytes() == before


def test_a_sqlite_file_of_another_program_is_left_as_it_was(log_path: Path, clock: FakeClock) -> None:
    log_path.parent.mkdir()
    raw = sqlite3.connect(log_path)
    raw.execute("CREATE TABLE theirs (x)")
    raw.close()
    before = log_path.read_bytes()
    with pytest.raises(LogFileError, match="of another program"):
        EventLog(log_path, clock, lambda commit: None)
    assert log_path.read_bytes() == before


def test_a_file_that_is_no_database_is_left_as_it_was(log_path: Path, clock: FakeClock) -> None:
    log_path.parent.mkdir()
    log_path.write_text("notes to self\n" * 100)
    with pytest.raises(LogFileError, match="is not a log"):
        EventLog(log_path, clock, lambda commit: None)
    assert log_path.read_text() == "notes to self\n" * 100


def test_a_flipped_bit_is_found_and_named(log_path: Path) -> None:
    write(log_path, [node_announced(f"node-{n}", friendly_name="unflipped") for n in range(5)], [memory_sampled()])
    content = log_path.read_bytes()
    at = [index for index in range(len(content)) if content.startswith(b"unflipped", index)][2]
    log_path.write_bytes(content[:at] + b"U" + content[at + 1 :])
    log = ReadOnlyLog(log_path)
    with pytest.raises(CorruptEventError, match="event 3 is corrupt: its bytes do not match its checksum"):
        list(fold(log, State(), log.head()))
    log.close()


def test_a_lost_end_of_the_log_is_found(log_path: Path, clock: FakeClock) -> None:
    write(log_path, [memory_sampled("a")], [memory_sampled("b"), memory_sampled("c")])
    raw = sqlite3.connect(log_path)
    raw.execute("DROP TRIGGER events_never_deleted")
    raw.execute("DELETE FROM events WHERE seq = 3")
    raw.commit()
    raw.close()
    with pytest.raises(LogFileError, match="ends at sequence 2, but 3 was acknowledged: its -wal is missing"):
        EventLog(log_path, clock, lambda commit: None)
    head_path(log_path).unlink()
    with pytest.raises(CorruptEventError, match="event 2 is corrupt: the last commit does not match its hash"):
        EventLog(log_path, clock, lambda commit: None)


@pytest.mark.parametrize("damage", ["missing", "flipped"])
async def test_a_log_without_its_wal_or_with_a_damaged_one_is_refused(
    damage: str, log_path: Path, clock: FakeClock, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    async with opened(log_path, clock) as cluster:
        for number in range(50):
            await cluster.append(memory_sampled(f"n{number}"))
        for path in log_path.parent.iterdir():
            shutil.copyfile(path, folder / path.name)
    wal = folder / "events.db-wal"
    content = bytearray(wal.read_bytes())
    content[len(content) // 2] ^= 1
    wal.unlink() if damage == "missing" else wal.write_bytes(content)
    with pytest.raises(LogFileError, match=r"ends at sequence \d+, but 50 was acknowledged"):
        EventLog(folder / "events.db", clock, lambda commit: None)


def test_another_log_in_place_of_the_one_that_was_acknowledged_is_refused(log_path: Path, clock: FakeClock) -> None:
    other = log_path.parent / "other.db"
    write(log_path, [memory_sampled("a")])
    write(other, [memory_sampled("b")], [memory_sampled("c")])
    other.replace(log_path)
    with pytest.raises(LogFileError, match="is not the log that was acknowledged up to sequence 1"):
        EventLog(log_path, clock, lambda commit: None)


def test_a_missing_event_is_found_and_named(log_path: Path) -> None:
    write(log_path, *[[memory_sampled(node_id)] for node_id in "abcd"])
    raw = sqlite3.connect(log_path)
    raw.execute("DROP TRIGGER events_never_deleted")
    raw.execute("DELETE FROM events WHERE seq = 2")
    raw.commit()
    raw.close()
    log = ReadOnlyLog(log_path)
    with pytest.raises(CorruptEventError, match="event 2 is corrupt: it is missing"):
        list(fold(log, State(), 4))
    log.close()


@pytest.mark.parametrize(
    "statement",
    ["UPDATE events SET kind = 0", "DELETE FROM events", "UPDATE chain SET hash = x'00'", "DELETE FROM chain"],
)
async def test_what_happened_cannot_be_changed(statement: str, log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(memory_sampled())
    raw = sqlite3.connect(log_path)
    with pytest.raises(sqlite3.IntegrityError, match="the log is append-only"):
        raw.execute(statement)
    raw.close()


def test_the_migrations_make_the_tables(log_path: Path) -> None:
    log_file.prepare(log_path)
    engine = create_engine(f"sqlite:///{log_path}")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.metadata) == []
        assert MigrationContext.configure(connection).get_current_revision() == tables.REVISION
        migrated = _table_sql(connection.exec_driver_sql("SELECT name, sql FROM sqlite_master"))
    engine.dispose()
    direct = create_engine("sqlite://")
    with direct.connect() as connection:
        tables.metadata.create_all(connection)
        made = _table_sql(connection.exec_driver_sql("SELECT name, sql FROM sqlite_master"))
    direct.dispose()
    assert migrated == made


def _table_sql(rows: Iterable[Any]) -> dict[str, str]:
    """What makes each of our tables, STRICT and all, which alembic's comparison does not look at."""
    return {name: " ".join(sql.split()) for name, sql in rows if name in tables.metadata.tables}


async def test_every_commit_is_hashed_over_the_one_before(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(memory_sampled("a"), memory_sampled("b"))
        await cluster.append(memory_sampled("c"))
    raw = sqlite3.connect(log_path)
    rows = raw.execute("SELECT * FROM events ORDER BY seq").fetchall()
    hashes = raw.execute("SELECT * FROM chain ORDER BY seq").fetchall()
    raw.close()
    first = log_format.chain_hash(b"", [*rows[0], *rows[1]])
    assert hashes == [(2, first), (3, log_format.chain_hash(first, rows[2]))]


async def test_an_unknown_kind_is_kept_byte_for_byte(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(unknown_kind())
        (row,) = cluster.log.read(1, 1)
        assert cluster.state.unapplied_events == 1
    assert row.kind == log_format.UNKNOWN_KIND
    assert row.payload == b"\x9a\x06\x01x"
    assert log_format.event(row).fact.SerializeToString() == b"\x9a\x06\x01x"


async def test_a_writer_that_fails_fails_whoever_waits_and_all_who_come_later(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(memory_sampled("a"))
        raw = sqlite3.connect(log_path)
        raw.execute("INSERT INTO events VALUES (2, 0, 0, 1, 0, 0, x'')")  # Its sequence is taken.
        raw.commit()
        raw.close()
        with pytest.raises(Exception, match="UNIQUE constraint failed"):
            await cluster.append(memory_sampled("b"))
        with pytest.raises(Exception, match="UNIQUE constraint failed"):
            await cluster.append(memory_sampled("c"))
        assert "UNIQUE constraint failed" in str(cluster.failed.exception())
        assert cluster.state.sequence == 1


async def test_a_closed_log_takes_nothing_more(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        pass
    with pytest.raises(errors.Unavailable, match="the master is stopping"):
        await cluster.append(memory_sampled())


async def test_a_log_is_read_from_a_folder_nobody_may_write_to(
    log_path: Path, clock: FakeClock, tmp_path: Path
) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(*[memory_sampled(f"n{n}") for n in range(5)])
        live = cluster.state
    folder = tmp_path / "copied"
    folder.mkdir()
    shutil.copyfile(log_path, folder / "copy.db")
    (folder / "copy.db").chmod(0o400)
    folder.chmod(0o500)
    try:
        async with attached(folder / "copy.db", clock, read_only=True) as cluster:
            await cluster.replay()
            assert cluster.state == live
            assert cluster.silent_node_ids() == frozenset()
            with pytest.raises(errors.NotNow, match="this master only reads a log"):
                await cluster.append(memory_sampled())
        assert [path.name for path in folder.iterdir()] == ["copy.db"]
    finally:
        folder.chmod(0o700)


@pytest.fixture
async def copied(log_path: Path, clock: FakeClock, tmp_path: Path) -> Path:
    """A folder with a copy of a log of 5 events that a master was writing, as copy.db and copy.db-wal."""
    folder = tmp_path / "copied"
    folder.mkdir()
    async with opened(log_path, clock) as cluster:
        await cluster.append(*[memory_sampled(f"n{n}") for n in range(5)])
        for suffix in ("", "-wal"):
            shutil.copyfile(f"{log_path}{suffix}", folder / f"copy.db{suffix}")
    return folder


def test_a_log_copied_with_its_wal_is_read_whole_and_left_alone(copied: Path) -> None:
    before = {path.name: path.read_bytes() for path in copied.iterdir()}
    log = ReadOnlyLog(copied / "copy.db")
    assert log.head() == 5
    log.close()
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == before


async def test_a_log_that_a_master_writes_is_read_beside_it(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(memory_sampled("a"))
        log = ReadOnlyLog(log_path)
        assert log.head() == 1
        await cluster.append(memory_sampled("b"))
        assert log.head() == 2
        log.close()
        await cluster.append(memory_sampled("c"))
        assert cluster.log.head() == 3


def test_a_log_copied_without_its_wal_reads_as_the_shorter_log_it_is(copied: Path) -> None:
    (copied / "copy.db-wal").unlink()
    log = ReadOnlyLog(copied / "copy.db")
    assert log.head() == 0
    log.close()


def test_a_log_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(LogFileError, match="there is no log at"):
        ReadOnlyLog(tmp_path / "events.db")
    assert list(tmp_path.iterdir()) == []


async def test_the_first_event_since_a_time_is_found(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        start_ns = clock.now_ns()
        for _ in range(3):
            await cluster.append(memory_sampled())
            clock.advance(1)
        assert cluster.log.first_since(start_ns + 1) == 2
        assert cluster.log.first_since(start_ns + 5_000_000_000) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("a small disk needs the right to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


async def test_a_full_disk_loses_nothing_and_is_tried_again(small_disk: Path, clock: FakeClock) -> None:
    path, ballast = small_disk / "events.db", Ballast(small_disk / "ballast")
    async with opened(path, clock) as cluster:
        with pytest.raises(errors.LogFull, match="the disk with the log is full"):
            await fill(cluster)
        acknowledged = cluster.state.sequence
        assert cluster.log.head() == acknowledged
        ballast.drop()
        assert await cluster.append(memory_sampled("late")) == acknowledged + 1
        live = cluster.state
    async with opened(path, clock) as cluster:
        assert cluster.state == live


class Ballast:
    """A MiB that can be given back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_bytes(b"\0" * (1 << 20))

    def drop(self) -> None:
        self._path.unlink()


async def fill(cluster: Cluster) -> None:
    while True:
        await cluster.append(*[memory_sampled()] * 100)


def test_commits_come_in_the_order_of_the_appends(log_path: Path) -> None:
    commits: list[Commit] = []
    log = EventLog(log_path, SystemClock(), commits.append)
    asked = [Append("master", batch([(0, memory_sampled(available=n))]), None) for n in range(1000)]  # type: ignore[arg-type]  # nobody waits
    for append in asked:
        log.append(append)
    log.close()
    assert [append for commit in commits for append in commit.appends] == asked
    assert [append.last_sequence for append in asked] == list(range(1, 1001))
    state = State()
    reader = ReadOnlyLog(log_path)
    assert list(fold(reader, state, 1000))[-1] == 1000
    reader.close()


async def test_what_waits_for_the_disk_is_bounded_by_its_bytes(cluster: Cluster) -> None:
    assert isinstance(cluster.log, EventLog)
    disk, large = threading.Event(), batch([(0, node_announced("a", friendly_name="x" * FACT_BYTES_MAX))])
    blocked = cluster.log.do(lambda _: disk.wait(60))
    done: asyncio.Future[Append] = asyncio.get_running_loop().create_future()
    fitting = QUEUE_BYTES_MAX // FACT_BYTES_MAX
    for _ in range(fitting):
        cluster.log.append(Append("master", large, done))
    with pytest.raises(errors.Unavailable, match="more facts wait for the disk than it can take"):
        cluster.log.append(Append("master", large, done))
    disk.set()
    assert blocked.result(60)
    # What was taken is stored, and there is room again.
    assert await cluster.append(memory_sampled()) == fitting + 1


def test_rows_are_read_up_to_a_number_of_bytes_and_the_rest_after_them(log_path: Path) -> None:
    large = [node_announced("a", str(number), "x" * (1 << 20)) for number in range(40)]
    write(log_path, large)
    log = ReadOnlyLog(log_path)
    up: list[Scan] = []
    down: list[Scan] = []
    while not up or up[-1].reached < 40:
        up.append(log.scan(up[-1].reached + 1 if up else 1, 40))
    while not down or down[-1].reached > 1:
        down.append(log.scan(1, down[-1].reached - 1 if down else 40, descending=True))
    pages = list(log.pages(1, 40))
    log.close()
    assert [row.sequence for scan in up for row in scan.rows] == list(range(1, 41))
    assert [row.sequence for scan in down for row in scan.rows] == list(range(40, 0, -1))
    assert [sequence for page in pages for sequence in page.sequences] == list(range(1, 41))
    assert [len(scan.rows) for scan in up] == [len(page.payloads) for page in pages] == [16, 16, 8]
