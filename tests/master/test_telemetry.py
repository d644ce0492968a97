"""What probes report over a real gRPC server: stored once, acknowledged when durable, refused by name when wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import grpc
import pytest

from services import rpc
from services.master import errors
from services.master.cluster import Cluster
from services.master.event_log import EventLog
from services.master.observations import checked
from services.master.servicers.telemetry import BATCHES_IN_FLIGHT_MAX, TelemetryServicer, add_to_server
from tests.clocks import FakeClock
from tests.master.facts import (
    MIB,
    instance_released,
    link_measured,
    memory_sampled,
    node_announced,
    observations,
    system_sampled,
    unknown_kind,
)
from ullage.v1 import event_pb2, node_pb2, state_pb2, telemetry_service_pb2, telemetry_service_pb2_grpc

Call = grpc.aio.StreamStreamCall[telemetry_service_pb2.ReportRequest, telemetry_service_pb2.ReportResponse]


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[telemetry_service_pb2_grpc.TelemetryServiceAsyncStub]:
    server = rpc.Server()
    server.add(
        "ullage.v1.TelemetryService",
        add_to_server,
        TelemetryServicer(cluster),
    )
    port = await server.start("127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield telemetry_service_pb2_grpc.TelemetryServiceStub(channel)
    await server.stop(0)


def identity(node_id: str = "a", boot_id: str = "1") -> node_pb2.NodeIdentity:
    return node_pb2.NodeIdentity(node_id=node_id, boot_id=boot_id)


async def begun(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, who: node_pb2.NodeIdentity
) -> tuple[Call, int]:
    """A stream of `who`, and how far the master has what it said."""
    call = rpc.keep_status(stub.Report())
    await call.write(telemetry_service_pb2.ReportRequest(identity=who))
    return call, await acknowledged(call)


async def acknowledged(call: Call) -> int:
    response = await call.read()
    assert isinstance(response, telemetry_service_pb2.ReportResponse)
    return response.acknowledged_source_sequence


async def say(call: Call, said: Sequence[telemetry_service_pb2.Observation]) -> None:
    await call.write(telemetry_service_pb2.ReportRequest(observations=said))


async def drained(call: Call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def failure(call: Call) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def test_what_is_said_is_acknowledged_once_it_is_in_the_state(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster
) -> None:
    call, already = await begun(stub, identity())
    assert already == 0
    await say(call, observations(node_announced("a"), memory_sampled("a"), link_measured("a", "b")))
    assert await acknowledged(call) == 3
    assert cluster.state.sequence == 3
    assert cluster.silent_node_ids() == frozenset()
    await say(call, observations(system_sampled("a", cpu_pct=1.0), first=4))
    assert await acknowledged(call) == 4
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() == grpc.StatusCode.OK


async def test_a_new_stream_of_the_same_boot_is_told_what_is_there_already(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster
) -> None:
    call, _ = await begun(stub, identity())
    await say(call, observations(memory_sampled("a"), memory_sampled("a")))
    assert await acknowledged(call) == 2
    call.cancel()
    again, already = await begun(stub, identity())
    assert already == 2
    await say(again, observations(memory_sampled("a"), memory_sampled("a"), memory_sampled("a")))
    assert await acknowledged(again) == 3
    assert cluster.state.sequence == 3


async def test_many_batches_in_flight_are_all_stored_in_order(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster
) -> None:
    call, _ = await begun(stub, identity())
    for first in range(1, 1001, 10):
        await say(call, observations(*[memory_sampled("a")] * 10, first=first))
    seen = [0]
    while seen[-1] < 1000:
        seen.append(await acknowledged(call))
    assert seen == sorted(seen)
    assert [row.source_sequence for row in cluster.log.read(1, 1000)] == list(range(1, 1001))


def _over(available: int, total: int) -> event_pb2.Fact:
    return memory_sampled("a", available=available, total=total)


def _named(length: int) -> event_pb2.Fact:
    """A fact as long as the name in it, and a little more."""
    return node_announced("a", friendly_name="x" * length)


def _swap_over() -> event_pb2.Fact:
    fact = system_sampled("a")
    fact.system_sampled.sample.memory.swap_total_bytes = 1
    fact.system_sampled.sample.memory.swap_available_bytes = 2
    return fact


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (observations(instance_released()), "observation 1: a probe may not report instance_released"),
        (observations(unknown_kind()), "observation 1: its kind is unknown to this master"),
        (observations(event_pb2.Fact()), "observation 1: it holds no fact"),
        ([telemetry_service_pb2.Observation(source_sequence=1)], "observation 1: it holds no fact"),
        (observations(memory_sampled("b")), "observation 1: it is about node 'b', in what node 'a' says"),
        (observations(link_measured("b", "a")), "observation 1: it is about node 'b', in what node 'a' says"),
        (observations(memory_sampled("a"), _over(17, 16)), "observation 2: 17 bytes are available of 16 in all; clamp"),
        (observations(_swap_over()), "observation 1: 2 bytes of swap are available of 1 in all; clamp"),
        (observations(memory_sampled("a"), first=0), "source_sequence 0 follows 0"),
        (
            [*observations(memory_sampled("a"), first=5), *observations(memory_sampled("a"), first=4)],
            "source_sequence 4 follows 5",
        ),
        (observations(*[memory_sampled("a")] * 4097), "holds 4097 observations: send at most 4096"),
        (observations(_named(4 * MIB - 100)), "a fact has 4194228 bytes: the log takes at most 3145728 in one"),
        (observations(_named(4 * MIB)), "a message holds 4194328 bytes of facts: send at most 4194304 in one"),
    ],
)
async def test_what_is_wrong_is_refused_by_name_and_what_came_before_is_kept(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub,
    cluster: Cluster,
    said: list[telemetry_service_pb2.Observation],
    message: str,
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ReportOnce(telemetry_service_pb2.ReportOnceRequest(identity=identity(), observations=said))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in str(refused.value.details())
    call, _ = await begun(stub, identity())
    await say(call, observations(memory_sampled("a")))
    await say(
        call, [telemetry_service_pb2.Observation(source_sequence=o.source_sequence + 1, fact=o.fact) for o in said]
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await drained(call)
    assert (await failure(call))[0] == grpc.StatusCode.INVALID_ARGUMENT
    assert cluster.state.sequence == 1
    assert cluster.acknowledged("probe/a/1") == 1


async def test_a_sample_without_a_total_may_say_what_is_available(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster
) -> None:
    fact = memory_sampled("a", available=5)
    fact.memory_sampled.sample.ClearField("ram_total_bytes")
    await stub.ReportOnce(telemetry_service_pb2.ReportOnceRequest(identity=identity(), observations=observations(fact)))
    assert cluster.state.sequence == 1


async def test_facts_a_probe_gave_up_leave_a_hole_and_no_error(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster
) -> None:
    call, _ = await begun(stub, identity())
    await say(call, [*observations(memory_sampled("a")), *observations(memory_sampled("a"), first=7)])
    assert await acknowledged(call) == 7
    assert cluster.state.sequence == 2


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (telemetry_service_pb2.ReportRequest(), "identity needs a node_id and a boot_id"),
        (telemetry_service_pb2.ReportRequest(identity=identity("a", "")), "identity needs a node_id and a boot_id"),
        (telemetry_service_pb2.ReportRequest(identity=identity("a/b")), "neither with a '/'"),
        (
            telemetry_service_pb2.ReportRequest(identity=identity(), observations=observations(memory_sampled("a"))),
            "send the identity alone first",
        ),
    ],
)
async def test_a_stream_begins_with_who_speaks(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub,
    first: telemetry_service_pb2.ReportRequest,
    message: str,
) -> None:
    call = rpc.keep_status(stub.Report())
    await call.write(first)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    code, details = await failure(call)
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert message in details


async def test_another_boot_of_a_node_that_is_connected_and_heard_is_refused(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster, clock: FakeClock
) -> None:
    call, _ = await begun(stub, identity("a", "first"))
    clock.advance(2.9)
    intruder = rpc.keep_status(stub.Report())
    await intruder.write(telemetry_service_pb2.ReportRequest(identity=identity("a", "second")))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await intruder.read()
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "connected and alive as boot first" in str(refused.value.details())
    assert rpc.error_reason(refused.value) == "NODE_ALREADY_LIVE"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ReportOnce(telemetry_service_pb2.ReportOnceRequest(identity=identity("a", "second")))
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    await say(call, observations(memory_sampled("a")))
    assert await acknowledged(call) == 1


async def test_another_boot_takes_over_from_one_that_is_connected_and_silent(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster, clock: FakeClock
) -> None:
    old, _ = await begun(stub, identity("a", "first"))
    clock.advance(3.0)
    new, _ = await begun(stub, identity("a", "second"))
    with pytest.raises(grpc.aio.AioRpcError):
        await old.read()
    assert await old.code() == grpc.StatusCode.UNAVAILABLE
    await say(new, observations(memory_sampled("a")))
    assert await acknowledged(new) == 1
    assert list(cluster.state.nodes) == ["a"]


async def test_another_boot_takes_over_from_one_that_has_hung_up(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub,
) -> None:
    old, _ = await begun(stub, identity("a", "first"))
    old.cancel()
    async with asyncio.timeout(60):
        while True:
            new = rpc.keep_status(stub.Report())
            await new.write(telemetry_service_pb2.ReportRequest(identity=identity("a", "second")))
            try:
                assert await acknowledged(new) == 0
            except grpc.aio.AioRpcError as error:
                assert error.code() == grpc.StatusCode.ALREADY_EXISTS  # noqa: PT017 - until the server has noticed
                await asyncio.sleep(0.01)
            else:
                return


async def test_streams_end_when_the_master_stops(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster
) -> None:
    call, _ = await begun(stub, identity())
    cluster.stop_streams()
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
    assert await call.code() == grpc.StatusCode.UNAVAILABLE


async def test_a_thousand_nodes_are_heard_at_once(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster
) -> None:
    node_ids = [f"n{number:04}" for number in range(1000)]
    calls: list[Call] = []
    for first in range(0, 1000, 100):  # gRPC lets no call wait for more than 30 s to be taken up.
        begins = [begun(stub, identity(node_id)) for node_id in node_ids[first : first + 100]]
        calls += [call for call, _ in await asyncio.gather(*begins)]
    for first in (1, 2):
        for call, node_id in zip(calls, node_ids, strict=True):
            await say(call, observations(memory_sampled(node_id, available=first), first=first))
        assert set(await asyncio.gather(*map(acknowledged, calls))) == {first}
    assert sorted(cluster.state.nodes) == node_ids
    assert cluster.state.sequence == 2000
    assert cluster.silent_node_ids() == frozenset()
    for call in calls:
        call.cancel()


async def test_a_node_that_floods_is_slowed_down_and_holds_up_nobody(
    stub: telemetry_service_pb2_grpc.TelemetryServiceAsyncStub, cluster: Cluster, clock: FakeClock
) -> None:
    flood, _ = await begun(stub, identity("flood"))
    quiet, _ = await begun(stub, identity("quiet"))
    told: list[int] = []

    async def pour() -> None:
        for first in range(1, 40_001, 1000):
            await say(flood, observations(*[memory_sampled("flood")] * 1000, first=first))
            told.append(first)

    assert isinstance(cluster.log, EventLog)
    disk = threading.Event()
    blocked = cluster.log.do(lambda _: disk.wait(60))
    pouring = asyncio.create_task(pour())
    written = -1
    while written != len(told):  # Until what it writes goes nowhere any more.
        written = len(told)
        await asyncio.sleep(0.5)
    # What waits for the disk, one that was read, and what gRPC keeps on the way.
    assert written <= BATCHES_IN_FLIGHT_MAX + 5
    clock.advance(cluster.bounds.suspect_after_seconds)
    await say(quiet, observations(memory_sampled("quiet")))
    async with asyncio.timeout(60):
        while cluster.liveness("quiet") != state_pb2.LIVENESS_LIVE:  # noqa: ASYNC110 - being heard tells nobody
            await asyncio.sleep(0.01)
    disk.set()
    assert blocked.result(60)
    assert await acknowledged(quiet) == 1
    (of_quiet,) = (row.sequence for row in cluster.log.read(1, cluster.log.head()) if row.source == "probe/quiet/1")
    # Its one fact went in with what was waiting, not behind all that the other had to say.
    assert of_quiet <= 1000 * (BATCHES_IN_FLIGHT_MAX + 5)
    await pouring
    while await acknowledged(flood) < 40_000:
        pass
    assert cluster.state.sequence == 40_001


def test_bytes_that_are_no_fact_are_named_by_their_place() -> None:
    whole = memory_sampled("a").SerializeToString()
    said = [
        telemetry_service_pb2.UnopenedObservation(source_sequence=number, fact=payload)
        for number, payload in enumerate([whole, whole[:-1], whole], start=7)
    ]
    with pytest.raises(errors.InvalidRequest, match="observation 8: its bytes are no fact"):
        checked("a", said, 0)
    assert checked("a", said[:1], 0).payloads == (whole,)
