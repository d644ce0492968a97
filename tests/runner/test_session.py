"""The runner's side of the session, against a master that says what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services import rpc
from services.clock import SystemClock
from services.runner.outbox import Outbox
from services.runner.reconcile import Key
from services.runner.session import SILENCE_SECONDS, Session
from tests.runner.told import until
from ullage.v1 import dispatch_service_pb2, dispatch_service_pb2_grpc, event_pb2, node_pb2


class JumpingClock(SystemClock):
    """The machine's clock, which a test can push forward."""

    ahead_seconds = 0.0
    sleeps = 0
    """How often somebody waited by it."""

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_seconds

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        await super().sleep(seconds)


class ScriptedMaster(dispatch_service_pb2_grpc.DispatchServiceServicer):
    """Says what the script of each connection holds, and notes what it hears."""

    def __init__(self, *scripts: list[dispatch_service_pb2.SessionResponse]) -> None:
        self.scripts = list(scripts)
        self.heard: list[list[dispatch_service_pb2.SessionRequest]] = []

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[dispatch_service_pb2.SessionResponse]:
        heard: list[dispatch_service_pb2.SessionRequest] = []
        self.heard.append(heard)
        heard.append(await anext(aiter(request_iterator)))
        for response in self.scripts.pop(0) if self.scripts else []:
            yield response
        async for request in request_iterator:
            heard.append(request)  # noqa: PERF401 - what was heard is looked at while more comes

    async def CheckConnectivity(
        self, request: dispatch_service_pb2.CheckConnectivityRequest, context: Any
    ) -> dispatch_service_pb2.CheckConnectivityResponse:
        return dispatch_service_pb2.CheckConnectivityResponse()

    def sequences(self, connection: int) -> list[int]:
        """What facts were heard on a connection, by number."""
        if connection >= len(self.heard):
            return []
        reports = (request.report for request in self.heard[connection][1:])
        return [observation.source_sequence for report in reports for observation in report.observations]


@dataclass
class Bench:
    session: Session
    outbox: Outbox
    clock: JumpingClock
    assigned: list[list[Key]] = field(default_factory=list)
    dialled: list[str] = field(default_factory=list)


async def run_session(master: ScriptedMaster) -> AsyncIterator[Bench]:
    server = rpc.Server()
    add = dispatch_service_pb2_grpc.add_DispatchServiceServicer_to_server
    server.add("ullage.v1.DispatchService", add, master)
    port = await server.start("127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        outbox, clock = Outbox(), JumpingClock()
        profile = node_pb2.RunnerProfile(node_id="n1", boot_id="b1", address="127.0.0.1:1")
        assigned: list[list[Key]] = []
        dialled: list[str] = []
        session = Session(
            channel,
            lambda: profile,
            outbox,
            lambda wanted, _: assigned.append(sorted(wanted)),
            lambda peer: dialled.append(peer.node_id),
            lambda overdrawn: None,
            clock,
        )
        running = asyncio.create_task(session.run())
        yield Bench(session, outbox, clock, assigned, dialled)
        running.cancel()
        await asyncio.wait([running])
    await server.stop(0)


def assignment(instance_id: str) -> dispatch_service_pb2.Assignment:
    return dispatch_service_pb2.Assignment(instance_id=instance_id)


def complete(*instance_ids: str, acknowledged: int = 1) -> dispatch_service_pb2.SessionResponse:
    assignments = [assignment(instance_id) for instance_id in instance_ids]
    return dispatch_service_pb2.SessionResponse(
        acknowledged_source_sequence=acknowledged,
        complete=dispatch_service_pb2.AssignmentSet(version=1, assignments=assignments),
    )


def change(applies_to: int, assign: str, remove: str) -> dispatch_service_pb2.SessionResponse:
    return dispatch_service_pb2.SessionResponse(
        incremental=dispatch_service_pb2.AssignmentChange(
            applies_to_version=applies_to,
            results_in_version=applies_to + 1,
            assign=[assignment(assign)],
            remove=[dispatch_service_pb2.ShardRef(instance_id=remove)],
        )
    )


def generation(number: int) -> event_pb2.Fact:
    return event_pb2.Fact(generation_started=event_pb2.GenerationStarted(generation_id=str(number)))


Served = Callable[[ScriptedMaster], Any]


@pytest.fixture
async def serve() -> AsyncIterator[Served]:
    """Starts a session with a scripted master; both end with the test."""
    running: list[AsyncIterator[Bench]] = []

    async def start(master: ScriptedMaster) -> Bench:
        running.append(run_session(master))
        return await anext(running[-1])

    yield start
    for bench in running:
        await anext(bench, None)


async def test_everything_and_then_changes_are_handed_on_in_order(serve: Served) -> None:
    bench = await serve(ScriptedMaster([complete("a", "b"), change(1, "c", "a"), change(2, "d", "b")]))
    await until(lambda: len(bench.assigned) == 3)

    assert bench.assigned == [[("a", 0), ("b", 0)], [("b", 0), ("c", 0)], [("c", 0), ("d", 0)]]


async def test_a_change_of_another_version_ends_the_session_and_the_next_begins_with_everything(
    serve: Served,
) -> None:
    bench = await serve(ScriptedMaster([complete("a"), change(7, "x", "a")], [complete("b")]))
    await until(lambda: len(bench.assigned) == 2)

    assert bench.assigned == [[("a", 0)], [("b", 0)]]


async def test_facts_wait_for_the_first_response_and_what_it_acknowledges_is_left_out(serve: Served) -> None:
    master = ScriptedMaster([complete("a")], [complete("a", acknowledged=2)])
    bench = await serve(master)
    for number in range(3):
        bench.outbox.add(generation(number))
    await until(lambda: master.sequences(0) == [2, 3, 4])
    # Ten seconds without a word: the connection is given up.
    bench.clock.ahead_seconds = SILENCE_SECONDS
    await until(lambda: master.sequences(1) == [3, 4])

    assert [request.WhichOneof("message") for request in master.heard[1]][:2] == ["hello", "report"]


async def test_a_runner_with_nothing_to_tell_is_heard_every_second(serve: Served) -> None:
    master = ScriptedMaster([complete()])
    await serve(master)
    await until(lambda: len(master.heard) > 0 and len(master.heard[0]) >= 3)

    assert all(len(request.report.observations) == 0 for request in master.heard[0][1:])


async def test_peers_are_dialled_when_the_master_says_so(serve: Served) -> None:
    dial = dispatch_service_pb2.DialRequest(peers=[dispatch_service_pb2.Peer(node_id="n2", address="n2:1")])
    bench = await serve(ScriptedMaster([complete(), dispatch_service_pb2.SessionResponse(dial=dial)]))
    await until(lambda: bench.dialled == ["n2"])


async def test_a_master_that_is_not_there_yet_is_dialled_until_it_is(short_folder: Path) -> None:
    # No port, which another could take until then.
    address = f"unix:{short_folder / 'master'}"
    outbox, clock = Outbox(), JumpingClock()
    master = ScriptedMaster([complete()])
    server = rpc.Server()
    server.add("ullage.v1.DispatchService", dispatch_service_pb2_grpc.add_DispatchServiceServicer_to_server, master)
    async with rpc.channel(address) as channel:
        session = Session(
            channel, node_pb2.RunnerProfile, outbox, lambda _w, _r: None, lambda _: None, lambda _: None, clock
        )
        running = asyncio.create_task(session.run())
        await until(lambda: clock.sleeps >= 2)
        assert not session.connected
        await server.start(address)
        await until(lambda: session.connected)
        running.cancel()
        await asyncio.wait([running])
    await server.stop(0)
