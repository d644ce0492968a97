"""The master as a process: killed, started twice, refused, read offline, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services import log_format, rpc
from services.master.cluster import Cluster, attached, opened
from services.master.event_log import ReadOnlyLog
from services.master.servicers.events import EventServicer, add_to_server
from services.master.starting import StartingInterceptor
from tests.clocks import FakeClock
from tests.master.facts import memory_sampled, observations
from ullage.v1 import (
    event_service_pb2,
    event_service_pb2_grpc,
    model_service_pb2,
    model_service_pb2_grpc,
    node_pb2,
    telemetry_service_pb2,
    telemetry_service_pb2_grpc,
)

START_SECONDS = 60.0

PATIENT = ("--suspect-after-ms", "600000", "--lost-after-ms", "600000", "--runner-stalled-after-ms", "700000")
"""Options of a master that records nobody's silence, however long a test takes."""


class Process:
    """A master of its own process, which listens at `address`."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address

    async def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return await self.process.wait()


async def start(*options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.master",
        *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def refusal(*options: str) -> tuple[int, str, list[str]]:
    """How a master that cannot start ends: exit code, stdout, the lines on stderr that are no log lines."""
    process = await start(*options)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), [x for x in err.decode().splitlines() if not x.startswith("timestamp=")]


@asynccontextmanager
async def master(folder: Path, *options: str, listen: str = "127.0.0.1:0") -> AsyncIterator[Process]:
    """A master with its log in `folder`, serving; killed at the end if it still runs."""
    ready = folder / "ready"
    ready.unlink(missing_ok=True)
    process = await start("--listen", listen, "--state-dir", str(folder), "--ready-file", str(ready), *options)
    try:
        async with asyncio.timeout(START_SECONDS):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.02)
        yield Process(process, ready.read_text())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


def log_of(folder: Path) -> Path:
    return folder / "master" / "events.db"


class Reporter:
    """A probe that keeps `ahead` batches under way and remembers what was acknowledged."""

    def __init__(self, node_id: str) -> None:
        self.identity = node_pb2.NodeIdentity(node_id=node_id, boot_id="1")
        self.acknowledged = 0
        self.already: int | None = None

    async def report(self, address: str, more: int | None = None) -> None:
        """Report until the master is gone, or so much more is acknowledged than was there already."""
        async with rpc.channel(address) as channel:
            call = rpc.keep_status(telemetry_service_pb2_grpc.TelemetryServiceStub(channel).Report())
            await call.write(telemetry_service_pb2.ReportRequest(identity=self.identity))
            sender: asyncio.Task[None] | None = None
            until: int | None = None
            try:
                async for response in call:
                    self.acknowledged = response.acknowledged_source_sequence
                    if sender is None:
                        self.already = self.acknowledged
                        until = None if more is None else self.already + more
                        sender = asyncio.create_task(self._send(call, self.acknowledged + 1, until))
                    if self.acknowledged == until:
                        return
            except grpc.aio.AioRpcError:
                pass  # The master is gone.
            finally:
                if sender is not None:
                    sender.cancel()
                    await asyncio.gather(sender, return_exceptions=True)

    async def _send(
        self,
        call: grpc.aio.StreamStreamCall[telemetry_service_pb2.ReportRequest, telemetry_service_pb2.ReportResponse],
        first: int,
        until: int | None,
    ) -> None:
        while until is None or first <= until:
            last = first + 9 if until is None else min(first + 9, until)
            facts = [memory_sampled(self.identity.node_id, available=n) for n in range(first, last + 1)]
            await call.write(telemetry_service_pb2.ReportRequest(observations=observations(*facts, first=first)))
            first = last + 1
            await asyncio.sleep(0)


async def state_at(address: str, sequence: int) -> event_service_pb2.GetStateResponse:
    async with rpc.channel(address) as channel:
        stub = event_service_pb2_grpc.EventServiceStub(channel)
        return await stub.GetState(event_service_pb2.GetStateRequest(at_sequence=sequence))


async def each_acknowledged_more(reporters: Sequence[Reporter], before: Sequence[int]) -> None:
    """Return when each of them was acknowledged more than it was before."""
    async with asyncio.timeout(START_SECONDS):
        while not all(each.acknowledged > was for each, was in zip(reporters, before, strict=True)):  # noqa: ASYNC110 - they tell nobody
            await asyncio.sleep(0.01)


async def test_a_killed_master_has_lost_nothing_it_acknowledged_and_has_nothing_twice(tmp_path: Path) -> None:
    reporters = [Reporter("a"), Reporter("b"), Reporter("c")]
    hashes: dict[int, str] = {}
    for _ in range(2):
        async with master(tmp_path, *PATIENT) as running, asyncio.TaskGroup() as tasks:
            for sequence, known in hashes.items():
                assert (await state_at(running.address, sequence)).state_hash == known
            before = [reporter.acknowledged for reporter in reporters]
            for reporter in reporters:
                tasks.create_task(reporter.report(running.address))
            await each_acknowledged_more(reporters, before)
            await asyncio.sleep(0.5)
            sequence = (await state_at(running.address, 1)).head_sequence
            hashes[sequence] = (await state_at(running.address, sequence)).state_hash
            await running.end(signal.SIGKILL)
    acknowledged = {f"probe/{reporter.identity.node_id}/1": reporter.acknowledged for reporter in reporters}
    assert min(acknowledged.values()) > 0
    async with master(tmp_path, *PATIENT) as running:
        for reporter in reporters:
            last = reporter.acknowledged
            await reporter.report(running.address, more=500)
            assert reporter.already is not None
            assert last <= reporter.already
        assert {(await state_at(running.address, sequence)).state_hash for sequence in hashes} == set(hashes.values())
        assert await running.end(signal.SIGTERM) == 0
    log = ReadOnlyLog(log_of(tmp_path))
    stored: dict[str, list[int]] = {}
    for row in log.read(1, log.head()):
        stored.setdefault(row.source, []).append(row.source_sequence)
        if row.source.startswith("probe/"):
            assert log_format.event(row).fact.memory_sampled.sample.ram_available_bytes == row.source_sequence
    log.close()
    for source, last in acknowledged.items():
        assert stored[source] == list(range(1, len(stored[source]) + 1))
        assert len(stored[source]) >= last + 500
    assert stored["master"] == [0, 0, 0]


class _Readable(Protocol):
    async def read(self) -> object: ...


async def to_the_end(stream: _Readable) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_a_master_that_is_told_to_stop_ends_its_streams_and_exits_well(tmp_path: Path) -> None:
    async with master(tmp_path) as running, rpc.channel(running.address) as channel:
        follow = event_service_pb2_grpc.EventServiceStub(channel).Follow(event_service_pb2.FollowRequest())
        report = rpc.keep_status(telemetry_service_pb2_grpc.TelemetryServiceStub(channel).Report())
        await report.write(
            telemetry_service_pb2.ReportRequest(identity=node_pb2.NodeIdentity(node_id="a", boot_id="1"))
        )
        await report.read()
        await follow.read()
        assert await running.end(signal.SIGTERM) == 0
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await to_the_end(follow)
        assert (ended.value.code(), ended.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the master is stopping")
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await to_the_end(report)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert not log_of(tmp_path).with_name("events.db-wal").exists()


async def health_of(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return (await stub.Check(request)).status  # type: ignore[attr-defined, no-any-return]  # its stub says too little


async def test_a_serving_master_is_healthy_as_a_whole_and_service_by_service(tmp_path: Path) -> None:
    async with master(tmp_path) as running, rpc.channel(running.address) as channel:
        for name in ("", "ullage.v1.PlacementService", "ullage.v1.DispatchService"):
            assert await health_of(channel, name) == health_pb2.HealthCheckResponse.SERVING


def take_sequence(path: Path, sequence: int) -> None:
    """Put a row where the master will want to put its next one."""
    raw = sqlite3.connect(path, timeout=60)
    raw.execute("INSERT INTO events VALUES (?, 0, 0, 1, 0, 0, x'')", (sequence,))
    raw.commit()
    raw.close()


async def test_a_master_whose_log_fails_tells_whoever_waits_and_ends_with_1(tmp_path: Path) -> None:
    once = telemetry_service_pb2.ReportOnceRequest(
        identity=node_pb2.NodeIdentity(node_id="a", boot_id="1"), observations=observations(memory_sampled("a"))
    )
    async with master(tmp_path) as running, rpc.channel(running.address) as channel:
        take_sequence(log_of(tmp_path), 2)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await telemetry_service_pb2_grpc.TelemetryServiceStub(channel).ReportOnce(once)
        assert failed.value.code() == grpc.StatusCode.UNAVAILABLE
        assert await running.process.wait() == 1
        assert running.process.stderr is not None
        lines = (await running.process.stderr.read()).decode().splitlines()
    reason = "UNIQUE constraint failed: events.seq"
    assert lines[-1].startswith(f"ullage master: the log cannot be written any more ({reason}); what was acknowledged")


async def test_a_second_master_on_the_same_log_is_refused_by_one_line(tmp_path: Path) -> None:
    async with master(tmp_path) as running:
        code, out, lines = await refusal("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
        assert (code, out) == (1, "")
        holder = f"another master (pid {running.process.pid}) writes {log_of(tmp_path)}"
        assert lines == [f"ullage master: {holder}: stop it, or give this one another log with --log"]


@pytest.mark.parametrize(
    ("log", "said"), [("file/events.db", "File exists"), ("folder", "unable to open database file")]
)
async def test_a_log_that_cannot_be_kept_is_refused_by_one_line(log: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    code, out, lines = await refusal("--listen", "127.0.0.1:0", "--log", str(tmp_path / log))
    assert (code, out) == (1, "")
    [line] = lines
    assert line.startswith(f"ullage master: {tmp_path / log} cannot be kept: {said}; make its folder writable")


async def test_a_port_in_use_is_refused_by_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code, out, lines = await refusal("--listen", address, "--state-dir", str(tmp_path))
    assert (code, out) == (1, "")
    assert len(lines) == 1
    assert f"cannot listen on {address}: it is in use" in lines[0]


async def test_an_address_others_can_reach_needs_to_be_asked_for_aloud(tmp_path: Path) -> None:
    code, _, lines = await refusal("--listen", "0.0.0.0:0", "--state-dir", str(tmp_path))
    assert code == 1
    assert len(lines) == 1
    assert "say --insecure" in lines[0]


async def test_bounds_that_contradict_each_other_are_refused_by_one_line(tmp_path: Path) -> None:
    options = ("--suspect-after-ms", "5000", "--lost-after-ms", "4000", "--state-dir", str(tmp_path))
    code, _, lines = await refusal("--listen", "127.0.0.1:0", *options)
    assert code == 1
    assert lines == ["ullage master: --suspect-after-ms must be above 0, and not above --lost-after-ms"]


@pytest.fixture
async def newer(tmp_path: Path, clock: FakeClock) -> Path:
    """A log of a release to come."""
    path = tmp_path / "newer.db"
    async with opened(path, clock) as cluster:
        await cluster.append(memory_sampled())
    raw = sqlite3.connect(path)
    raw.execute("PRAGMA user_version = 2")
    raw.close()
    return path


@pytest.mark.parametrize("options", [(), ("--read-only",)])
async def test_a_newer_log_is_refused_by_one_line(newer: Path, options: tuple[str, ...]) -> None:
    code, _, lines = await refusal("--listen", "127.0.0.1:0", "--log", str(newer), *options)
    assert code == 1
    assert len(lines) == 1
    assert "written by a newer release (format 2, this one knows 1): install that release" in lines[0]


async def test_a_copied_log_is_read_through_a_socket_and_left_as_it_was(tmp_path: Path, clock: FakeClock) -> None:
    original, path = tmp_path / "events.db", tmp_path / "copy.db"
    async with opened(original, clock) as cluster:
        await cluster.append(*[memory_sampled("a", available=n) for n in range(5)])
    shutil.copyfile(original, path)
    before = path.stat()
    folder = tmp_path / "reader"
    folder.mkdir()
    socket_address = f"unix:{tmp_path}/s"
    async with master(folder, "--read-only", "--log", str(path), listen=socket_address) as reader:
        assert reader.address == socket_address
        answer = await state_at(reader.address, 3)
        assert answer.head_sequence == 5
        assert answer.state.nodes[0].memory.ram_available_bytes == 2
        async with rpc.channel(reader.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await model_service_pb2_grpc.ModelServiceStub(channel).RemoveModel(
                    model_service_pb2.RemoveModelRequest(model_id="m")
                )
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
            once = telemetry_service_pb2.ReportOnceRequest(
                identity=node_pb2.NodeIdentity(node_id="a", boot_id="1"), observations=observations(memory_sampled("a"))
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await telemetry_service_pb2_grpc.TelemetryServiceStub(channel).ReportOnce(once)
            assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert await reader.end(signal.SIGINT) == 0
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert not path.with_name("copy.db-wal").exists()
    assert not path.with_name("copy.db.lock").exists()


async def test_calls_before_the_replay_is_done_are_told_how_far_it_is(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.append(memory_sampled("a"))
    async with attached(log_path, clock) as cluster, starting(cluster) as channel:
        stub = event_service_pb2_grpc.EventServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetState(event_service_pb2.GetStateRequest())
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "replaying its log" in str(refused.value.details())
        follow = stub.Follow(event_service_pb2.FollowRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await follow.read()
        assert await health_of(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        await cluster.replay()
        assert (await stub.GetState(event_service_pb2.GetStateRequest())).state.sequence == 1


@asynccontextmanager
async def starting(cluster: Cluster) -> AsyncIterator[grpc.aio.Channel]:
    server = rpc.Server(StartingInterceptor(cluster))
    server.add("ullage.v1.EventService", add_to_server, EventServicer(cluster))
    port = await server.start("127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)
