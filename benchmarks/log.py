"""The log's figures: append and replay against raw sqlite3, apply against exo's, ingest through a real master."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sqlite3
import statistics
import tempfile
import time
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import grpc

from benchmarks import ingest
from benchmarks.row import Row
from benchmarks.samples import memory_fact
from services import log_format, rpc
from services.clock import SystemClock
from services.master import log_file
from services.master.__main__ import GARBAGE_THRESHOLD
from services.master.batch import batch
from services.master.checkpoint import checkpoint
from services.master.cluster import opened
from services.master.event_log import Append, Commit, EventLog
from services.master.log_reader import LogReader
from services.master.replay import fold
from services.master.servicers.events import EventServicer, add_to_server
from services.master.state import State, apply_facts
from ullage.v1 import (
    event_pb2,
    event_service_pb2,
    event_service_pb2_grpc,
)

BATCH_FACTS: Final = 256
APPEND_BATCHES: Final = 100
APPEND_ATTEMPTS: Final = 15
"""The best of these counts, ours and the floor's: whoever else uses the disk only ever makes it slower."""

APPLIED_EVENTS: Final = 20_000
APPLY_ATTEMPTS: Final = 15
REPLAYED_EVENTS: Final = 1_000_000
READERS: Final = 8
CHECKPOINTED_EVENTS: Final = 200_000
TAIL_EVENTS: Final = 10_000
FOLLOWED_IN_COMMIT: Final = 3200
"""So many that it is the readers that are measured, and not the disk."""

FOLLOWED_BATCHES: Final = 4
FOLLOW_ATTEMPTS: Final = 5
EXO_APPLY_MICROSECONDS: Final = 648.0
"""exo's apply of one memory event at 100 nodes, as it was measured on a machine of this kind (b5375f8)."""


def rows() -> Iterator[Row]:
    """All rows of the section."""
    yield from append_rows()
    yield apply_row()
    yield from replay_rows()
    yield from restart_rows()
    yield follow_row()
    yield from ingest.rows()


def stored_rows(count: int) -> Iterator[log_format.StoredRow]:
    """Rows as the log stores them, all of one source."""
    for number in range(1, count + 1):
        yield log_format.stored_row(number, number, 1, number, memory_fact(number))


def empty_log(folder: str, name: str) -> tuple[Path, sqlite3.Connection]:
    """A log with the tables and one source, and a raw connection to it with the writer's pragmas."""
    path = Path(folder) / name
    log_file.prepare(path)
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=8000"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("INSERT INTO sources (id, name, last_seq) VALUES (1, 'probe', 0)")
    return path, connection


def append_rows() -> Iterator[Row]:
    """Rows a second through the log, against executemany of the same rows into the same tables, 256 in a commit.

    One batch at a time, each waited for, as nobody who has more to say does; and with as many under way as a probe has,
    of which those that wait go into one commit.
    """
    one, several, floors = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(APPEND_ATTEMPTS):
            # One right after the other: what else the machine does is the same for all.
            floors.append(_raw_append_rate(folder, f"raw-{attempt}.db"))
            one.append(_log_append_rate(folder, f"one-{attempt}.db", under_way=1))
            several.append(_log_append_rate(folder, f"several-{attempt}.db", under_way=ingest.BATCHES_IN_FLIGHT))
    name = "sqlite3 executemany"
    yield Row("log", "append, batches of 256, one by one", max(one), "rows/s", "higher", 0.8, max(floors), name)
    yield Row("log", "append, batches of 256, 4 under way", max(several), "rows/s", "higher", 0.8, max(floors), name)


def _raw_append_rate(folder: str, name: str) -> float:
    _, connection = empty_log(folder, name)
    pending = stored_rows(APPEND_BATCHES * BATCH_FACTS)
    batches = [list(itertools.islice(pending, BATCH_FACTS)) for _ in range(APPEND_BATCHES)]
    started = time.perf_counter()
    for rows_ in batches:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows_)
        connection.execute("COMMIT")
    elapsed = time.perf_counter() - started
    connection.close()
    return APPEND_BATCHES * BATCH_FACTS / elapsed


def _log_append_rate(folder: str, name: str, under_way: int) -> float:
    numbers = itertools.count(1)
    batches = [
        batch((number, memory_fact(number)) for number in itertools.islice(numbers, BATCH_FACTS))
        for _ in range(APPEND_BATCHES)
    ]

    async def appended() -> float:
        loop = asyncio.get_running_loop()
        free = asyncio.Semaphore(under_way)
        failures = []

        def deliver(commit: Commit) -> None:
            failures.extend([] if commit.error is None else [commit.error])
            for _ in commit.appends:
                loop.call_soon_threadsafe(free.release)

        log = EventLog(Path(folder) / name, SystemClock(), deliver)
        started = time.perf_counter()
        for facts in batches:
            await free.acquire()
            log.append(Append("probe", facts, loop.create_future()))
        for _ in range(under_way):
            await free.acquire()
        # The last is on disk. The floor's connection is not timed either when it closes, and empties the WAL.
        elapsed = time.perf_counter() - started
        log.close()
        assert failures == []
        return elapsed

    return APPEND_BATCHES * BATCH_FACTS / asyncio.run(appended())


def apply_row() -> Row:
    """A memory sample applied to a state of 100 nodes, as a commit of many is; by the processor's time."""
    state = State()
    facts = [(number, number, memory_fact(number)) for number in range(1, APPLIED_EVENTS + 1)]
    seconds = []
    for _ in range(APPLY_ATTEMPTS):
        started = time.process_time()
        apply_facts(state, facts)
        seconds.append(time.process_time() - started)
    # As a rate, so that the ratio is how many times faster.
    rate = APPLIED_EVENTS / statistics.median(seconds)
    return Row("log", "apply, 100 nodes", rate, "events/s", "higher", 300, 1e6 / EXO_APPLY_MICROSECONDS, "exo")


def replay_rows() -> Iterator[Row]:
    """A million events, cold: seconds, and the rate against a cursor, a parse and a dict, by the processor's time."""
    with tempfile.TemporaryDirectory() as folder:
        path, connection = empty_log(folder, "replayed.db")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", stored_rows(REPLAYED_EVENTS))
        connection.execute("COMMIT")
        connection.close()
        wall, ours, floors = [], [], []
        with _garbage_as_in_a_master():
            for _ in range(3):
                floors.append(_replay_floor_seconds(path))
                started = time.perf_counter()
                ours.append(_replay_seconds(path))
                wall.append(time.perf_counter() - started)
    yield Row("log", "replay of 1 M events", min(wall), "s", "lower", 2.0)
    yield Row(
        "log",
        "replay, processor time",
        REPLAYED_EVENTS / min(ours),
        "events/s",
        "higher",
        0.8,
        REPLAYED_EVENTS / min(floors),
        "cursor, parse, dict",
    )


@contextmanager
def _garbage_as_in_a_master() -> Iterator[None]:
    """Python looks for cycles as seldom as in a master's process; for the floor as for ours."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GARBAGE_THRESHOLD)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def _replay_floor_seconds(path: Path) -> float:
    connection = sqlite3.connect(path)
    latest: dict[str, object] = {}
    started = time.process_time()
    for (payload,) in connection.execute("SELECT payload FROM events ORDER BY seq"):
        fact = event_pb2.Fact.FromString(payload)
        latest[fact.memory_sampled.node_id] = fact.memory_sampled.sample
    elapsed = time.process_time() - started
    connection.close()
    return elapsed


def _replay_seconds(path: Path) -> float:
    engine = log_file.reading_engine(path)
    reader = LogReader(engine)
    started = time.process_time()
    for _ in fold(reader, State(), reader.head()):
        pass
    elapsed = time.process_time() - started
    engine.dispose()
    return elapsed


def restart_rows() -> Iterator[Row]:
    """From the file to the whole state: a checkpoint of 100 nodes, and 10 k events after it."""
    with tempfile.TemporaryDirectory() as folder:
        path, connection = empty_log(folder, "restarted.db")
        rows = list(stored_rows(CHECKPOINTED_EVENTS + TAIL_EVENTS))
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        connection.execute("UPDATE sources SET last_seq = ?", (len(rows),))
        before = b"the commit before"
        ends = [(len(rows) - 1, before), (len(rows), log_format.chain_hash(before, rows[-1]))]
        connection.executemany("INSERT INTO chain VALUES (?, ?)", ends)
        state = State()
        apply_facts(state, ((row[0], row[1], event_pb2.Fact.FromString(row[6])) for row in rows[:CHECKPOINTED_EVENTS]))
        made = checkpoint(state, {"probe": CHECKPOINTED_EVENTS})
        assert made is not None
        payload = made.SerializeToString()
        connection.execute(
            "INSERT INTO checkpoints VALUES (?, ?, ?)", (CHECKPOINTED_EVENTS, zlib.crc32(payload), payload)
        )
        connection.execute("COMMIT")
        connection.close()
        seconds = statistics.median(asyncio.run(_restart_seconds(path)) for _ in range(3))
        floor = statistics.median(_tail_floor_seconds(path) for _ in range(3))
    yield Row("log", "restart from a checkpoint, 10 k events after it", seconds, "s", "lower", 0.3)
    yield Row("log", "restart, to its floor", seconds, "s", "lower", 8.0, floor, "cursor, parse of the 10 k")


async def _restart_seconds(path: Path) -> float:
    started = time.perf_counter()
    async with opened(path, SystemClock()) as cluster:
        elapsed = time.perf_counter() - started
        assert cluster.state.sequence == CHECKPOINTED_EVENTS + TAIL_EVENTS
    return elapsed


def _tail_floor_seconds(path: Path) -> float:
    connection = sqlite3.connect(path)
    started = time.perf_counter()
    for (payload,) in connection.execute("SELECT payload FROM events WHERE seq > ?", (CHECKPOINTED_EVENTS,)):
        event_pb2.Fact.FromString(payload)
    elapsed = time.perf_counter() - started
    connection.close()
    return elapsed


def follow_row() -> Row:
    """Events delivered to 8 readers of everything, stored first, against the same messages sent from memory."""
    ours, floors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(FOLLOW_ATTEMPTS):
            floors.append(asyncio.run(_sent_rate()))
            ours.append(asyncio.run(_followed_rate(Path(folder) / f"followed-{attempt}.db")))
    return Row(
        "log",
        "Follow, 8 readers, delivered",
        max(ours),
        "events/s",
        "higher",
        0.5,
        max(floors),
        "the messages alone",
    )


async def _followed_rate(path: Path) -> float:
    facts = [memory_fact(number) for number in range(FOLLOWED_IN_COMMIT)]
    last = FOLLOWED_IN_COMMIT * FOLLOWED_BATCHES
    async with opened(path, SystemClock()) as cluster:

        async def happen() -> None:
            for _ in range(FOLLOWED_BATCHES):
                await cluster.append(*facts)

        return await _delivered_rate(add_to_server, EventServicer(cluster), happen(), last)


class _Sender(event_service_pb2_grpc.EventServiceServicer):
    """Sends the same messages to everybody."""

    def __init__(self, responses: list[event_service_pb2.FollowResponse]) -> None:
        self._responses = responses

    async def Follow(
        self, request: event_service_pb2.FollowRequest, context: object
    ) -> AsyncIterator[event_service_pb2.FollowResponse]:
        for response in self._responses:
            yield response


async def _sent_rate() -> float:
    last = FOLLOWED_IN_COMMIT * FOLLOWED_BATCHES
    events = [log_format.recorded(number, number, "master", 0, memory_fact(number)) for number in range(1, last + 1)]
    responses = [
        event_service_pb2.FollowResponse(events=events[start : start + 64], progress_sequence=min(last, start + 64))
        for start in range(0, last, 64)
    ]
    register = event_service_pb2_grpc.add_EventServiceServicer_to_server
    return await _delivered_rate(register, _Sender(responses), asyncio.sleep(0), last)  # type: ignore[abstract]  # only Follow


async def _delivered_rate(
    register: Callable[[Any, grpc.aio.Server], None], servicer: object, happening: Coroutine[Any, Any, None], last: int
) -> float:
    server = rpc.Server()
    server.add("ullage.v1.EventService", register, servicer)
    port = await server.start("127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub: event_service_pb2_grpc.EventServiceAsyncStub = event_service_pb2_grpc.EventServiceStub(channel)
        started = time.perf_counter()
        readers = [asyncio.create_task(_read_to(stub, last)) for _ in range(READERS)]
        await happening
        await asyncio.gather(*readers)
        elapsed = time.perf_counter() - started
    await server.stop(0)
    return READERS * last / elapsed


async def _read_to(stub: event_service_pb2_grpc.EventServiceAsyncStub, last: int) -> None:
    async for response in stub.Follow(event_service_pb2.FollowRequest(from_sequence=1)):
        if response.progress_sequence >= last:
            return
