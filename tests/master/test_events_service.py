"""How the log and the state are read, over a real gRPC server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from services import rpc
from services.master import subscription as subscriptions
from services.master.allocator import RULES_VERSION, place
from services.master.cluster import Cluster, attached, opened
from services.master.event_log import EventLog
from services.master.servicers.events import EventServicer, add_to_server
from services.master.view import state_hash
from tests.clocks import FakeClock
from tests.master.facts import (
    GIB,
    instance_placed,
    instance_released,
    memory_sampled,
    model_registered,
    node_announced,
    node_removed,
    observations,
    runner_announced,
    shard_status,
)
from ullage.v1 import event_pb2, event_service_pb2, event_service_pb2_grpc, model_pb2, node_pb2, state_pb2

Stub: TypeAlias = "event_service_pb2_grpc.EventServiceAsyncStub"
FollowCall: TypeAlias = "grpc.aio.UnaryStreamCall[event_service_pb2.FollowRequest, event_service_pb2.FollowResponse]"


@asynccontextmanager
async def served(cluster: Cluster) -> AsyncIterator[Stub]:
    server = rpc.Server()
    server.add("ullage.v1.EventService", add_to_server, EventServicer(cluster))
    port = await server.start("127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield event_service_pb2_grpc.EventServiceStub(channel)
    await server.stop(0)


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[Stub]:
    async with served(cluster) as stub:
        yield stub


async def followed(
    call: AsyncIterable[event_service_pb2.FollowResponse],
    until: Callable[[event_service_pb2.FollowResponse], bool] = lambda response: response.caught_up,
) -> list[event_pb2.RecordedEvent]:
    """The events that come up to a response that satisfies `until`."""
    events: list[event_pb2.RecordedEvent] = []
    async for response in call:
        events += response.events
        if until(response):
            return events
    pytest.fail("the stream ended")


def sequences(events: list[event_pb2.RecordedEvent]) -> list[int]:
    return [event.sequence for event in events]


async def test_a_follower_gets_what_is_stored_and_then_what_comes(stub: Stub, cluster: Cluster) -> None:
    await cluster.append(*[memory_sampled("a")] * 3000)
    call = stub.Follow(event_service_pb2.FollowRequest(from_sequence=2))
    assert sequences(await followed(call)) == list(range(2, 3001))
    await cluster.append(node_removed("a"))
    (event,) = await followed(call, lambda response: len(response.events) > 0)
    assert event.sequence == 3001
    assert event.fact == node_removed("a")
    assert event.source == "master"
    assert event.recorded_at.ToNanoseconds() == cluster.clock.now_ns()
    call.cancel()


async def test_a_follower_from_now_gets_only_what_comes(stub: Stub, cluster: Cluster) -> None:
    await cluster.append(memory_sampled("a"))
    call = stub.Follow(event_service_pb2.FollowRequest())
    assert await followed(call) == []
    await cluster.append(memory_sampled("b"))
    assert sequences(await followed(call)) == [2]
    call.cancel()


async def test_a_follower_from_a_time_begins_with_the_first_event_since(
    stub: Stub, cluster: Cluster, clock: FakeClock
) -> None:
    for _ in range(3):
        await cluster.append(memory_sampled("a"))
        clock.advance(1.0)
    since = Timestamp()
    since.FromNanoseconds(clock.now_ns() - 2_500_000_000)
    call = stub.Follow(event_service_pb2.FollowRequest(from_time=since))
    assert sequences(await followed(call)) == [2, 3]
    call.cancel()


async def test_live_events_go_out_together_in_batches_of_64_at_most(stub: Stub, cluster: Cluster) -> None:
    call = stub.Follow(event_service_pb2.FollowRequest())
    await followed(call)
    assert isinstance(cluster.log, EventLog)
    disk = threading.Event()
    blocked = cluster.log.do(lambda _: disk.wait(60))
    appends = [asyncio.create_task(cluster.append(memory_sampled("a"))) for _ in range(150)]
    await asyncio.sleep(0)  # All of them wait for the disk now, so they are stored together.
    disk.set()
    await asyncio.gather(asyncio.wrap_future(blocked), *appends)
    sizes: list[int] = []
    while sum(sizes) < 150:
        response = await anext(aiter(call))
        sizes.append(len(response.events))
    assert sizes == [64, 64, 22]
    call.cancel()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (event_service_pb2.EventFilter(), [1, 2, 3, 4, 5, 6]),
        (event_service_pb2.EventFilter(kinds=["memory_sampled", "instance_placed"]), [1, 3, 4]),
        (event_service_pb2.EventFilter(node_ids=["b"]), [3, 4, 5]),
        (event_service_pb2.EventFilter(instance_ids=["i"]), [4, 5, 6]),
        (event_service_pb2.EventFilter(kinds=["instance_released"], node_ids=["a"]), []),
        (event_service_pb2.EventFilter(kinds=["shard_status_changed"], node_ids=["b"], instance_ids=["i"]), [5]),
    ],
)
async def test_a_filter_lets_through_what_it_names(
    stub: Stub, cluster: Cluster, chosen: event_service_pb2.EventFilter, expected: list[int]
) -> None:
    facts = [
        memory_sampled("a"),
        model_registered(),
        memory_sampled("b"),
        instance_placed("i", node_ids=["b"]),
        shard_status(model_pb2.SHARD_PHASE_RUNNING, "i", node_id="b"),
        instance_released("i"),
    ]
    live = stub.Follow(event_service_pb2.FollowRequest(filter=chosen))
    await followed(live)
    await cluster.append(*facts)
    stored = stub.Follow(event_service_pb2.FollowRequest(from_sequence=1, filter=chosen))
    assert sequences(await followed(stored)) == expected
    assert sequences(await followed(live, lambda response: response.progress_sequence == 6)) == expected
    listed = await stub.ListEvents(event_service_pb2.ListEventsRequest(filter=chosen))
    assert sequences(list(listed.events)) == expected
    live.cancel()
    stored.cancel()


async def test_a_reader_that_does_not_read_is_cut_off_and_burdens_nobody(stub: Stub, cluster: Cluster) -> None:
    follow = event_service_pb2.FollowRequest(from_now=True)
    idle, other = stub.Follow(follow), stub.Follow(follow)
    last, seen = 0, 0
    await read_one(idle)
    await read_one(other)
    while last < 2 * subscriptions.SUBSCRIPTION_EVENTS_MAX:
        last = await cluster.append(*[memory_sampled("a")] * 4096)
        while seen < last:
            seen = (await read_one(other)).progress_sequence
    reached: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError) as cut_off:
        await read_on(idle, reached)
    assert cut_off.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rpc.error_reason(cut_off.value) == "SUBSCRIBER_TOO_SLOW"
    # All it had been sent it could still read; from there it may go on.
    assert f"follow again from sequence {reached[-1] + 1}" in str(cut_off.value.details())
    other.cancel()


async def read_on(call: FollowCall, reached: list[int]) -> None:
    while True:
        reached.append((await read_one(call)).progress_sequence)


async def read_one(call: FollowCall) -> event_service_pb2.FollowResponse:
    response = await call.read()
    assert isinstance(response, event_service_pb2.FollowResponse)
    return response


async def test_large_facts_go_out_in_messages_that_every_client_reads(stub: Stub, cluster: Cluster) -> None:
    for number in range(4):
        await cluster.append(node_announced("a", str(number), "x" * (2 << 20)))
    sizes, seen = [], []
    async for response in stub.Follow(event_service_pb2.FollowRequest(from_sequence=1)):
        sizes.append(response.ByteSize())
        seen += [event.sequence for event in response.events]
        if response.caught_up:
            break
    assert seen == [1, 2, 3, 4]
    assert max(sizes) < 4 << 20
    request, listed = event_service_pb2.ListEventsRequest(), []
    while True:
        page = await stub.ListEvents(request)
        assert page.ByteSize() < 4 << 20
        listed += [event.sequence for event in page.events]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert listed == [1, 2, 3, 4]


async def test_the_state_at_a_time_is_told_though_the_clock_was_set_back(
    stub: Stub, cluster: Cluster, clock: FakeClock
) -> None:
    for seconds in (0, 3600, -3590):
        clock.set_wall(clock.now_ns() + seconds * 1_000_000_000)
        await cluster.append(memory_sampled("a"))
    at = Timestamp()
    at.FromNanoseconds(clock.now_ns() + 1)
    answer = await stub.GetState(event_service_pb2.GetStateRequest(at_time=at))
    assert answer.state.sequence == 3
    at.FromNanoseconds(clock.now_ns() - 1)
    assert (await stub.GetState(event_service_pb2.GetStateRequest(at_time=at))).state.sequence == 1


async def test_any_moment_there_is_can_be_asked_for_and_no_other(stub: Stub, cluster: Cluster) -> None:
    await cluster.append(memory_sampled("a"))
    year_1, year_9999 = Timestamp(seconds=-62_135_596_800), Timestamp(seconds=253_402_300_799)
    for at, expected in ((year_1, 0), (year_9999, 1)):
        assert (await stub.GetState(event_service_pb2.GetStateRequest(at_time=at))).state.sequence == expected
    for wrong in (Timestamp(seconds=2**62), Timestamp(nanos=-1)):
        with pytest.raises(grpc.aio.AioRpcError, match="at_time is no moment") as refused:
            await stub.GetState(event_service_pb2.GetStateRequest(at_time=wrong))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="from_time is no moment"):
            await stub.Follow(event_service_pb2.FollowRequest(from_time=wrong)).read()


async def test_an_unknown_kind_in_a_filter_is_refused_with_those_there_are(stub: Stub) -> None:
    chosen = event_service_pb2.EventFilter(kinds=["memory_sample"])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ListEvents(event_service_pb2.ListEventsRequest(filter=chosen))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "no kind of event is called memory_sample: there are master_started" in str(refused.value.details())


async def test_a_reader_whose_filter_lets_nothing_through_is_told_how_far_it_is(stub: Stub, cluster: Cluster) -> None:
    chosen = event_service_pb2.EventFilter(kinds=["node_removed"])
    call = stub.Follow(event_service_pb2.FollowRequest(filter=chosen))
    await followed(call)
    await cluster.append(memory_sampled("a"))
    assert await followed(call, lambda response: response.progress_sequence == 1) == []
    call.cancel()


async def test_a_follower_goes_on_where_it_was_after_a_restart(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster, served(cluster) as stub:
        await cluster.append(memory_sampled("a"), memory_sampled("a"))
        call = stub.Follow(event_service_pb2.FollowRequest(from_sequence=1))
        seen = sequences(await followed(call))
        cluster.stop_streams()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await followed(call)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    async with opened(log_path, clock) as cluster, served(cluster) as stub:
        await cluster.append(memory_sampled("b"))
        call = stub.Follow(event_service_pb2.FollowRequest(from_sequence=seen[-1] + 1))
        seen += sequences(await followed(call))
        call.cancel()
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("descending", [False, True])
async def test_pages_of_events_join_without_a_gap_or_a_double(
    stub: Stub, cluster: Cluster, *, descending: bool
) -> None:
    await cluster.append(*[memory_sampled("a")] * 2500)
    seen: list[int] = []
    request = event_service_pb2.ListEventsRequest(
        page_size=700, from_sequence=3, to_sequence=2400, descending=descending
    )
    while True:
        page = await stub.ListEvents(request)
        seen += sequences(list(page.events))
        assert len(page.events) <= 700
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    expected = list(range(3, 2401))
    assert seen == (expected[::-1] if descending else expected)


@pytest.mark.parametrize("token", ["!", "nonsense", "aWQ="])
async def test_a_token_of_no_page_is_refused(stub: Stub, token: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ListEvents(event_service_pb2.ListEventsRequest(page_token=token))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "leave it empty" in str(refused.value.details())


async def test_a_page_larger_than_a_thousand_is_refused(stub: Stub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ListEvents(event_service_pb2.ListEventsRequest(page_size=1001))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_state_is_shown_as_it_was_at_any_sequence(stub: Stub, cluster: Cluster) -> None:
    hashes = [state_hash(cluster.state)]
    for fact in (memory_sampled("a", available=1), memory_sampled("a", available=2), node_removed("a")):
        await cluster.append(fact)
        hashes.append(state_hash(cluster.state))
    answers = [await stub.GetState(event_service_pb2.GetStateRequest(at_sequence=sequence)) for sequence in range(4)]
    assert [answer.state_hash for answer in answers] == hashes
    assert [answer.state.sequence for answer in answers] == [0, 1, 2, 3]
    assert [[node.memory.ram_available_bytes for node in answer.state.nodes] for answer in answers] == [
        [],
        [1],
        [2],
        [],
    ]
    assert {answer.head_sequence for answer in answers} == {3}


async def test_liveness_is_shown_now_and_never_then(stub: Stub, cluster: Cluster, clock: FakeClock) -> None:
    await cluster.append(memory_sampled("a"))
    cluster.hear("a")
    now = await stub.GetState(event_service_pb2.GetStateRequest())
    then = await stub.GetState(event_service_pb2.GetStateRequest(at_sequence=1))
    assert now.state.nodes[0].liveness == state_pb2.LIVENESS_LIVE
    assert not then.state.nodes[0].HasField("liveness")
    assert now.state_hash == then.state_hash


async def test_a_sequence_beyond_the_end_is_out_of_range(stub: Stub, cluster: Cluster) -> None:
    await cluster.append(memory_sampled("a"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.GetState(event_service_pb2.GetStateRequest(at_sequence=2))
    assert refused.value.code() == grpc.StatusCode.OUT_OF_RANGE
    assert "the log ends at 1" in str(refused.value.details())


async def test_a_node_is_removed_once_it_is_silent_and_empty(stub: Stub, cluster: Cluster, clock: FakeClock) -> None:
    await cluster.append(model_registered(), memory_sampled("a"), instance_placed("i", node_ids=["a"]))
    cluster.hear("a")
    request = event_service_pb2.RemoveNodeRequest(node_id="a", requested_by="me")
    for first, code, words in (
        (None, grpc.StatusCode.FAILED_PRECONDITION, "holds shards of i: release them first"),
        (instance_released("i"), grpc.StatusCode.FAILED_PRECONDITION, "is live and would be back"),
    ):
        await cluster.append(*([first] if first else []))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.RemoveNode(request)
        assert refused.value.code() == code
        assert words in str(refused.value.details())
    clock.advance(3.0)
    await stub.RemoveNode(request)
    assert cluster.state.nodes == {}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.RemoveNode(request)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_decision_is_made_again_from_the_state_it_was_made_on(stub: Stub, cluster: Cluster) -> None:
    runner = runner_announced("a")
    runner.runner_announced.profile.weight_form = node_pb2.WEIGHT_FORM_AS_STORED
    runner.runner_announced.profile.compute_element_bytes = 2
    runner.runner_announced.profile.model_ids.append("m")
    await cluster.append(node_announced("a"), memory_sampled("a", available=8 * GIB), runner, model_registered())
    spec = model_pb2.PlacementSpec(model_id="m")
    outcome = place(cluster.state, spec, [])
    assert isinstance(outcome, model_pb2.Placement)
    placed = event_pb2.InstancePlaced(instance_id="i", spec=spec, placement=outcome, rules_version=RULES_VERSION)
    await cluster.append(event_pb2.Fact(instance_placed=placed), memory_sampled("a", available=GIB))
    explained = await stub.ExplainPlacement(event_service_pb2.ExplainPlacementRequest(instance_id="i"))
    assert explained.recorded == outcome
    assert explained.derived == outcome
    assert explained.equal
    assert explained.recorded_rules_version == explained.derived_rules_version == RULES_VERSION
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.ExplainPlacement(event_service_pb2.ExplainPlacementRequest(instance_id="none"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_decision_that_would_be_made_otherwise_now_is_shown_beside_the_recorded_one(
    stub: Stub, cluster: Cluster
) -> None:
    await cluster.append(model_registered(), instance_placed("i"))
    explained = await stub.ExplainPlacement(event_service_pb2.ExplainPlacementRequest(instance_id="i"))
    assert not explained.equal
    assert not explained.HasField("derived")
    assert not explained.HasField("recorded_rules_version")
    assert len(explained.recorded.shards) == 1


async def test_a_read_only_master_answers_and_writes_nothing(log_path: Path, clock: FakeClock) -> None:
    async with opened(log_path, clock) as cluster:
        await cluster.record("probe/a/1", observations(memory_sampled("a"), memory_sampled("a")))
        before = state_hash(cluster.state)
    async with attached(log_path, clock, read_only=True) as cluster, served(cluster) as stub:
        await cluster.replay()
        answer = await stub.GetState(event_service_pb2.GetStateRequest())
        assert answer.state_hash == before
        assert not answer.state.nodes[0].HasField("liveness")
        listed = await stub.ListEvents(event_service_pb2.ListEventsRequest(descending=True))
        assert [(event.sequence, event.source) for event in listed.events] == [(2, "probe/a/1"), (1, "probe/a/1")]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.RemoveNode(event_service_pb2.RemoveNodeRequest(node_id="a"))
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "this master only reads a log" in str(refused.value.details())
