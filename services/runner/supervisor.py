"""One shard's life as its runner sees it: started, loaded, watched, and ended with a reason.

Rules this module lives by:
- Every phase makes progress within its bound, or the shard has FAILED with the phase, the reason and the last
  lines of stderr. How long a phase takes in all is nobody's business.
- A shard ends once: FAILED or UNLOADED is its last status, sent when its process is gone and its memory given back.
- Nothing is tried again: what failed is placed anew by whoever wants it.
- Whoever wants the shard to end, ends its process; the calls to it end by that, and are never cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import structlog
from grpc_health.v1 import health_pb2

from services import model_folder, rpc
from services.clock import Clock
from services.runner import models
from services.runner.description import NAMES_OF_FORMS
from services.runner.model_fetch import Fetcher, FetchError
from services.runner.peers import PeerStuckError, wait_until_fetched
from services.runner.process import ShardProcess
from services.runner.progress import Progress
from services.runner.reconcile import Key
from services.runner.roster import Roster
from services.runner.vital_signs import VitalSigns
from ullage.v1 import dispatch_service_pb2, event_pb2, model_pb2, shard_service_pb2, shard_service_pb2_grpc

LOOK_PERIOD_SECONDS: Final = 0.5
"""How often a shard is looked at: its memory, its progress."""

LISTEN_PERIOD_SECONDS: Final = 0.02

log = structlog.get_logger()


@dataclass(frozen=True)
class Bounds:
    """How long a shard may keep its runner waiting."""

    start_seconds: float = 60.0
    """From the start of the process to its answering."""
    stall_seconds: float = 60.0
    """Without a step forward while it connects or loads."""
    stopped_seconds: float = 3.0
    """Stopped by a signal, in whatever phase; who is stopped for less is left in peace."""
    stuck_seconds: float = 3.0
    """Without an answer to a health check, nor any time on a processor."""
    answer_seconds: float = 15.0
    """Without an answer to a health check, however busy."""
    check_period_seconds: float = 1.0
    terminate_seconds: float = 2.0
    """From being asked to end to being killed. Whoever stops the runner waits so long, and would kill it."""
    explain_seconds: float = 4.0
    """From the end of the connection to the end of the process, which says more."""
    blame_seconds: float = 0.5
    """For another rank that is blamed to be heard first: its own runner knows more."""


DEFAULT_BOUNDS: Final = Bounds()


@dataclass(frozen=True)
class Workshop:
    """What all shards of a runner have in common."""

    node_id: str
    command: Sequence[str]
    """Starts a shard's process, before the options that name the shard."""
    weights: str
    folder: Path
    """Private to this runner, with a path short enough for a unix socket."""
    models_dir: Path
    fetcher: Fetcher
    clock: Clock
    tell: Callable[[event_pb2.Fact], None]
    """Takes what the master shall know."""
    bounds: Bounds = DEFAULT_BOUNDS
    roster: Roster | None = None
    """Where the probe reads which processes are shards."""


class ShardSupervisor:
    """One shard, from its assignment to its end."""

    def __init__(self, assignment: dispatch_service_pb2.Assignment, threads: int, number: int, shop: Workshop) -> None:
        """`number` is the shard's own among all this runner ever starts."""
        self.assignment = assignment
        self.key: Key = (assignment.instance_id, assignment.rank)
        self.channel: grpc.aio.Channel | None = None
        """To the shard's process, from when it answers until it ends."""
        self._stopped_because = ""
        self._threads = threads
        self._folder = shop.folder / str(number)
        self._shop = shop
        self._process: ShardProcess | None = None
        self._ending: asyncio.Task[None] | None = None
        self._failure: model_pb2.ShardFailure | None = None
        self._stopping = False
        self._signs = VitalSigns(shop.clock.monotonic())
        self._asked_at: float | None = None
        """When the health check was sent that waits for its answer."""
        granted_bytes = assignment.shard.bytes.total_bytes
        self._progress = Progress(self.key, shop.node_id, granted_bytes, shop.clock, shop.tell)
        self._life = asyncio.create_task(self._live(), name=f"shard {self.key}")

    @property
    def status(self) -> model_pb2.ShardStatus:
        """The shard now."""
        return self._progress.status

    @property
    def ends_because(self) -> str:
        """Why it has to end, where that is known before its process is gone; else empty."""
        if self._stopped_because or self._failure is None:
            return self._stopped_because
        if self._failure.HasField("blamed_rank"):
            return self._failure.message
        return f"rank {self.assignment.rank} on node {self._shop.node_id}: {self._failure.message}"

    @property
    def ended(self) -> bool:
        """Its process is gone, and nothing more will be said of it."""
        return self._progress.ended

    def stop(self, failure: str | None = None, *, why: str = "") -> None:
        """Have the shard end, soon: UNLOADED, or FAILED with `failure` when it was not the master's wish.

        `why` is for those whom it is answering.
        """
        if self._stopping or self.ended:
            return
        self._stopped_because = why or failure or ""
        if failure is not None:
            self._fail(failure)
        self._stopping = True
        if self._process is not None:
            self._ending = asyncio.create_task(self._process.end(self._shop.bounds.terminate_seconds))

    async def wait(self) -> None:
        """Return when the shard has ended."""
        await asyncio.wait([self._life])

    async def _live(self) -> None:
        try:
            model_path = await self._model_path()
            if not self._stopping:
                self._process = await self._start()
            if self._process is not None and not self._stopping:
                await self._run(self._process, model_path)
        except PeerStuckError as error:
            self._fail(str(error))
            if self._failure is not None:
                self._failure.blamed_rank = error.rank
        except (model_folder.ModelFolderError, FetchError) as error:
            self._fail(str(error))
        except OSError as error:
            self._fail(f"its process could not be started: {error}")
        except Exception as error:
            log.error("supervising a shard failed", shard=self.key, exc_info=error)
            self._fail(f"its supervisor failed: {error!r}; the runner's log has it in full")
        await self._end()

    async def _model_path(self) -> Path:
        """The folder with the model's files, or with this shard's part of them, fetched; each checked."""
        model = self.assignment.model
        path = models.folder(self._shop.models_dir, model.model_id)
        if not self.assignment.sources or await asyncio.to_thread(models.has, self._shop.models_dir, model.model_id):
            await asyncio.to_thread(model_folder.verify, path, model)
            await asyncio.to_thread(models.check, path, model, self.assignment.shard, self._checked_piece)
            if all(source.node_id != self._shop.node_id for source in self.assignment.sources):
                # The others believe that it is to be fetched here.
                self._progress.fetched(0, 0)
        else:
            path = await self._fetched()
        if not self._stopping:
            stall_seconds = self._shop.bounds.stall_seconds
            await wait_until_fetched(self.assignment, self._shop.clock, stall_seconds, self._progress.step)
        return path

    def _checked_piece(self) -> None:
        """Count what was checked as a step. On the thread that checks."""
        self._progress.step()
        if self._stopping:
            raise model_folder.ModelFolderError("it was to end before its model was checked")

    async def _fetched(self) -> Path:
        """Fetch this shard's part, telling how far it is, until it is there or nobody wants it any more."""
        fetching = asyncio.create_task(self._shop.fetcher.fetch(self.assignment, self._progress.fetched))
        while not fetching.done():
            await asyncio.wait([fetching], timeout=LOOK_PERIOD_SECONDS)
            self._progress.tell_changes()
            if self._stopping:
                fetching.cancel()
                await asyncio.wait([fetching])
                raise FetchError("it was to end before its model was fetched")
        path = fetching.result()
        await asyncio.to_thread(model_folder.verify, path, self.assignment.model)
        return path

    @property
    def _socket(self) -> Path:
        return self._folder / "s"

    async def _start(self) -> ShardProcess:
        instance_id, rank = self.key
        command = [*self._shop.command, "--socket", str(self._socket), "--instance", instance_id, "--rank", str(rank)]
        weights = NAMES_OF_FORMS.get(self.assignment.shard.weight_form, self._shop.weights)
        command += ["--threads", str(self._threads), "--weights", weights]
        process = await ShardProcess.start(command, self._folder, self._threads)
        if self._shop.roster is not None:
            self._shop.roster.enter(process.pid)
        log.info("shard started", instance=instance_id, rank=rank, pid=process.pid, threads=self._threads)
        return process

    async def _run(self, process: ShardProcess, model_path: Path) -> None:
        """Follow the process until it ends, or has to."""
        guards = [asyncio.create_task(self._watch(process))]
        try:
            if await self._answers(process):
                self._progress.step()
                self.channel = rpc.channel(f"unix:{self._socket}")
                guards.append(asyncio.create_task(self._check_health(self.channel)))
                await self._serve(self.channel, model_path)
        except grpc.aio.AioRpcError as error:
            await self._explain(process, error)
        finally:
            for guard in guards:
                guard.cancel()
            await asyncio.wait(guards)

    async def _answers(self, process: ShardProcess) -> bool:
        """Wait until the process listens; False when it ends first, or does not within its bound."""
        deadline = self._shop.clock.monotonic() + self._shop.bounds.start_seconds
        while process.returncode is None:
            if await _listens(self._socket):
                return True
            if self._shop.clock.monotonic() > deadline:
                self._fail(f"its process did not answer within {self._shop.bounds.start_seconds:g} s")
                return False
            await self._shop.clock.sleep(LISTEN_PERIOD_SECONDS)
        return False

    async def _serve(self, channel: grpc.aio.Channel, model_path: Path) -> None:
        """Load the shard, then follow it for as long as it runs."""
        stub = shard_service_pb2_grpc.ShardServiceStub(channel)
        load = shard_service_pb2.LoadRequest(assignment=self.assignment, model_path=str(model_path))
        async for loading in stub.Load(load):
            self._take(loading.status)
            if self._failure is not None:
                return
        if self.status.phase != model_pb2.SHARD_PHASE_RUNNING:
            self._fail("its process ended loading without saying how it went")
            return
        async for said in stub.Watch(shard_service_pb2.WatchRequest()):
            self._hear(said)
            if self._failure is not None:
                return
        self._fail("its process stopped reporting")

    def _hear(self, said: shard_service_pb2.WatchResponse) -> None:
        match said.WhichOneof("message"):
            case "status":
                self._take(said.status)
            case "generation_started":
                self._shop.tell(event_pb2.Fact(generation_started=said.generation_started))
            case "generation_finished":
                self._shop.tell(event_pb2.Fact(generation_finished=said.generation_finished))
            case None:
                log.warning("a shard says what this runner does not know", shard=self.key)

    def _take(self, said: model_pb2.ShardStatus) -> None:
        if said.phase == model_pb2.SHARD_PHASE_FAILED:
            self._failure = self._failure or said.failure
        elif self._progress.take(said):
            self._measure()
            self._progress.enter()

    def _measure(self) -> None:
        reading = None if self._process is None else self._process.reading()
        if reading is not None:
            self._progress.measured(reading.resident_bytes)
            self._signs.see(reading, self._shop.clock.monotonic())

    async def _watch(self, process: ShardProcess) -> None:
        """Tell of growth, and end the process when it does not get on."""
        while True:
            await self._shop.clock.sleep(LOOK_PERIOD_SECONDS)
            self._measure()
            if self.status.phase > model_pb2.SHARD_PHASE_STARTING:
                self._progress.tell_changes()
            if (hindrance := self._hindrance()) is not None:
                self._fail(hindrance)
                process.kill()
                return

    def _hindrance(self) -> str | None:
        """Why the process will not get on, or None. Slow is told from stuck by progress, and by work done.

        While it loads it may be deaf for a while; progress is what counts then. Once it is ready itself it may wait
        long for the ranks that are not, and has to answer.
        """
        bounds = self._shop.bounds
        if self._signs.stopped_seconds >= bounds.stopped_seconds:
            return f"its process has been stopped by a signal for {bounds.stopped_seconds:g} s"
        if self.status.phase < model_pb2.SHARD_PHASE_RUNNING and not self.status.waits_for_ranks:
            stalled = self.channel is not None and self._progress.still_seconds > bounds.stall_seconds
            return f"no progress for {bounds.stall_seconds:g} s" if stalled else None
        deaf_seconds = 0.0 if self._asked_at is None else self._shop.clock.monotonic() - self._asked_at
        if deaf_seconds >= bounds.answer_seconds:
            return f"its process has not answered for {bounds.answer_seconds:g} s"
        if min(deaf_seconds, self._signs.idle_seconds) >= bounds.stuck_seconds:
            return f"its process has neither answered nor done anything for {bounds.stuck_seconds:g} s"
        return None

    async def _check_health(self, channel: grpc.aio.Channel) -> None:
        """Ask again and again whether the process is there; `_hindrance` judges how long it takes to answer."""
        check: Any = channel.unary_unary(
            "/grpc.health.v1.Health/Check", request_serializer=health_pb2.HealthCheckRequest.SerializeToString
        )
        while True:
            await self._shop.clock.sleep(self._shop.bounds.check_period_seconds)
            self._asked_at = self._shop.clock.monotonic()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await check(health_pb2.HealthCheckRequest(), timeout=self._shop.bounds.answer_seconds * 2)
            self._asked_at = None

    async def _explain(self, process: ShardProcess, error: grpc.aio.AioRpcError) -> None:
        """Say why the connection to the process ended: by the process's own end, if that is what it was."""
        await asyncio.wait([process.exited], timeout=self._shop.bounds.explain_seconds)
        if process.returncode is None:
            self._fail(f"its process broke off: {error.code().name} {error.details()}")

    def _fail(self, message: str) -> None:
        """Note why the shard fails, unless it fails already, or shall end anyway."""
        if self._failure is None and not self._stopping:
            self._failure = model_pb2.ShardFailure(message=message)

    async def _end(self) -> None:
        """See the process off, and tell how the shard ended."""
        failure = self._failure
        if failure is None and not self._stopping:
            failure = self._exit()
        if self._ending is not None:
            await self._ending
        elif self._process is not None:
            await self._process.end(self._shop.bounds.terminate_seconds)
        if self._process is not None and self._shop.roster is not None:
            self._shop.roster.leave(self._process.pid)
        if failure is not None and self._process is not None and not failure.stderr_lines:
            failure.stderr_lines.extend(self._process.stderr_lines())
        if self.channel is not None:
            channel, self.channel = self.channel, None
            await channel.close()
        if failure is not None and failure.HasField("blamed_rank"):
            await self._shop.clock.sleep(self._shop.bounds.blame_seconds)
        self._progress.end(failure)
        phase = model_pb2.ShardPhase.Name(self.status.phase)
        log.info("shard ended", shard=self.key, phase=phase, returned_bytes=self.status.returned_bytes)

    def _exit(self) -> model_pb2.ShardFailure:
        """How the process ended by its own doing."""
        process = self._process
        if process is None or process.returncode is None:
            return model_pb2.ShardFailure(message="its process ended")
        return model_pb2.ShardFailure(message=f"its process ended: {process.end_words()}", exit_code=process.returncode)


async def _listens(socket: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True
