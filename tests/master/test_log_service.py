"""How the log is looked after over gRPC, and what its readers are told once samples have gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from services import rpc
from services.master.cluster import Cluster, attached
from services.master.event_log import EventLog
from services.master.keeper import Keeper
from services.master.log_check import check_file
from services.master.retention import Policy
from services.master.servicers.events import EventServicer, add_to_server
from services.master.servicers.log import LogServicer
from tests.clocks import FakeClock
from tests.master import given_nodes
from tests.master.facts import GIB, MIB, memory_sampled
from ullage.v1 import event_pb2, event_service_pb2, event_service_pb2_grpc, log_service_pb2, log_service_pb2_grpc


class Stubs(NamedTuple):
    log: log_service_pb2_grpc.LogServiceAsyncStub
    events: event_service_pb2_grpc.EventServiceAsyncStub


@asynccontextmanager
async def served(cluster: Cluster, path: Path) -> AsyncIterator[Stubs]:
    log = cluster.log
    keeper = Keeper(cluster, log, Policy()) if isinstance(log, EventLog) else None
    server = rpc.Server()
    server.add(
        "ullage.v1.LogService",
        log_service_pb2_grpc.add_LogServiceServicer_to_server,
        LogServicer(cluster, keeper, Policy(), path),
    )
    server.add("ullage.v1.EventService", add_to_server, EventServicer(cluster))
    port = await server.start("127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield Stubs(log_service_pb2_grpc.LogServiceStub(channel), event_service_pb2_grpc.EventServiceStub(channel))
    await server.stop(0)


@pytest.fixture
async def stubs(cluster: Cluster, clock: FakeClock, log_path: Path) -> AsyncIterator[Stubs]:
    """A log of two old nodes whose samples are mostly too old to keep, and one event of now."""
    for node_id in "ab":
        await cluster.append(*given_nodes.facts_of(given_nodes.Node(node_id, 8 * GIB, ram=16 * GIB)))
    shape = given_nodes.model([100 * MIB] * 8)
    await cluster.append(event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=shape)))
    for number in range(20):
        await cluster.append(*[memory_sampled("a", available=number)] * 5)
    clock.advance(30 * 86_400)
    await cluster.append(memory_sampled("b"), memory_sampled("b"))
    async with served(cluster, log_path) as stubs:
        yield stubs


async def test_a_compacted_log_is_smaller_and_sound(stubs: Stubs) -> None:
    before = await stubs.log.GetLog(log_service_pb2.GetLogRequest())
    answer = await stubs.log.CompactLog(log_service_pb2.CompactLogRequest())
    assert answer.removed_events == 99
    assert answer.compacted_sequence == 107
    after = await stubs.log.GetLog(log_service_pb2.GetLogRequest())
    sizes = [{kind.kind: kind.events for kind in size.kinds}["memory_sampled"] for size in (before, after)]
    assert sizes == [104, 5]
    verified = await stubs.log.VerifyLog(log_service_pb2.VerifyLogRequest())
    assert list(verified.findings) == []
    assert verified.ranges == 1


async def test_samples_can_be_kept_for_longer_than_there_is_time(stubs: Stubs) -> None:
    for ever in (2**63, 2**64 - 1):
        request = log_service_pb2.CompactLogRequest(keep_samples_seconds=ever, keep_minutes_seconds=ever)
        assert (await stubs.log.CompactLog(request)).removed_events == 0


async def test_a_reader_from_before_the_mark_is_told_where_to_start(stubs: Stubs) -> None:
    await stubs.log.CompactLog(log_service_pb2.CompactLogRequest())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(stubs.events.Follow(event_service_pb2.FollowRequest(from_sequence=1))))
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert str(refused.value.details()).startswith("compacted: start at 108")
    assert rpc.error_reason(refused.value) == "COMPACTED"
    decisions = event_service_pb2.EventFilter(kinds=["model_registered"])
    for request in (
        event_service_pb2.FollowRequest(from_sequence=1, retained=True),
        event_service_pb2.FollowRequest(from_sequence=1, filter=decisions),
        event_service_pb2.FollowRequest(from_sequence=108),
    ):
        response = await anext(aiter(stubs.events.Follow(request)))
        assert response.events


async def test_the_state_below_the_mark_is_answered_at_the_resolution_that_is_left(stubs: Stubs) -> None:
    await stubs.log.CompactLog(log_service_pb2.CompactLogRequest())
    answer = await stubs.events.GetState(event_service_pb2.GetStateRequest(at_sequence=50))
    assert answer.state.sequence == 50
    assert [node.identity.node_id for node in answer.state.nodes] == ["a", "b"]


async def test_a_copy_of_a_live_log_is_a_whole_log(stubs: Stubs, tmp_path: Path) -> None:
    pieces = [piece.content async for piece in stubs.log.BackUpLog(log_service_pb2.BackUpLogRequest())]
    copy = tmp_path / "copy.db"
    copy.write_bytes(b"".join(pieces))
    report = check_file(copy)
    assert report.findings == []
    assert report.head_sequence == 109


async def test_what_if_decides_on_a_past_state_and_records_nothing(stubs: Stubs, cluster: Cluster) -> None:
    request = event_service_pb2.WhatIfRequest(at_sequence=7, spec=given_nodes.spec())
    answer = await stubs.events.WhatIf(request)
    assert answer.at_sequence == 7
    assert answer.placement.shards[0].end_layer == 8
    request.without_node_ids.extend(["a", "b"])
    assert (await stubs.events.WhatIf(request)).HasField("refusal")
    assert cluster.state.sequence == 109
    assert sorted(cluster.state.nodes) == ["a", "b"]


async def test_what_if_without_a_node_that_was_not_there_is_refused(stubs: Stubs) -> None:
    request = event_service_pb2.WhatIfRequest(at_sequence=7, spec=given_nodes.spec(), without_node_ids=["a", "nope"])
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stubs.events.WhatIf(request)
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND
    assert "'nope'" in (raised.value.details() or "")


async def test_what_if_under_another_rule_for_pressure(cluster: Cluster, log_path: Path) -> None:
    squeezed = given_nodes.Node("b", 8 * GIB, ram=16 * GIB, level=given_nodes.WARNING)
    for node in (given_nodes.Node("a", 8 * GIB, ram=16 * GIB), squeezed):
        await cluster.append(*given_nodes.facts_of(node))
    shape = given_nodes.model([100 * MIB] * 8)
    await cluster.append(event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=shape)))
    async with served(cluster, log_path) as stubs:
        layers = {}
        for factor in (None, 1.0, 0.1):
            spec = given_nodes.spec(min_nodes=2, warning_factor=factor)
            answer = await stubs.events.WhatIf(event_service_pb2.WhatIfRequest(spec=spec))
            layers[factor] = given_nodes.layers_by_node(answer.placement)
            (seen,) = (node for node in answer.placement.nodes if node.node_id == "b")
            assert seen.pressure_factor == pytest.approx(0.6 if factor is None else factor)
    assert layers == {None: {"a": 5, "b": 3}, 1.0: {"a": 4, "b": 4}, 0.1: {"a": 7, "b": 1}}


async def test_a_log_that_is_only_read_is_not_compacted(stubs: Stubs, log_path: Path, clock: FakeClock) -> None:
    async with attached(log_path, clock, read_only=True) as cluster:
        await cluster.replay()
        async with served(cluster, log_path) as reading:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await reading.log.CompactLog(log_service_pb2.CompactLogRequest())
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert (await reading.log.GetLog(log_service_pb2.GetLogRequest())).head_sequence == 109
