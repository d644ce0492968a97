"""What the probe says to the master: a stream of facts that survives a master that is away.

Rules this module lives by:
- The identity goes first and alone; the answer says what of this boot is durable already.
- One batch is under way at a time, and the next one goes when the master has made it durable. What gathers
  meanwhile makes the next batch, so a slow master gets larger ones.
- A fact is kept until it is acknowledged, and sent again only if the master, asked anew, does not have it.
- A master that is away is dialled for ever. An outage is logged when it begins and when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Final, TypeAlias, TypeVar

import grpc
import structlog

from services import rpc
from services.clock import Clock
from services.probe.fact_buffer import FactBuffer
from ullage.v1 import event_pb2, node_pb2, telemetry_service_pb2, telemetry_service_pb2_grpc

BATCH_FACTS_MAX: Final = 256
"""Some 60 KiB: large enough for a commit to be worth it, small enough to be answered soon."""

ANSWER_SECONDS_MAX: Final = 30.0
"""A master that does not answer for so long is dialled again: it hangs, or is another one behind the address."""

WAIT_SECONDS_MAX: Final = 0.5
"""The longest wait between two attempts. While nobody listens they end at once: it is the channel that dials,
every 2 s at the longest, and this is how soon its success is used."""

REFUSED_WAIT_SECONDS: Final = 5.0
"""Between attempts when the master refuses: nothing changes until a person acts."""

_REFUSALS: Final = frozenset(
    {grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
)
"""Two nodes with one id, a fact no node may say, a disk that is full."""

_Call: TypeAlias = (
    "grpc.aio.StreamStreamCall[telemetry_service_pb2.ReportRequest, telemetry_service_pb2.ReportResponse]"
)

T = TypeVar("T")

log = structlog.get_logger()


class _StreamEndedError(Exception):
    """The conversation is over without a status of the master's."""


class Reporter:
    """Takes facts at any time, and says them to the master in order while `run` runs."""

    def __init__(
        self,
        master: str,
        identity: node_pb2.NodeIdentity,
        clock: Clock,
        *,
        buffer: FactBuffer | None = None,
        answer_seconds_max: float = ANSWER_SECONDS_MAX,
    ) -> None:
        """`master` is host:port. The node is announced as the first fact of this boot."""
        self._master = master
        self.identity = identity
        """What the node goes by."""
        self._clock = clock
        self._buffer = FactBuffer() if buffer is None else buffer
        self._answer_seconds_max = answer_seconds_max
        self._gathered = asyncio.Event()
        self._under_way_sequence = 0
        self._complaint: object = "never connected"
        self.connected = False
        self.memory_period_s: float | None = None
        """The period the master wishes for memory samples, None where it has no wish."""
        self._announce()

    @property
    def buffered_facts(self) -> int:
        """Facts that are not durable yet."""
        return len(self._buffer)

    @property
    def dropped_facts(self) -> int:
        """Facts that were given up: there was no room, or the master refused them."""
        return self._buffer.dropped_facts

    def rename(self, name: str) -> None:
        """Announce the node anew where it has gone by another name."""
        if not name or name == self.identity.friendly_name:
            return
        renamed = node_pb2.NodeIdentity()
        renamed.CopyFrom(self.identity)
        renamed.friendly_name = name
        self.identity = renamed
        self._announce()

    def offer(self, fact: event_pb2.Fact) -> None:
        """Say `fact` as soon as can be. Never waits."""
        self._buffer.add(fact)
        self._gathered.set()

    async def run(self) -> None:
        """Report until cancelled."""
        channel = rpc.channel(self._master)
        stub = telemetry_service_pb2_grpc.TelemetryServiceStub(channel)
        try:
            waits = rpc.backoff_seconds(last=WAIT_SECONDS_MAX)
            while True:
                self.connected = False
                wait = await self._attempt(rpc.keep_status(stub.Report()))
                if self.connected:
                    waits = rpc.backoff_seconds(last=WAIT_SECONDS_MAX)
                self.connected = False
                await self._clock.sleep(next(waits) if wait is None else wait)
        finally:
            await channel.close()

    async def _attempt(self, call: _Call) -> float | None:
        """Converse until it ends; the seconds to wait before the next attempt, None for the usual."""
        self._under_way_sequence = 0
        try:
            await self._converse(call)
        except grpc.aio.AioRpcError as error:
            return self._failed(error)
        except _StreamEndedError as error:
            self._complain("ended", detail=str(error))
        finally:
            call.cancel()
        return None

    async def _converse(self, call: _Call) -> None:
        await self._say(call, telemetry_service_pb2.ReportRequest(identity=self.identity))
        said_before = self._buffer.acknowledged_sequence
        if await self._hear(call) < said_before:
            self._announce()  # Its log is a new one, and does not know this node.
        self.connected = True
        while True:
            batch = self._buffer.oldest(BATCH_FACTS_MAX)
            if not batch:
                # Facts come every period, so this ends; a stream that broke meanwhile shows at the next one.
                self._gathered.clear()
                await self._gathered.wait()
                continue
            self._under_way_sequence = batch[-1].source_sequence
            await self._say(call, telemetry_service_pb2.ReportRequest(observations=batch))
            while await self._hear(call) < self._under_way_sequence:
                pass  # It makes a batch durable in parts if it likes.
            self._under_way_sequence = 0
            self._rejoice()

    async def _say(self, call: _Call, request: telemetry_service_pb2.ReportRequest) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # The call is over: the next read says why.
            await self._bounded(call, call.write(request))

    async def _hear(self, call: _Call) -> int:
        """The next answer's acknowledged sequence, after letting go of what it acknowledges."""
        response = await self._bounded(call, call.read())
        if not isinstance(response, telemetry_service_pb2.ReportResponse):
            raise _StreamEndedError("the master ended the stream")
        self._buffer.acknowledge(response.acknowledged_source_sequence)
        if response.HasField("memory_period"):
            self.memory_period_s = response.memory_period.ToTimedelta().total_seconds()
        return response.acknowledged_source_sequence

    async def _bounded(self, call: _Call, step: Awaitable[T]) -> T:
        """What `step` of `call` returns. It is the whole call that is cut off: a step cancelled alone leaks."""
        timer = asyncio.get_running_loop().call_later(self._answer_seconds_max, call.cancel)
        try:
            return await step
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _StreamEndedError(f"the master said nothing for {self._answer_seconds_max:.0f} s") from None
        finally:
            timer.cancel()

    def _announce(self) -> None:
        self.offer(event_pb2.Fact(node_announced=event_pb2.NodeAnnounced(identity=self.identity)))

    def _failed(self, error: grpc.aio.AioRpcError) -> float | None:
        """What a failed call means for the facts and for the next attempt."""
        self._complain(error.code(), detail=error.details())
        if error.code() not in _REFUSALS:
            return None
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT and self._under_way_sequence:
            given_up = self._buffer.give_up(self._under_way_sequence)
            log.error("facts given up: the master refuses them", facts=given_up, detail=error.details())
            return None
        return REFUSED_WAIT_SECONDS

    def _rejoice(self) -> None:
        """Log the end of an outage: facts are taken again. A master may answer and still refuse them."""
        if self._complaint is not None:
            self._complaint = None
            log.info("connected to the master", master=self._master, buffered=self.buffered_facts)

    def _complain(self, cause: object, detail: str | None) -> None:
        """Log the beginning of an outage, and a new cause of it; not every attempt."""
        if cause == self._complaint:
            return
        self._complaint = cause
        write = log.error if cause in _REFUSALS else log.warning
        name = cause.name if isinstance(cause, grpc.StatusCode) else cause
        write("not connected to the master", master=self._master, cause=name, detail=detail)
