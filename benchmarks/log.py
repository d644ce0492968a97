"""The log's figures: append and replay against raw sqlite3, apply against exo's, ingest through a real master."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import psutil

from benchmarks.row import Row
from services import log_format, rpc
from services.clock import SystemClock
from services.master import log_file
from services.master.batch import batch
from services.master.checkpoint import checkpoint
from services.master.cluster import opened
from services.master.event_log import Append, Commit, EventLog
from services.master.log_reader import LogReader
from services.master.replay import fold
from services.master.servicers.events import EventServicer
from services.master.state import State, apply_fact
from ullage.v1 import (
    event_pb2,
    event_service_pb2,
    event_service_pb2_grpc,
    node_pb2,
    telemetry_service_pb2,
)

NODES: Final = 100
BATCH_FACTS: Final = 256
APPEND_BATCHES: Final = 200
APPEND_ATTEMPTS: Final = 5
REPLAYED_EVENTS: Final = 1_000_000
STREAMS: Final = 8
SAMPLES_IN_BATCH: Final = 64
BATCHES_PER_STREAM: Final = 400
BATCHES_IN_FLIGHT: Final = 4
CHECKPOINTED_EVENTS: Final = 200_000
TAIL_EVENTS: Final = 10_000
FOLLOWED_IN_COMMIT: Final = 3200
"""So many that it is the readers that are measured, and not the disk."""

FOLLOWED_BATCHES: Final = 4
EXO_APPLY_MICROSECONDS: Final = 648.0
"""exo's apply of one memory event at 100 nodes, as it was measured on a machine of this kind (b5375f8)."""


def rows() -> Iterator[Row]:
    """All rows of the section."""
    yield append_row()
    yield apply_row()
    yield from replay_rows()
    yield from restart_rows()
    yield follow_row()
    yield from ingest_rows()


def sample_fact(number: int) -> event_pb2.Fact:
    """A memory sample as a probe sends it, of one of NODES nodes."""
    sample = node_pb2.MemorySample(
        ram_total_bytes=32 << 30,
        ram_available_bytes=(20 << 30) + number % 4096,
        swap_total_bytes=0,
        swap_available_bytes=0,
        strict_available_bytes=18 << 30,
        balanced_available_bytes=19 << 30,
        ceiling_available_bytes=20 << 30,
        pressure_level=node_pb2.PRESSURE_LEVEL_NORMAL,
        pressure_pct=3.5,
        source=node_pb2.MEMORY_SOURCE_PROCFS,
    )
    sample.taken_at.FromNanoseconds(1_790_000_000_000_000_000 + number)
    return event_pb2.Fact(memory_sampled=event_pb2.MemorySampled(node_id=f"{number % NODES:032x}", sample=sample))


def stored_rows(count: int) -> Iterator[log_format.StoredRow]:
    """Rows as the log stores them, all of one source."""
    for number in range(1, count + 1):
        yield log_format.stored_row(number, number, 1, number, sample_fact(number))


def empty_log(folder: str, name: str) -> tuple[Path, sqlite3.Connection]:
    """A log with the tables and one source, and a raw connection to it with the writer's pragmas."""
    path = Path(folder) / name
    log_file.prepare(path)
    connection = sqlite3.connect(path, isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=8000"):
        connection.execute(f"PRAGMA {pragma}")
    connection.execute("INSERT INTO sources (id, name, last_seq) VALUES (1, 'probe', 0)")
    return path, connection


def append_row() -> Row:
    """Rows a second through the log, against executemany of the same rows into the same tables."""
    ours, floors = [], []
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(APPEND_ATTEMPTS):
            # One right after the other: what else the machine does is the same for both.
            floors.append(_raw_append_rate(folder, f"raw-{attempt}.db"))
            ours.append(_log_append_rate(folder, f"log-{attempt}.db"))
    return Row(
        "log",
        "append, batches of 256, durable",
        statistics.median(ours),
        "rows/s",
        "higher",
        0.8,
        statistics.median(floors),
        "sqlite3 executemany",
    )


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


def _log_append_rate(folder: str, name: str) -> float:
    numbers = itertools.count(1)
    batches = [
        batch((number, sample_fact(number)) for number in itertools.islice(numbers, BATCH_FACTS))
        for _ in range(APPEND_BATCHES)
    ]

    async def appended() -> float:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()

        def deliver(commit: Commit) -> None:
            if commit.error is not None:
                raise commit.error
            loop.call_soon_threadsafe(arrived.set)

        log = EventLog(Path(folder) / name, SystemClock(), deliver)
        started = time.perf_counter()
        for facts in batches:
            arrived.clear()
            log.append(Append("probe", facts, loop.create_future()))
            await arrived.wait()
        elapsed = time.perf_counter() - started
        log.close()
        return elapsed

    return APPEND_BATCHES * BATCH_FACTS / asyncio.run(appended())


def apply_row() -> Row:
    """One memory sample applied to a state of 100 nodes."""
    state, facts = State(), [sample_fact(number) for number in range(20_000)]
    for sequence, fact in enumerate(facts[:NODES], 1):
        apply_fact(state, sequence, sequence, fact)
    started = time.perf_counter()
    for sequence, fact in enumerate(facts, NODES + 1):
        apply_fact(state, sequence, sequence, fact)
    microseconds = (time.perf_counter() - started) / len(facts) * 1e6
    # As a rate, so that the ratio is how many times faster.
    return Row(
        "log", "apply, 100 nodes", 1e6 / microseconds, "events/s", "higher", 300, 1e6 / EXO_APPLY_MICROSECONDS, "exo"
    )


def replay_rows() -> Iterator[Row]:
    """A million events, cold: seconds, and the rate against a cursor, a parse and a dict."""
    with tempfile.TemporaryDirectory() as folder:
        path, connection = empty_log(folder, "replayed.db")
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", stored_rows(REPLAYED_EVENTS))
        connection.execute("COMMIT")
        connection.close()
        floor_seconds, ours_seconds = [], []
        for _ in range(3):
            floor_seconds.append(_replay_floor_seconds(path))
            ours_seconds.append(_replay_seconds(path))
    seconds = statistics.median(ours_seconds)
    yield Row("log", "replay of 1 M events", seconds, "s", "lower", 2.0)
    yield Row(
        "log",
        "replay",
        REPLAYED_EVENTS / seconds,
        "events/s",
        "higher",
        0.8,
        REPLAYED_EVENTS / statistics.median(floor_seconds),
        "cursor, parse, dict",
    )


def _replay_floor_seconds(path: Path) -> float:
    connection = sqlite3.connect(path)
    latest: dict[str, object] = {}
    started = time.perf_counter()
    for (payload,) in connection.execute("SELECT payload FROM events ORDER BY seq"):
        fact = event_pb2.Fact.FromString(payload)
        latest[fact.memory_sampled.node_id] = fact.memory_sampled.sample
    elapsed = time.perf_counter() - started
    connection.close()
    return elapsed


def _replay_seconds(path: Path) -> float:
    engine = log_file.reading_engine(path)
    reader = LogReader(engine)
    started = time.perf_counter()
    for _ in fold(reader, State(), reader.head()):
        pass
    elapsed = time.perf_counter() - started
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
        ends = [(len(rows) - 1, before), (len(rows), log_format.chain_hash(before, rows[-1:]))]
        connection.executemany("INSERT INTO chain VALUES (?, ?)", ends)
        state = State()
        for row in rows[:CHECKPOINTED_EVENTS]:
            apply_fact(state, row[0], row[1], event_pb2.Fact.FromString(row[6]))
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
    """Events delivered to 8 readers of everything, by a master in this process, stored first."""
    with tempfile.TemporaryDirectory() as folder:
        return Row(
            "log",
            "Follow, 8 readers, delivered",
            asyncio.run(_delivered_rate(Path(folder) / "followed.db")),
            "events/s",
            "higher",
            100_000,
        )


async def _delivered_rate(path: Path) -> float:
    facts = [sample_fact(number) for number in range(FOLLOWED_IN_COMMIT)]
    last = FOLLOWED_IN_COMMIT * FOLLOWED_BATCHES
    async with opened(path, SystemClock()) as cluster:
        server = rpc.Server()
        register = event_service_pb2_grpc.add_EventServiceServicer_to_server
        server.add("ullage.v1.EventService", register, EventServicer(cluster))
        port = await server.start("127.0.0.1:0")
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            stub: event_service_pb2_grpc.EventServiceAsyncStub = event_service_pb2_grpc.EventServiceStub(channel)
            started = time.perf_counter()
            readers = [asyncio.create_task(_read_to(stub, last)) for _ in range(STREAMS)]
            for _ in range(FOLLOWED_BATCHES):
                await cluster.append(*facts)
            await asyncio.gather(*readers)
            elapsed = time.perf_counter() - started
        await server.stop(0)
    return STREAMS * last / elapsed


async def _read_to(stub: event_service_pb2_grpc.EventServiceAsyncStub, last: int) -> None:
    async for response in stub.Follow(event_service_pb2.FollowRequest(from_sequence=1)):
        if response.progress_sequence >= last:
            return


def ingest_rows() -> Iterator[Row]:
    """8 streams of batches of 64 samples into a real master, each batch acknowledged after its commit."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "services.master", "--listen", "127.0.0.1:0"]
        options = ["--log", f"{folder}/events.db", "--ready-file", str(ready), "--log-level", "error"]
        master = subprocess.Popen([*command, *options])
        try:
            while not ready.exists() and master.poll() is None:
                time.sleep(0.05)
            rate, cpu_microseconds = asyncio.run(_ingest(ready.read_text().strip(), psutil.Process(master.pid)))
        finally:
            master.terminate()
            master.wait()
    yield Row("log", "ingest, 8 streams of 64, acknowledged", rate, "events/s", "higher", 150_000)
    yield Row("log", "ingest, CPU of the master", cpu_microseconds, "µs/event", "lower", 6.0)


async def _ingest(address: str, master: psutil.Process) -> tuple[float, float]:
    """Events a second, and the master's CPU for each in microseconds."""
    batches = [_batches(stream) for stream in range(STREAMS)]
    async with rpc.channel(address) as channel:
        await channel.channel_ready()
        before = master.cpu_times()
        started = time.perf_counter()
        await asyncio.gather(*(_report(channel, f"{stream:032x}", batches[stream]) for stream in range(STREAMS)))
        elapsed = time.perf_counter() - started
        after = master.cpu_times()
    events = STREAMS * BATCHES_PER_STREAM * SAMPLES_IN_BATCH
    return events / elapsed, (after.user + after.system - before.user - before.system) / events * 1e6


def _batches(stream: int) -> list[bytes]:
    """What a stream sends, ready to be sent: it is the master that is measured."""
    numbers = itertools.count(1)
    made = []
    for _ in range(BATCHES_PER_STREAM):
        observations = []
        for number in itertools.islice(numbers, SAMPLES_IN_BATCH):
            fact = sample_fact(number)
            fact.memory_sampled.node_id = f"{stream:032x}"
            observations.append(telemetry_service_pb2.Observation(source_sequence=number, fact=fact))
        made.append(telemetry_service_pb2.ReportRequest(observations=observations).SerializeToString())
    return made


async def _report(channel: grpc.aio.Channel, node_id: str, batches: list[bytes]) -> None:
    """Send the batches with a window, and return when the last is acknowledged."""
    call: grpc.aio.StreamStreamCall[bytes, telemetry_service_pb2.ReportResponse] = channel.stream_stream(
        "/ullage.v1.TelemetryService/Report", response_deserializer=telemetry_service_pb2.ReportResponse.FromString
    )()

    async def acknowledgement() -> int:
        response = await call.read()
        assert isinstance(response, telemetry_service_pb2.ReportResponse), "the master ended the stream"
        return response.acknowledged_source_sequence

    identity = node_pb2.NodeIdentity(node_id=node_id, boot_id="benchmark")
    await call.write(telemetry_service_pb2.ReportRequest(identity=identity).SerializeToString())
    acknowledged = await acknowledgement()
    for sent, request in enumerate(batches):
        while (sent - BATCHES_IN_FLIGHT) * SAMPLES_IN_BATCH >= acknowledged:
            acknowledged = await acknowledgement()
        await call.write(request)
    while acknowledged < len(batches) * SAMPLES_IN_BATCH:
        acknowledged = await acknowledgement()
    await call.done_writing()
