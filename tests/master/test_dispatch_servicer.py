"""DispatchService over real gRPC, with a real log and a clock of our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from services import rpc
from services.master.cluster import Cluster, opened
from services.master.event_log import EventLog
from services.master.liveness import DEFAULT_RUNNER_BOUNDS, RunnerBounds
from services.master.servicers.dispatch import DispatchServicer
from tests.clocks import FakeClock
from ullage.v1 import (
    dispatch_service_pb2,
    dispatch_service_pb2_grpc,
    event_pb2,
    model_pb2,
    node_pb2,
    telemetry_service_pb2,
)

WAIT_SECONDS = 60.0


class Talk:
    """One connection as a runner has it, by hand."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def read(self) -> dispatch_service_pb2.SessionResponse:
        async with asyncio.timeout(WAIT_SECONDS):
            response = await self.call.read()
        assert isinstance(response, dispatch_service_pb2.SessionResponse)
        return response

    async def read_message(self, name: str) -> Any:
        """The next response that says `name`; acknowledgements and other messages before it are left out."""
        while True:
            response = await self.read()
            if response.WhichOneof("message") == name:
                return getattr(response, name)

    async def acknowledged(self, source_sequence: int) -> None:
        """Read until so much is acknowledged."""
        while (await self.read()).acknowledged_source_sequence < source_sequence:
            pass

    async def told_to_dial(self, *node_ids: str) -> None:
        """Read until it was told to dial all of these, by one message or by several."""
        left = set(node_ids)
        while left:
            left -= {peer.node_id for peer in (await self.read_message("dial")).peers}

    async def report(self, *numbered: tuple[int, event_pb2.Fact]) -> None:
        observations = [telemetry_service_pb2.Observation(source_sequence=n, fact=fact) for n, fact in numbered]
        report = dispatch_service_pb2.SessionReport(observations=observations)
        await self.call.write(dispatch_service_pb2.SessionRequest(report=report))

    async def error(self) -> grpc.aio.AioRpcError:
        """What the stream ends with; what comes before is left out."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.acknowledged(2**63)
        return caught.value


@dataclass
class Bench:
    """A served cluster, and runners' connections to it."""

    cluster: Cluster
    clock: FakeClock
    stub: Any

    async def connect(self, node_id: str, boot_id: str = "b1", **profile: Any) -> Talk:
        call = rpc.keep_status(self.stub.Session())
        hello = dispatch_service_pb2.SessionHello(
            profile=node_pb2.RunnerProfile(node_id=node_id, boot_id=boot_id, address=f"{node_id}:1", **profile)
        )
        await call.write(dispatch_service_pb2.SessionRequest(hello=hello))
        return Talk(call)

    async def place(self, instance_id: str, *node_ids: str) -> None:
        shards = [model_pb2.Shard(rank=rank, node_id=node_id) for rank, node_id in enumerate(node_ids)]
        placed = event_pb2.InstancePlaced(instance_id=instance_id, placement=model_pb2.Placement(shards=shards))
        await self.cluster.append(event_pb2.Fact(instance_placed=placed))

    async def release(self, instance_id: str) -> None:
        released = event_pb2.InstanceReleased(instance_id=instance_id)
        await self.cluster.append(event_pb2.Fact(instance_released=released))

    async def pass_seconds(self, seconds: int) -> None:
        """Let time pass as it does: little by little, and each time with all that comes of it."""
        for _ in range(2 * seconds):
            self.clock.advance(0.5)
            await self.settled()

    async def settled(self) -> None:
        """Return when the servicer has done what it does now: streams that were ended are, and facts are stored."""
        with pytest.raises(grpc.aio.AioRpcError):
            await self.stub.CheckConnectivity(dispatch_service_pb2.CheckConnectivityRequest(node_ids=["nobody"]))
        assert isinstance(self.cluster.log, EventLog)
        await asyncio.wrap_future(self.cluster.log.do(lambda _: None))

    async def hang_up(self, talk: Talk, node_id: str) -> None:
        """End the connection of the node's runner, and return when the master has noticed."""
        talk.call.cancel()
        async with asyncio.timeout(WAIT_SECONDS):
            while not self.cluster.is_silent(node_id):  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.01)

    async def failure(self, instance_id: str) -> str:
        """Why the instance fails, once it does."""
        async with asyncio.timeout(WAIT_SECONDS):
            while not self.cluster.state.instances[instance_id].failure:  # noqa: ASYNC110 - the state tells nobody
                await asyncio.sleep(0.01)
        return self.cluster.state.instances[instance_id].failure


@asynccontextmanager
async def served(log_path: Path, bounds: RunnerBounds = DEFAULT_RUNNER_BOUNDS) -> AsyncIterator[Bench]:
    clock = FakeClock()
    async with opened(log_path, clock) as cluster:
        servicer = DispatchServicer(cluster, bounds, clock=clock)
        server = rpc.Server()
        server.add(
            "ullage.v1.DispatchService",
            dispatch_service_pb2_grpc.add_DispatchServiceServicer_to_server,
            servicer,
        )
        port = await server.start("127.0.0.1:0")
        running = asyncio.create_task(servicer.run())
        async with rpc.channel(f"127.0.0.1:{port}") as channel:
            yield Bench(cluster, clock, dispatch_service_pb2_grpc.DispatchServiceStub(channel))
        cluster.stop_streams()
        await running
        await server.stop(0)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with served(tmp_path / "events.db") as bench:
        yield bench


def status(instance_id: str, rank: int, node_id: str, phase: model_pb2.ShardPhase.ValueType) -> event_pb2.Fact:
    shard = model_pb2.ShardStatus(instance_id=instance_id, rank=rank, node_id=node_id, phase=phase)
    return event_pb2.Fact(shard_status_changed=event_pb2.ShardStatusChanged(status=shard))


async def test_a_hello_is_recorded_and_answered_with_everything_there_is_to_run(bench: Bench) -> None:
    await bench.place("i1", "n1", "n2")
    first = await (await bench.connect("n1", device="cpu")).read()

    assert first.acknowledged_source_sequence == 1
    assert first.complete.version == 1
    assert [(a.instance_id, a.rank) for a in first.complete.assignments] == [("i1", 0)]
    runner = bench.cluster.state.nodes["n1"].runner
    assert runner is not None
    assert runner.device == "cpu"


async def test_changes_follow_each_on_the_version_before(bench: Bench) -> None:
    talk = await bench.connect("n1")
    await talk.read_message("complete")
    await bench.place("i1", "n1")
    first = await talk.read_message("incremental")
    await bench.release("i1")
    second = await talk.read_message("incremental")

    assert (first.applies_to_version, first.results_in_version) == (1, 2)
    assert [(a.instance_id, a.rank) for a in first.assign] == [("i1", 0)]
    assert (second.applies_to_version, second.results_in_version) == (2, 3)
    assert [(ref.instance_id, ref.rank) for ref in second.remove] == [("i1", 0)]


async def test_a_shard_that_fails_on_one_node_is_taken_from_the_others(bench: Bench) -> None:
    first, second = await bench.connect("n1"), await bench.connect("n2")
    await second.read_message("complete")
    await bench.place("i1", "n1", "n2")
    assert (await second.read_message("incremental")).assign[0].rank == 1
    await first.report((2, status("i1", 0, "n1", model_pb2.SHARD_PHASE_FAILED)))

    assert [ref.rank for ref in (await second.read_message("incremental")).remove] == [1]


async def test_what_is_acknowledged_is_durable_and_stored_once(bench: Bench) -> None:
    await bench.place("i1", "n1")
    talk = await bench.connect("n1")
    starting = (2, status("i1", 0, "n1", model_pb2.SHARD_PHASE_STARTING))
    loading = (3, status("i1", 0, "n1", model_pb2.SHARD_PHASE_LOADING))
    await talk.report(starting)
    await talk.report(starting, loading)
    await talk.acknowledged(3)

    stored = [row for row in bench.cluster.log.read(1, 100) if row.source == "runner/n1/b1"]
    assert [row.source_sequence for row in stored] == [1, 2, 3]
    assert bench.cluster.state.nodes["n1"].shards["i1", 0].status.phase == model_pb2.SHARD_PHASE_LOADING


async def test_every_report_is_answered_so_that_the_runner_hears_the_master(bench: Bench) -> None:
    talk = await bench.connect("n1")
    await talk.read_message("complete")
    await talk.report()

    assert (await talk.read()).WhichOneof("message") is None


async def test_another_boot_is_refused_while_the_first_is_heard(bench: Bench) -> None:
    await (await bench.connect("n1", "b1")).read()
    error = await (await bench.connect("n1", "b2")).error()

    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert "b1" in (error.details() or "")


async def test_another_boot_takes_over_from_one_that_is_silent(bench: Bench) -> None:
    first = await bench.connect("n1", "b1")
    await first.read()
    bench.clock.advance(10.0)
    second = await bench.connect("n1", "b2")

    assert (await second.read()).HasField("complete")
    assert (await first.error()).code() == grpc.StatusCode.UNAVAILABLE


async def test_another_boot_has_none_of_the_shards_of_the_last_one(bench: Bench) -> None:
    await bench.place("i1", "n1")
    first = await bench.connect("n1", "b1")
    assert len((await first.read_message("complete")).assignments) == 1
    first.call.cancel()
    bench.clock.advance(10.0)

    second = await bench.connect("n1", "b2")

    assert len((await second.read_message("complete")).assignments) == 0
    assert await bench.failure("i1") == "rank 0 on n1 failed while ASSIGNED: its runner was restarted"


async def test_the_same_boot_takes_its_place_over_from_a_connection_that_hangs(bench: Bench) -> None:
    first = await bench.connect("n1", "b1")
    await first.read()
    second = await bench.connect("n1", "b1")

    assert (await second.read()).HasField("complete")
    assert (await first.error()).code() == grpc.StatusCode.UNAVAILABLE


async def test_a_session_without_a_word_for_ten_seconds_is_ended(bench: Bench) -> None:
    talk = await bench.connect("n1")
    await talk.read()
    await bench.pass_seconds(11)

    assert (await talk.error()).details() == "nothing was heard for 10 s: dial again"


async def running_shard(bench: Bench) -> Talk:
    """A connected runner that runs i1."""
    talk = await bench.connect("n1")
    await talk.read()
    await bench.place("i1", "n1")
    await talk.report((2, status("i1", 0, "n1", model_pb2.SHARD_PHASE_RUNNING)))
    await talk.acknowledged(2)
    return talk


async def test_a_runner_that_hung_up_and_stays_away_fails_its_shards_within_five_seconds(bench: Bench) -> None:
    talk = await running_shard(bench)
    await bench.hang_up(talk, "n1")
    await bench.pass_seconds(3)
    assert bench.cluster.state.instances["i1"].failure == ""

    await bench.pass_seconds(2)

    assert await bench.failure("i1") == "rank 0 on n1 failed while RUNNING: its runner has not been heard for 4 s"


async def test_a_runner_that_is_only_silent_has_longer_since_nobody_knows_why(bench: Bench) -> None:
    await running_shard(bench)
    await bench.pass_seconds(14)
    assert bench.cluster.state.instances["i1"].failure == ""

    await bench.pass_seconds(2)

    assert await bench.failure("i1") == "rank 0 on n1 failed while RUNNING: its runner has not been heard for 15 s"


async def test_a_runner_that_is_silent_while_its_nodes_probe_speaks_fails_its_shards_within_five_seconds(
    bench: Bench,
) -> None:
    await running_shard(bench)
    for _ in range(3):
        bench.cluster.hear("n1")
        await bench.pass_seconds(1)
    assert bench.cluster.state.instances["i1"].failure == ""

    bench.cluster.hear("n1")
    await bench.pass_seconds(2)

    assert await bench.failure("i1") == "rank 0 on n1 failed while RUNNING: its runner has not been heard for 4 s"


async def test_a_runner_is_not_blamed_before_its_node_would_be(tmp_path: Path) -> None:
    async with served(tmp_path / "events.db", RunnerBounds(stalled_after_seconds=900.5)) as bench:
        await running_shard(bench)
        for _ in range(9):
            bench.cluster.hear("n1")
            await bench.pass_seconds(1)
        assert bench.cluster.state.instances["i1"].failure == ""


async def test_what_a_lost_runner_was_to_unload_is_given_up_too(bench: Bench) -> None:
    talk = await running_shard(bench)
    await bench.release("i1")
    assert bench.cluster.state.instances["i1"].state == model_pb2.INSTANCE_STATE_RELEASING
    await bench.hang_up(talk, "n1")
    await bench.pass_seconds(6)

    assert bench.cluster.state.instances["i1"].state == model_pb2.INSTANCE_STATE_RELEASED
    assert bench.cluster.state.nodes["n1"].shards == {}


async def test_a_node_whose_runner_has_no_session_is_silent_whatever_its_probe_says(bench: Bench) -> None:
    talk = await bench.connect("n1")
    await talk.read()
    assert bench.cluster.silent_node_ids() == frozenset()

    await bench.hang_up(talk, "n1")
    bench.cluster.hear("n1")

    assert bench.cluster.silent_node_ids() == {"n1"}


async def test_every_runner_of_an_instance_hears_which_rank_is_over_its_promise_and_when_no_more(bench: Bench) -> None:
    first, second = await bench.connect("n1"), await bench.connect("n2")
    await bench.place("i1", "n1", "n2")
    over = status("i1", 1, "n2", model_pb2.SHARD_PHASE_RUNNING)
    over.shard_status_changed.status.over_grant_bytes = 7
    await second.report((2, over))

    told = await first.read_message("overdrawn")
    assert [(each.instance_id, each.rank, each.over_grant_bytes) for each in told.shards] == [("i1", 1, 7)]

    await second.report((3, status("i1", 1, "n2", model_pb2.SHARD_PHASE_RUNNING)))
    assert (await first.read_message("overdrawn")).shards == []


async def test_after_a_restart_a_runner_has_the_whole_bound_to_come_back_and_is_told_the_same(tmp_path: Path) -> None:
    async with served(tmp_path / "events.db") as before:
        talk = await before.connect("n1")
        await before.place("i1", "n1")
        await talk.report((2, status("i1", 0, "n1", model_pb2.SHARD_PHASE_RUNNING)))
        await talk.acknowledged(2)

    async with served(tmp_path / "events.db") as after:
        await after.pass_seconds(14)
        first = await (await after.connect("n1")).read()
        await after.pass_seconds(5)

        assert first.acknowledged_source_sequence == 2
        assert [(a.instance_id, a.rank) for a in first.complete.assignments] == [("i1", 0)]
        assert after.cluster.state.instances["i1"].state == model_pb2.INSTANCE_STATE_RUNNING
        announcements = [row for row in after.cluster.log.read(1, 100) if row.kind == 18]
        assert len(announcements) == 1


async def test_a_shard_that_a_connected_runner_does_not_take_up_fails(bench: Bench) -> None:
    talk = await bench.connect("n1")
    await bench.place("i1", "n1")
    for _ in range(32):
        await talk.report()
        await bench.pass_seconds(1)

    assert await bench.failure("i1") == (
        "rank 0 on n1 failed while ASSIGNED: its runner is connected and did not take it up for 30 s: "
        "start the runner again"
    )


@pytest.mark.parametrize(
    ("fact", "message"),
    [
        (event_pb2.Fact(node_lost=event_pb2.NodeLost(node_id="n1")), "a runner does not report node_lost"),
        (
            status("i1", 0, "n2", model_pb2.SHARD_PHASE_RUNNING),
            "the runner of node n1 reports shard_status_changed of node n2",
        ),
        (event_pb2.Fact(), "a runner does not report None"),
    ],
)
async def test_a_fact_that_is_not_the_runners_to_report_ends_the_session(
    bench: Bench, fact: event_pb2.Fact, message: str
) -> None:
    talk = await bench.connect("n1")
    await talk.report((2, fact))
    error = await talk.error()

    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, message)


async def test_a_session_begins_with_a_hello_that_says_who_it_is(bench: Bench) -> None:
    error = await (await bench.connect("")).error()

    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_status_of_an_instance_nobody_knows_is_accepted(bench: Bench) -> None:
    talk = await bench.connect("n1")
    await talk.report((2, status("gone", 0, "n1", model_pb2.SHARD_PHASE_UNLOADED)))

    await talk.acknowledged(2)


async def test_the_matrix_names_every_pair_and_why_one_does_not_reach_the_other(bench: Bench) -> None:
    first, second = await bench.connect("n1"), await bench.connect("n2")
    await second.read()
    third = await bench.connect("n3")
    await third.read()
    await bench.hang_up(third, "n3")
    await first.told_to_dial("n2", "n3")
    await second.told_to_dial("n1", "n3")
    checking = asyncio.ensure_future(bench.stub.CheckConnectivity(dispatch_service_pb2.CheckConnectivityRequest()))
    for number, (talk, node_id, other) in enumerate([(first, "n1", "n2"), (second, "n2", "n1")]):
        while [peer.node_id for peer in (await talk.read_message("dial")).peers] != [other, "n3"]:
            pass
        links = [
            node_pb2.Link(from_node_id=node_id, to_node_id=other, reachable=number == 0, failure="refused" * number),
            node_pb2.Link(from_node_id=node_id, to_node_id="n3", failure="refused"),
        ]
        facts = [event_pb2.Fact(link_measured=event_pb2.LinkMeasured(link=link)) for link in links]
        await talk.report(*enumerate(facts, start=2))

    answer = await checking
    assert [(link.from_node_id, link.to_node_id, link.reachable) for link in answer.links] == [
        ("n1", "n2", True),
        ("n1", "n3", False),
        ("n2", "n1", False),
        ("n2", "n3", False),
        ("n3", "n1", False),
        ("n3", "n2", False),
    ]
    assert answer.links[4].failure.startswith("its runner is not connected to the master")


async def test_connectivity_of_a_node_nobody_knows_is_not_found(bench: Bench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.CheckConnectivity(dispatch_service_pb2.CheckConnectivityRequest(node_ids=["n9"]))

    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_newcomer_and_the_others_are_told_to_dial_each_other(bench: Bench) -> None:
    first = await bench.connect("n1")
    await first.read()
    second = await bench.connect("n2")

    assert [peer.node_id for peer in (await second.read_message("dial")).peers] == ["n1"]
    assert [peer.address for peer in (await first.read_message("dial")).peers] == ["n2:1"]
