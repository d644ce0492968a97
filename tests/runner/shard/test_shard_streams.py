"""A shard's process against neighbours and a runner that do not behave."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from services import rpc
from services.runner.shard import frames
from tests.runner.shard import tiny_weights
from tests.runner.shard.ring import ENDLESS_TOKENS, Child, assignments, child, children, generate_request, running
from tests.runner.told import WAIT_SECONDS
from ullage.v1 import (
    dispatch_service_pb2,
    model_pb2,
    runner_service_pb2,
    runner_service_pb2_grpc,
)

ForwardRequest = runner_service_pb2.ForwardRequest
ForwardResponse = runner_service_pb2.ForwardResponse


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, model_pb2.Model]:
    folder = tiny_weights.write(tmp_path_factory.mktemp("models") / "tiny")
    return folder, tiny_weights.prepared(folder)


class FakeFirstRank(runner_service_pb2_grpc.RunnerServiceServicer):
    """Rank 0 of two, played by a test: takes tokens, and says what it is told to."""

    def __init__(self) -> None:
        self.tokens: asyncio.Queue[runner_service_pb2.SampledToken] = asyncio.Queue()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        raise AssertionError("nobody asks a test for text")
        yield

    async def GetStatus(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks a test how it is")

    async def Forward(self, request_iterator: AsyncIterator[ForwardRequest], context: Any) -> AsyncIterator[Any]:
        yield ForwardResponse(heartbeat=runner_service_pb2.Heartbeat())
        beat = asyncio.create_task(self.take(request_iterator))
        while not beat.done():
            await asyncio.wait([beat], timeout=1.0)
            yield ForwardResponse(heartbeat=runner_service_pb2.Heartbeat())

    async def take(self, request_iterator: AsyncIterator[ForwardRequest]) -> None:
        async for frame in request_iterator:
            if frame.HasField("token"):
                self.tokens.put_nowait(frame.token)


class Played:
    """The last rank of two, running, with a stream from the test as its first rank."""

    def __init__(self, last: Child, first: FakeFirstRank, call: Any) -> None:
        self.last = last
        self.first = first
        self.call = call
        self._silent = asyncio.Event()
        self._beat = asyncio.create_task(beating(call, self._silent))

    async def fall_silent(self) -> None:
        """Send no more heartbeats, and have none under way."""
        # Cancelled in the middle of a write, the task would cancel the call with it.
        self._silent.set()
        await self._beat

    async def refusal(self, frame: ForwardRequest) -> tuple[grpc.StatusCode, str]:
        """How the stream ends after `frame`."""
        # A write that meets the end of the stream hides how that came.
        await self.fall_silent()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.call.write(frame)
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code(), await self.call.details()


@asynccontextmanager
async def played(folder: Path, model: model_pb2.Model) -> AsyncIterator[Played]:
    first, server = FakeFirstRank(), rpc.Server()
    server.add("ullage.v1.RunnerService", runner_service_pb2_grpc.add_RunnerServiceServicer_to_server, first)
    with tempfile.TemporaryDirectory(prefix="ullage-") as sockets:
        await server.start(f"unix:{sockets}/first")
        try:
            async with child(Path(sockets), 1) as last:
                ours, theirs = assignments(model, [f"unix:{sockets}/first", last.address], (2,))
                loading = asyncio.create_task(last.load(theirs, folder))
                call = await greeted(last, ours)
                ring = Played(last, first, call)
                assert (await loading)[-1].phase == model_pb2.SHARD_PHASE_RUNNING
                yield ring
                await ring.fall_silent()
                call.cancel()
        finally:
            await server.stop(0)


async def beating(call: Any, silent: asyncio.Event) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while not silent.is_set():
            await call.write(ForwardRequest(heartbeat=runner_service_pb2.Heartbeat()))
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await silent.wait()


async def greeted(last: Child, ours: dispatch_service_pb2.Assignment) -> Any:
    """A stream that was accepted; asked for again until the process knows its shard."""
    while True:
        call = rpc.keep_status(last.runner.Forward())
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(frames.hello(ours, 1))
            await call.read()
            return call
        await asyncio.sleep(0.05)


def activation(**changes: Any) -> ForwardRequest:
    values = {
        "generation_id": "g1",
        "tokens": 1,
        "hidden_size": 64,
        "element_type": runner_service_pb2.ELEMENT_TYPE_FLOAT32,
        "data": bytes(4 * 64),
        "sample": True,
    }
    return ForwardRequest(activation=runner_service_pb2.Activation(**{**values, **changes}))


async def test_a_frame_of_the_wrong_length_ends_the_stream_and_blames_its_sender(
    tiny: tuple[Path, model_pb2.Model],
) -> None:
    async with played(*tiny) as ring:
        await ring.call.write(activation())
        async with asyncio.timeout(WAIT_SECONDS):
            assert (await ring.first.tokens.get()).position == 1
        code, message = await ring.refusal(activation(position=1, data=bytes(4 * 64 - 1)))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert message == "255 bytes for 1 x 64 elements: 256 expected"
        failure = (await ring.last.failed()).failure
        assert failure.blamed_rank == 0
        assert failure.message.startswith("rank 0 on node n0 sent what cannot be: 255 bytes")


async def test_a_stranger_on_the_stream_disturbs_nobody(tiny: tuple[Path, model_pb2.Model]) -> None:
    async with played(*tiny) as ring:
        stranger = rpc.keep_status(ring.last.runner.Forward())
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stranger.write(activation())
        assert await stranger.code() == grpc.StatusCode.UNAVAILABLE
        await ring.call.write(activation())
        async with asyncio.timeout(WAIT_SECONDS):
            assert (await ring.first.tokens.get()).generation_id == "g1"


async def test_a_first_rank_that_falls_silent_is_lost(tiny: tuple[Path, model_pb2.Model]) -> None:
    async with played(*tiny) as ring:
        await ring.fall_silent()
        failure = (await ring.last.failed()).failure
        assert failure.message == "rank 0 on node n0 has been silent for 3 s"


async def test_a_rank_that_told_why_it_failed_is_not_blamed_itself(tiny: tuple[Path, model_pb2.Model]) -> None:
    async with played(*tiny) as ring:
        lost = runner_service_pb2.RankLost(rank=7, message="rank 7 on node n7 is gone")
        await ring.call.write(ForwardRequest(lost=lost))
        failure = (await ring.last.failed()).failure
        assert (failure.blamed_rank, failure.message) == (7, "rank 7 on node n7 is gone")


async def test_a_rank_other_than_the_first_names_the_one_to_ask(tiny: tuple[Path, model_pb2.Model]) -> None:
    async with played(*tiny) as ring:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in ring.last.runner.Generate(generate_request(tokens=[1])):
                pass
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "ask the first rank, on node n0 at unix:" in (caught.value.details() or "")


async def test_the_process_ends_with_its_stdin() -> None:
    async with children(1) as (alone,):
        stdin = alone.process.stdin
        assert stdin is not None
        stdin.close()
        async with asyncio.timeout(WAIT_SECONDS):
            assert await alone.process.wait() == 0


async def test_sigterm_ends_a_process_that_is_computing(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    async with running(folder, model, context_tokens=ENDLESS_TOKENS) as ring:
        call = ring.children[0].runner.Generate(generate_request(tokens=[1, 2, 3]))
        await anext(aiter(call))
        ring.children[0].process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_SECONDS):
            assert await ring.children[0].process.wait() == 0


async def test_a_second_assignment_is_refused(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    async with running(folder, model) as ring:
        (again,) = assignments(model, [ring.children[0].address], ())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ring.children[0].load(again, folder)
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_an_assignment_that_is_no_shard_is_refused(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    async with children(1) as (alone,):
        (wrong,) = assignments(model, [alone.address], ())
        wrong.shard.end_layer = 99
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await alone.load(wrong, folder)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "layers [0, 99) of 5 are no shard"
