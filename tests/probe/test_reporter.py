"""The reporter against a real TelemetryService, which stores what it hears, and dies and comes back."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from services import rpc
from services.clock import SystemClock
from services.probe.fact_buffer import FactBuffer
from services.probe.reporter import Reporter
from ullage.v1 import event_pb2, node_pb2, telemetry_service_pb2, telemetry_service_pb2_grpc

IDENTITY = node_pb2.NodeIdentity(node_id="n" * 32, boot_id="b" * 32)


class QuickClock(SystemClock):
    """Waits a tenth of what it is asked to, and counts how often it was."""

    def __init__(self) -> None:
        self.waits = 0

    async def sleep(self, seconds: float) -> None:
        self.waits += 1
        await asyncio.sleep(seconds / 10)


class StoringMaster(telemetry_service_pb2_grpc.TelemetryServiceServicer):
    """Stores facts in order and acknowledges them; `batches` are the sequences that came over the wire together."""

    def __init__(self) -> None:
        self.stored: list[telemetry_service_pb2.Observation] = []
        self.batches: list[list[int]] = []
        self.identities: list[node_pb2.NodeIdentity] = []
        self.refusals: list[tuple[grpc.StatusCode, str]] = []
        self.batch_refusals: list[tuple[grpc.StatusCode, str]] = []
        self.answering = asyncio.Event()
        self.answering.set()
        self.dies_before_answering = False
        self.memory_period_s = 0.0

    @property
    def received(self) -> list[int]:
        """Every sequence that came over the wire."""
        return [sequence for batch in self.batches for sequence in batch]

    @property
    def acknowledged(self) -> int:
        return self.stored[-1].source_sequence if self.stored else 0

    @property
    def sequences(self) -> list[int]:
        return [observation.source_sequence for observation in self.stored]

    async def Report(
        self,
        request_iterator: AsyncIterator[telemetry_service_pb2.ReportRequest],
        context: grpc.aio.ServicerContext[telemetry_service_pb2.ReportRequest, telemetry_service_pb2.ReportResponse],
    ) -> AsyncIterator[telemetry_service_pb2.ReportResponse]:
        first = await anext(aiter(request_iterator))
        assert not first.observations
        self.identities.append(first.identity)
        if self.refusals:
            await context.abort(*self.refusals.pop(0))
        yield self.answer()
        async for request in request_iterator:
            self.batches.append([observation.source_sequence for observation in request.observations])
            if self.batch_refusals:
                await context.abort(*self.batch_refusals.pop(0))
            self.stored.extend(request.observations)
            if self.dies_before_answering:
                self.dies_before_answering = False
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            await self.answering.wait()
            yield self.answer()

    async def ReportOnce(
        self,
        request: telemetry_service_pb2.ReportOnceRequest,
        context: grpc.aio.ServicerContext[
            telemetry_service_pb2.ReportOnceRequest, telemetry_service_pb2.ReportOnceResponse
        ],
    ) -> telemetry_service_pb2.ReportOnceResponse:
        self.stored.extend(request.observations)
        return telemetry_service_pb2.ReportOnceResponse(acknowledged_source_sequence=self.acknowledged)

    def answer(self) -> telemetry_service_pb2.ReportResponse:
        response = telemetry_service_pb2.ReportResponse(acknowledged_source_sequence=self.acknowledged)
        if self.memory_period_s:
            response.memory_period.FromMilliseconds(round(self.memory_period_s * 1000))
        return response


class Wire:
    """A server for a master, that can be killed and started again at the same address.

    That is a socket of its own: a port would be anybody's while the server is away.
    """

    def __init__(self, master: StoringMaster, folder: str) -> None:
        self.master = master
        self.address = f"unix:{folder}/s"
        self.server: rpc.Server | None = None

    async def start(self) -> None:
        self.server = rpc.Server()
        self.server.add(
            "ullage.v1.TelemetryService",
            telemetry_service_pb2_grpc.add_TelemetryServiceServicer_to_server,
            self.master,
        )
        await self.server.start(self.address)

    async def kill(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None


@asynccontextmanager
async def wired(master: StoringMaster) -> AsyncIterator[Wire]:
    with tempfile.TemporaryDirectory() as folder:  # Its path is short, as that of a socket must be.
        wire = Wire(master, folder)
        await wire.start()
        try:
            yield wire
        finally:
            await wire.kill()


@asynccontextmanager
async def running(reporter: Reporter) -> AsyncIterator[None]:
    task = asyncio.create_task(reporter.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another part of the process
            await asyncio.sleep(0.01)


def memory(available: int) -> event_pb2.Fact:
    sample = node_pb2.MemorySample(ram_available_bytes=available)
    return event_pb2.Fact(memory_sampled=event_pb2.MemorySampled(node_id=IDENTITY.node_id, sample=sample))


def system() -> event_pb2.Fact:
    return event_pb2.Fact(system_sampled=event_pb2.SystemSampled(node_id=IDENTITY.node_id))


def reporter_to(
    wire: Wire, *, clock: QuickClock | None = None, buffer: FactBuffer | None = None, answer_seconds_max: float = 60.0
) -> Reporter:
    return Reporter(wire.address, IDENTITY, clock or QuickClock(), buffer=buffer, answer_seconds_max=answer_seconds_max)


async def test_the_identity_comes_first_and_then_the_announcement_and_the_samples_in_order() -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire)
        for available in range(600):
            reporter.offer(memory(available))
        async with running(reporter):
            await until(lambda: wire.master.acknowledged == 601)
            await until(lambda: reporter.buffered_facts == 0)
            assert reporter.connected
        assert wire.master.identities == [IDENTITY]
        assert wire.master.received == list(range(1, 602))
        assert wire.master.stored[0].fact.node_announced.identity == IDENTITY
        available_bytes = [stored.fact.memory_sampled.sample.ram_available_bytes for stored in wire.master.stored[1:]]
        assert available_bytes == list(range(600))


async def test_a_master_that_is_killed_and_comes_back_sees_no_gap_and_no_double() -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire)
        async with running(reporter):
            reporter.offer(memory(1))
            await until(lambda: wire.master.acknowledged == 2 and reporter.buffered_facts == 0)
            await wire.kill()
            for available in range(2, 10):
                reporter.offer(memory(available))
            await until(lambda: not reporter.connected)
            await wire.start()
            await until(lambda: wire.master.acknowledged == 10)
        assert wire.master.received == list(range(1, 11))
        assert len(wire.master.identities) == 2


async def test_what_was_made_durable_without_an_answer_is_not_sent_again() -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire)
        wire.master.dies_before_answering = True
        async with running(reporter):
            await until(lambda: len(wire.master.identities) == 2)
            reporter.offer(memory(1))
            await until(lambda: wire.master.acknowledged == 2)
        assert wire.master.received == [1, 2]


async def test_a_master_that_is_absent_at_the_start_gets_everything_later(capsys: pytest.CaptureFixture[str]) -> None:
    async with wired(StoringMaster()) as wire:
        await wire.kill()
        clock = QuickClock()
        reporter = reporter_to(wire, clock=clock)
        async with running(reporter):
            reporter.offer(memory(1))
            await until(lambda: clock.waits >= 5)
            assert not reporter.connected
            assert capsys.readouterr().out.count("not connected to the master") == 1
            await wire.start()
            await until(lambda: wire.master.acknowledged == 2)
        assert wire.master.received == [1, 2]


async def test_while_one_batch_is_under_way_the_next_one_gathers() -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire)
        wire.master.answering.clear()
        async with running(reporter):
            await until(lambda: wire.master.received == [1])
            for available in range(5):
                reporter.offer(memory(available))
            await asyncio.sleep(0.05)
            assert wire.master.received == [1]
            wire.master.answering.set()
            await until(lambda: wire.master.acknowledged == 6)
        assert wire.master.batches == [[1], [2, 3, 4, 5, 6]]


async def test_a_master_that_never_answers_is_dialled_again() -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire, answer_seconds_max=0.2)
        wire.master.answering.clear()
        async with running(reporter):
            await until(lambda: len(wire.master.identities) >= 2)
            wire.master.answering.set()
            reporter.offer(memory(1))
            await until(lambda: wire.master.acknowledged == 2)
        assert wire.master.received == [1, 2]


async def test_a_full_buffer_keeps_the_announcement_and_the_newest() -> None:
    async with wired(StoringMaster()) as wire:
        await wire.kill()
        reporter = reporter_to(wire, buffer=FactBuffer(facts_max=5))
        for available in range(10):
            reporter.offer(memory(available))
        assert (reporter.buffered_facts, reporter.dropped_facts) == (5, 6)
        await wire.start()
        async with running(reporter):
            await until(lambda: wire.master.acknowledged == 11)
        assert wire.master.sequences == [1, 8, 9, 10, 11]


@pytest.mark.parametrize("code", [grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.INVALID_ARGUMENT])
async def test_a_node_that_is_refused_says_why_and_tries_again(
    code: grpc.StatusCode, capsys: pytest.CaptureFixture[str]
) -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire)
        wire.master.refusals = [(code, "two machines share one node_id")] * 2
        async with running(reporter):
            await until(lambda: wire.master.acknowledged == 1)
        assert capsys.readouterr().out.count("two machines share one node_id") == 1
        assert len(wire.master.identities) == 3


async def test_facts_that_the_master_refuses_are_given_up_and_the_next_ones_sent() -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire)
        wire.master.batch_refusals = [(grpc.StatusCode.INVALID_ARGUMENT, "no fact of a node's")]
        reporter.offer(memory(1))
        async with running(reporter):
            await until(lambda: reporter.dropped_facts == 2)
            reporter.offer(memory(2))
            await until(lambda: wire.master.acknowledged == 3)
        assert wire.master.received == [1, 2, 3]


async def test_facts_that_find_no_room_on_the_masters_disk_are_kept_and_sent_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire)
        wire.master.batch_refusals = [(grpc.StatusCode.RESOURCE_EXHAUSTED, "disk full")] * 3
        async with running(reporter):
            await until(lambda: wire.master.acknowledged == 1)
            await until(lambda: reporter.buffered_facts == 0)
        assert reporter.dropped_facts == 0
        assert wire.master.received == [1, 1, 1, 1]
        output = capsys.readouterr().out
        assert output.count("disk full") == 1
        assert output.count("connected to the master") == 2  # The outage's beginning and its end.


async def test_a_master_with_a_new_log_is_told_who_the_node_is() -> None:
    async with wired(StoringMaster()) as wire:
        reporter = reporter_to(wire)
        async with running(reporter):
            reporter.offer(memory(1))
            await until(lambda: wire.master.acknowledged == 2 and reporter.buffered_facts == 0)
            await wire.kill()
            wire.master = StoringMaster()
            await wire.start()
            reporter.offer(memory(2))
            await until(lambda: wire.master.acknowledged == 4)
        kinds = [stored.fact.WhichOneof("fact") for stored in wire.master.stored]
        assert kinds == ["memory_sampled", "node_announced"]


async def test_the_period_the_master_wishes_is_known() -> None:
    async with wired(StoringMaster()) as wire:
        wire.master.memory_period_s = 1.5
        reporter = reporter_to(wire)
        async with running(reporter):
            await until(lambda: reporter.memory_period_s == 1.5)


def test_a_buffer_drops_memory_samples_before_system_samples_and_keeps_one_of_each() -> None:
    buffer = FactBuffer(facts_max=3)
    for fact in (memory(1), system(), memory(2), system(), system()):
        buffer.add(fact)
    assert [observation.source_sequence for observation in buffer.oldest(9)] == [3, 4, 5]
    assert buffer.dropped_facts == 2


def test_a_buffer_lets_go_of_what_is_acknowledged_only() -> None:
    buffer = FactBuffer(facts_max=3)
    for available in range(3):
        buffer.add(memory(available))
    buffer.acknowledge(2)
    buffer.acknowledge(1)
    assert [observation.source_sequence for observation in buffer.oldest(9)] == [3]
    buffer.add(memory(3))
    buffer.add(memory(4))
    buffer.add(memory(5))
    assert [observation.source_sequence for observation in buffer.oldest(9)] == [4, 5, 6]
    assert (buffer.acknowledged_sequence, buffer.dropped_facts) == (2, 1)
