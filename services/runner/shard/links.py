"""The two streams of a rank: to the next one, and from the one before.

Both sides of a stream say something at least once a second, whatever else they do, because gRPC's own
keepalive never notices a peer that is stopped. Who has been silent for SILENCE_SECONDS_MAX is lost, and so
is one whose stream broke: there is no second try once the shard is connected, since the caches behind the
stream are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Final, TypeAlias

import grpc
from google.rpc import error_details_pb2

from services import rpc
from services.clock import Clock
from services.rpc import RpcError
from services.runner.shard import frames
from services.runner.shard.frames import rank_name
from services.runner.shard.life import Life
from ullage.v1 import dispatch_service_pb2, model_pb2, runner_service_pb2, runner_service_pb2_grpc

HEARTBEAT_SECONDS: Final = 1.0
SILENCE_SECONDS_MAX: Final = 3.0
CONNECT_SECONDS_MAX: Final = 60.0
"""How long a neighbour is dialled, or waited for: its process may still be starting."""
HELLO_SECONDS_MAX: Final = 5.0
"""How long a stream may take to be accepted, or to say who it is."""
FRAMES_WAITING_MAX: Final = 4
"""Activations that may wait for the stream, or for the model: more would only hold memory."""

INSTANCE_KEY: Final = "ullage-instance"
RANK_KEY: Final = "ullage-rank"
RANK_LOST: Final = "RANK_LOST"

ForwardRequest = runner_service_pb2.ForwardRequest
ForwardResponse = runner_service_pb2.ForwardResponse
_Call: TypeAlias = grpc.aio.StreamStreamCall[ForwardRequest, ForwardResponse]


class LinkError(Exception):
    """A neighbour is lost or cannot be reached. str() says which, and how that was seen."""

    def __init__(self, message: str, blamed_rank: int) -> None:
        super().__init__(message)
        self.blamed_rank = blamed_rank


class Downstream:
    """The stream this rank opens to the next."""

    def __init__(
        self, assignment: dispatch_service_pb2.Assignment, clock: Clock, steps_done: Callable[[], int]
    ) -> None:
        """`steps_done` tells how many steps this rank has finished, for the heartbeats."""
        self._assignment = assignment
        self._clock = clock
        self._steps_done = steps_done
        self.rank = (assignment.rank + 1) % len(assignment.peers)
        self._address = next(peer.address for peer in assignment.peers if peer.rank == self.rank)
        self._channel = rpc.channel(self._address)
        self._call: _Call | None = None
        self._outgoing: asyncio.Queue[ForwardRequest] = asyncio.Queue()
        self._room = asyncio.Semaphore(FRAMES_WAITING_MAX)
        self._is_given_up = False
        self._heard_at = 0.0
        self.steps_done_there = 0
        self.loaded_there = asyncio.Event()
        """That rank, and all after it up to the last, have loaded."""

    async def connect(self) -> None:
        """Open the stream, trying again while the other side starts.

        Raises LinkError when it is refused, or after CONNECT_SECONDS_MAX.
        """
        deadline = self._clock.monotonic() + CONNECT_SECONDS_MAX
        for wait in rpc.backoff_seconds(0.1, 1.0):
            try:
                self._call = await self._dialled()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError) as error:
                self._check_worth_retrying(error, deadline - wait)
            else:
                self._heard_at = self._clock.monotonic()
                return
            await self._clock.sleep(wait)

    async def _dialled(self) -> _Call:
        metadata = ((INSTANCE_KEY, self._assignment.instance_id), (RANK_KEY, str(self.rank)))
        stub = runner_service_pb2_grpc.RunnerServiceStub(self._channel)
        call = rpc.keep_status(stub.Forward(metadata=metadata))
        try:
            async with asyncio.timeout(HELLO_SECONDS_MAX):
                await call.write(frames.hello(self._assignment, self.rank))
                if await call.read() is grpc.aio.EOF:
                    raise asyncio.InvalidStateError("the stream was closed before it was accepted")
        except BaseException:
            call.cancel()
            raise
        return call

    def _check_worth_retrying(self, error: Exception, last_try_at: float) -> None:
        refused = isinstance(error, grpc.aio.AioRpcError) and error.code() in {
            grpc.StatusCode.FAILED_PRECONDITION,
            grpc.StatusCode.INVALID_ARGUMENT,
        }
        if refused or self._clock.monotonic() >= last_try_at:
            raise LinkError(
                f"{rank_name(self._assignment, self._assignment.rank)} cannot reach "
                f"{rank_name(self._assignment, self.rank)} at {self._address}: {_said(error)}",
                self.rank,
            ) from error

    async def send(self, frame: ForwardRequest) -> None:
        """Hand an activation to the stream; waits while FRAMES_WAITING_MAX others have not left."""
        await self._room.acquire()
        if self._is_given_up:
            # Each lets the next one go.
            self._room.release()
        else:
            self._outgoing.put_nowait(frame)

    def send_now(self, frame: ForwardRequest) -> None:
        """Hand a small frame to the stream without waiting; it leaves after those before it.

        For frames that cannot pile up: as many tokens and ends as there are sequences, and heartbeats.
        """
        self._outgoing.put_nowait(frame)

    def give_up(self, last_word: ForwardRequest) -> None:
        """Drop every activation from now on, and let those go who wait to send one; `last_word` is still sent."""
        self._is_given_up = True
        self._room.release()
        self.send_now(last_word)

    async def run(self) -> None:
        """Keep the stream alive until it is lost, then raise LinkError."""
        await together(self._write(), self._read(), self._beat(), self._listen_for_silence())

    async def _write(self) -> None:
        call = self._open_call()
        while True:
            frame = await self._outgoing.get()
            try:
                await call.write(frame)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reader learns why.
                return
            if frame.HasField("activation") or frame.HasField("batch"):
                self._room.release()

    async def _read(self) -> None:
        call = self._open_call()
        try:
            while isinstance(response := await call.read(), ForwardResponse):
                self._heard_at = self._clock.monotonic()
                self.steps_done_there = response.heartbeat.steps_done
                if response.heartbeat.loaded:
                    self.loaded_there.set()
        except grpc.aio.AioRpcError as error:
            raise self._lost(error) from error
        raise LinkError(f"{rank_name(self._assignment, self.rank)} closed its stream", self.rank)

    def _lost(self, error: grpc.aio.AioRpcError) -> LinkError:
        info = rpc.error_detail(error, error_details_pb2.ErrorInfo)
        if info is not None and info.reason == RANK_LOST:
            # It tells which rank it lost itself.
            return _blamed_there(self._assignment, self.rank, int(info.metadata["rank"]), error.details() or "")
        return LinkError(f"{rank_name(self._assignment, self.rank)} broke its stream: {_said(error)}", self.rank)

    async def _beat(self) -> None:
        while True:
            if self._outgoing.empty():
                self.send_now(ForwardRequest(heartbeat=runner_service_pb2.Heartbeat(steps_done=self._steps_done())))
            await self._clock.sleep(HEARTBEAT_SECONDS)

    async def _listen_for_silence(self) -> None:
        await _silence(self._clock, lambda: self._heard_at)
        raise LinkError(_silent(self._assignment, self.rank), self.rank)

    def _open_call(self) -> _Call:
        assert self._call is not None  # noqa: S101 - run() comes after connect()
        return self._call

    async def close(self) -> None:
        """End the stream and let the channel go."""
        if self._call is not None:
            self._call.cancel()
        await self._channel.close()


class Upstream:
    """The stream the rank before this one opens."""

    def __init__(
        self,
        assignment: dispatch_service_pb2.Assignment,
        clock: Clock,
        life: Life,
        steps_done: Callable[[], int],
        take: Callable[[ForwardRequest], Awaitable[None]],
    ) -> None:
        """`take` gets each frame with content; it raises RpcError for one it does not believe."""
        self._assignment = assignment
        self._clock = clock
        self._life = life
        self._steps_done = steps_done
        self._take = take
        self.rank = (assignment.rank - 1) % len(assignment.peers)
        self._is_open = False
        self._connected = asyncio.Event()
        self._failed = asyncio.Event()
        life.on_failure(self._failed.set)
        self._over = asyncio.Event()
        self._lost: LinkError | None = None
        self._waiting_since: float | None = None
        self.steps_done_there = 0
        self.loaded_here = asyncio.Event()
        """This rank, and all after it up to the last, have loaded: told to the other side."""

    async def connected(self) -> None:
        """Return when the other side has come. Raises LinkError after CONNECT_SECONDS_MAX."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                await self._connected.wait()
        except TimeoutError as error:
            here = next(peer.address for peer in self._assignment.peers if peer.rank == self._assignment.rank)
            raise LinkError(
                f"{rank_name(self._assignment, self.rank)} has not reached "
                f"{rank_name(self._assignment, self._assignment.rank)} at {here} within {CONNECT_SECONDS_MAX:.0f} s",
                self.rank,
            ) from error

    async def run(self) -> None:
        """Return never: raise LinkError when the stream is lost or silent."""
        await together(self._listen_for_silence(), self._listen_for_end())

    async def _listen_for_silence(self) -> None:
        await _silence(self._clock, lambda: self._waiting_since)
        raise LinkError(_silent(self._assignment, self.rank), self.rank)

    async def _listen_for_end(self) -> None:
        await self._over.wait()
        if self._lost is not None:
            raise self._lost

    async def receive(self, requests: AsyncIterable[ForwardRequest]) -> AsyncIterator[ForwardResponse]:
        """Serve the stream: heartbeats, for as long as frames come. Raises RpcError when it is refused or over."""
        if self._is_open:
            raise _unavailable(f"{rank_name(self._assignment, self.rank)} is connected already")
        self._is_open = True
        reader: asyncio.Task[None] | None = None
        try:
            incoming = aiter(requests)
            await self._greet(incoming)
            reader = asyncio.create_task(self._read(incoming))
            news = {asyncio.create_task(each.wait()) for each in (self._failed, self.loaded_here)}
            while not reader.done():
                yield self._heartbeat()
                pending = {each for each in news if not each.done()}
                await asyncio.wait({reader, *pending}, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                self._check_alive()
            reader.result()
        finally:
            self._is_open = False
            if reader is not None:
                for task in {reader, *news}:
                    task.cancel()
                self._end(reader)

    def _heartbeat(self) -> ForwardResponse:
        loaded = self.loaded_here.is_set()
        return ForwardResponse(heartbeat=runner_service_pb2.Heartbeat(steps_done=self._steps_done(), loaded=loaded))

    async def _greet(self, incoming: AsyncIterator[ForwardRequest]) -> None:
        try:
            async with asyncio.timeout(HELLO_SECONDS_MAX):
                first = await anext(incoming, None)
        except TimeoutError:
            first = None
        frames.check_hello(first or ForwardRequest(), self._assignment)
        self._waiting_since = self._clock.monotonic()
        self._connected.set()

    async def _read(self, incoming: AsyncIterator[ForwardRequest]) -> None:
        async for frame in incoming:
            # Not waiting while the model is busy with this one: that silence is ours.
            self._waiting_since = None
            match frame.WhichOneof("frame"):
                case "heartbeat":
                    self.steps_done_there = frame.heartbeat.steps_done
                case "lost":
                    raise _blamed_there(self._assignment, self.rank, frame.lost.rank, frame.lost.message)
                case _:
                    await self._take(frame)
            self._waiting_since = self._clock.monotonic()

    def _check_alive(self) -> None:
        if self._life.has_failed:
            rank, message = blame(self._life, self._assignment)
            raise RpcError(grpc.StatusCode.UNAVAILABLE, message, reason=RANK_LOST, metadata={"rank": str(rank)})

    def _end(self, reader: asyncio.Task[None]) -> None:
        """Decide what the end of the stream means. Called once the reader is done or about to be."""
        self._waiting_since = None
        if self._life.phase <= model_pb2.SHARD_PHASE_CONNECTING:
            # Nothing was computed yet: the other side may come again.
            self._connected.clear()
        else:
            self._lost = self._lost or self._why(reader)
            self._over.set()

    def _why(self, reader: asyncio.Task[None]) -> LinkError:
        name = rank_name(self._assignment, self.rank)
        error = None if not reader.done() or reader.cancelled() else reader.exception()
        match error:
            case LinkError():
                return error
            case RpcError():
                return LinkError(f"{name} sent what cannot be: {error.message}", self.rank)
            case _:
                return LinkError(f"{name} broke its stream", self.rank)


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run `works` side by side until all are done; the first that fails ends the others, and is what fails."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def blame(life: Life, assignment: dispatch_service_pb2.Assignment) -> tuple[int, str]:
    """The rank at fault for this shard's failure, and the failure as the others shall tell it."""
    if life.failure.HasField("blamed_rank"):
        return life.failure.blamed_rank, life.failure.message
    return assignment.rank, f"{rank_name(assignment, assignment.rank)} failed: {life.failure.message}"


def _blamed_there(
    assignment: dispatch_service_pb2.Assignment, neighbour: int, blamed_rank: int, message: str
) -> LinkError:
    """What a neighbour that gave up says of it. Where it blames this rank, which lives, the way between is broken."""
    if blamed_rank != assignment.rank:
        return LinkError(message, blamed_rank)
    return LinkError(f"{rank_name(assignment, neighbour)} gave up, since there {message}", neighbour)


async def _silence(clock: Clock, since: Callable[[], float | None]) -> None:
    """Return once what `since` tells, when not None, has stayed the same for SILENCE_SECONDS_MAX.

    Counted in looks, not by the clock: who was stopped, or did not get a processor, blames nobody for what it
    did not hear meanwhile.
    """
    look_seconds, silent_seconds, seen = HEARTBEAT_SECONDS / 4, 0.0, since()
    while silent_seconds <= SILENCE_SECONDS_MAX:
        await clock.sleep(look_seconds)
        now = since()
        silent_seconds = silent_seconds + look_seconds if now is not None and now == seen else 0.0
        seen = now


def _silent(assignment: dispatch_service_pb2.Assignment, rank: int) -> str:
    return f"{rank_name(assignment, rank)} has been silent for {SILENCE_SECONDS_MAX:.0f} s"


def _said(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return "it does not answer" if isinstance(error, TimeoutError) else str(error)


def _unavailable(message: str) -> RpcError:
    return RpcError(grpc.StatusCode.UNAVAILABLE, message, reason="RANK_BUSY")
