"""The runner's side of its session with the master: told what to run, telling how it goes, for ever.

Rules this module lives by:
- What runs goes on running while the master is away. Only the master's word starts or stops a shard.
- A change that does not follow what is known ends the session; the next one begins with everything.
- The master is heard at least once a second, since it answers every report; silence ends the session, because a
  connection to a stopped or unplugged machine looks alive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import grpc
import structlog

from services import rpc
from services.clock import Clock
from services.runner.outbox import Outbox
from services.runner.reconcile import Key
from ullage.v1 import dispatch_service_pb2, dispatch_service_pb2_grpc, node_pb2

REPORT_PERIOD_SECONDS: Final = 1.0
"""How often the runner reports, with nothing to say too: the master counts on hearing it."""

SILENCE_SECONDS: Final = 10.0
"""A master that has not answered for so long is dialled again."""

DIAL_SECONDS_MAX: Final = 2.0
"""Between attempts, however long the master is away: it gives a runner up soon after it is back itself."""

LASTING_SECONDS: Final = 5.0
"""A connection that lasted so long is dialled again at once; one that keeps breaking is not."""

Assignments = Mapping[Key, dispatch_service_pb2.Assignment]

log = structlog.get_logger()


class _OutOfStep(Exception):
    """The master's change does not apply to what is known here."""


class Session:
    """The one session of this runner's boot, over as many connections as it takes."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        profile: Callable[[], node_pb2.RunnerProfile],
        outbox: Outbox,
        assign: Callable[[Assignments, Mapping[Key, str]], None],
        dial: Callable[[dispatch_service_pb2.Peer], None],
        overdrawn: Callable[[dispatch_service_pb2.OverdrawnShards], None],
        clock: Clock,
    ) -> None:
        """`assign` takes everything that shall run, and why what no longer shall does not.

        `dial` has a peer dialled, and is not waited for. `overdrawn` takes the shards, here and elsewhere, whose
        instances shall take no new requests.
        """
        self._stub = dispatch_service_pb2_grpc.DispatchServiceStub(channel)
        self._profile = profile
        self._outbox = outbox
        self._assign = assign
        self._dial = dial
        self._overdrawn = overdrawn
        self._clock = clock
        self._wanted: dict[Key, dispatch_service_pb2.Assignment] = {}
        self._version: int | None = None
        self._heard_at = 0.0
        self._welcomed = asyncio.Event()
        self._failed_with: grpc.StatusCode | None = None

    @property
    def connected(self) -> bool:
        """The master has said what shall run, on the connection there is now."""
        return self._welcomed.is_set()

    async def run(self) -> None:
        """Dial, and dial again, until cancelled."""
        waits = rpc.backoff_seconds(last=DIAL_SECONDS_MAX)
        while True:
            began = self._clock.monotonic()
            try:
                await self._converse()
            except grpc.aio.AioRpcError as error:
                self._note_failure(error)
            except _OutOfStep as error:
                log.warning("session out of step", error=str(error))
            self._welcomed.clear()
            if self._clock.monotonic() - began > LASTING_SECONDS:
                waits = rpc.backoff_seconds(last=DIAL_SECONDS_MAX)
            await self._clock.sleep(next(waits))

    def _note_failure(self, error: grpc.aio.AioRpcError) -> None:
        """Log why the master is not there: once, until it is back or the reason is another one."""
        if error.code() != self._failed_with:
            log.warning("no session with the master", code=error.code().name, details=error.details())
        self._failed_with = error.code()

    async def _converse(self) -> None:
        """One connection, to its end."""
        call: Any = rpc.keep_status(self._stub.Session())
        self._version = None
        self._heard_at = self._clock.monotonic()
        self._outbox.rewind()
        hello = dispatch_service_pb2.SessionHello(profile=self._profile())
        reports = asyncio.create_task(self._report(call, dispatch_service_pb2.SessionRequest(hello=hello)))
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self._take(response)
            log.info("the master ended the session")
        except asyncio.CancelledError:
            # A read of a call that was cancelled here, by `_report`, ends in the same way as a cancelled task.
            if _cancelled():
                raise
            log.warning("the master is silent", seconds=SILENCE_SECONDS)
        finally:
            call.cancel()
            reports.cancel()
            await asyncio.wait([reports])

    async def _report(self, call: Any, hello: dispatch_service_pb2.SessionRequest) -> None:
        """Write the hello, then what there is to tell; whatever ends the call ends this."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            await call.write(hello)
            async with asyncio.timeout(SILENCE_SECONDS):
                # The first response says how far the master has this boot's facts.
                await self._welcomed.wait()
            while self._clock.monotonic() - self._heard_at < SILENCE_SECONDS:
                report = dispatch_service_pb2.SessionReport(observations=self._outbox.batch())
                await call.write(dispatch_service_pb2.SessionRequest(report=report))
                await self._something_to_tell()
        call.cancel()

    async def _something_to_tell(self) -> None:
        """Return when there is, or when it is time to be heard anyway."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_PERIOD_SECONDS):
                await self._outbox.arrived.wait()

    def _take(self, response: dispatch_service_pb2.SessionResponse) -> None:
        self._heard_at = self._clock.monotonic()
        self._outbox.acknowledge(response.acknowledged_source_sequence)
        match response.WhichOneof("message"):
            case "complete":
                self._take_complete(response.complete)
            case "incremental":
                self._take_change(response.incremental)
            case "dial":
                for peer in response.dial.peers:
                    self._dial(peer)
            case "overdrawn":
                self._overdrawn(response.overdrawn)
            case None:
                pass  # An acknowledgement alone.

    def _take_complete(self, complete: dispatch_service_pb2.AssignmentSet) -> None:
        self._failed_with = None
        if not self.connected:
            log.info("connected to the master", assignments=len(complete.assignments))
        self._welcomed.set()
        # What is overdrawn is said next, if anything is.
        self._overdrawn(dispatch_service_pb2.OverdrawnShards())
        self._wanted = {_key(assignment): assignment for assignment in complete.assignments}
        self._version = complete.version
        self._assign(self._wanted, {})

    def _take_change(self, change: dispatch_service_pb2.AssignmentChange) -> None:
        if change.applies_to_version != self._version:
            raise _OutOfStep(f"a change of version {change.applies_to_version}, and version {self._version} is here")
        for gone in change.remove:
            self._wanted.pop((gone.instance_id, gone.rank), None)
        for assignment in change.assign:
            self._wanted[_key(assignment)] = assignment
        self._version = change.results_in_version
        self._assign(self._wanted, {(gone.instance_id, gone.rank): gone.reason for gone in change.remove})


def _key(assignment: dispatch_service_pb2.Assignment) -> Key:
    return assignment.instance_id, assignment.rank


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
