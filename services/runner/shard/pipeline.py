"""The ring of ranks, as one of them sees it.

Rank i opens a stream to rank i + 1 for hidden states, and the last rank one to the first for tokens. A
prompt goes round in chunks, so that while one rank works on a chunk the rank before it works on the next;
sequences share the ring the same way. What a stream brings is computed in the order it came.

The first rank asks: `step` and `close_sequence`. The others answer: `run` takes frames and passes results on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Sequence
from typing import Any, Final, TypeVar

import grpc
import structlog

from services.clock import Clock
from services.rpc import RpcError
from services.runner.shard import frames
from services.runner.shard.engine import Engine, Hidden
from services.runner.shard.frames import ForwardRequest, Inspector, rank_name
from services.runner.shard.life import Life
from services.runner.shard.links import FRAMES_WAITING_MAX, RANK_LOST, Downstream, LinkError, Upstream, blame, together
from services.runner.shard.prefixes import Prefix
from services.runner.shard.sampling import Sampled, looks_back
from services.runner.shard.step_watch import LOOK_SECONDS, StepWatch, effort
from ullage.v1 import dispatch_service_pb2, runner_service_pb2

STEP_SECONDS_MAX: Final = 60.0
"""How long a token may be waited for while no rank finishes a step."""

T = TypeVar("T")

log = structlog.get_logger()


class Pipeline:
    """The place of this rank in the ring. Belongs to the event loop."""

    def __init__(self, assignment: dispatch_service_pb2.Assignment, engine: Engine, life: Life, clock: Clock) -> None:
        self._assignment = assignment
        self._engine = engine
        self._life = life
        self._clock = clock
        self._ranks = len(assignment.peers)
        self._is_last = assignment.rank == self._ranks - 1
        self._inspector = Inspector(assignment)
        self._inbox: asyncio.Queue[ForwardRequest] = asyncio.Queue(FRAMES_WAITING_MAX)
        self._awaited: dict[str, asyncio.Future[Sampled]] = {}
        self._computing: set[asyncio.Task[Any]] = set()
        """Those that wait for a step of this rank."""
        self._tokens_received = 0
        self._steps_asked = 0
        self._downstream = Downstream(assignment, clock, self._steps_done) if self._ranks > 1 else None
        self._upstream = Upstream(assignment, clock, life, self._steps_done, self._take) if self._ranks > 1 else None
        self._tasks: list[asyncio.Task[None]] = []
        life.on_failure(self._fail_awaited)

    async def connect(self) -> None:
        """Return when both neighbours are reached. Raises LinkError."""
        if self._downstream is None or self._upstream is None:
            return
        await together(self._downstream.connect(), self._upstream.connected())

    def start(self) -> None:
        """Begin to work; a neighbour lost, or a step that hangs, fails the shard from now on."""
        works = [self._watch_steps()]
        if self._downstream is not None and self._upstream is not None:
            works += [self._guard(self._downstream), self._guard(self._upstream)]
            works.append(self._watch_progress() if self._assignment.rank == 0 else self._compute())
        self._tasks += [asyncio.create_task(work) for work in works]

    async def loaded(self) -> None:
        """Tell the rank before that this one has loaded; on the first rank, return once all have."""
        if self._downstream is None or self._upstream is None:
            return
        if self._assignment.rank == 0:
            # Each of the others is watched by its own runner; whatever becomes of it ends this rank too.
            await self._downstream.loaded_there.wait()
            return
        if not self._is_last:
            self._tasks.append(asyncio.create_task(_pass_on(self._downstream.loaded_there, self._upstream.loaded_here)))
        else:
            self._upstream.loaded_here.set()

    def receive(self, requests: AsyncIterable[ForwardRequest]) -> AsyncIterator[runner_service_pb2.ForwardResponse]:
        """Serve the stream of the rank before this one."""
        if self._upstream is None:
            raise RpcError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{rank_name(self._assignment, 0)} is the only rank of {self._assignment.instance_id}",
                reason="BAD_FRAME",
            )
        return self._upstream.receive(requests)

    async def step(
        self,
        generation_id: str,
        position: int,
        tokens: Sequence[int],
        sampling: runner_service_pb2.SamplingParameters,
        *,
        wants_token: bool,
        prefix: Prefix | None = None,
    ) -> Sampled | None:
        """Take `tokens`, the first at `position`, through all ranks; the token after them, if wanted.

        The first of a sequence are those at 0, or those after `prefix`. Returns at once after handing them on when no
        token is wanted. Raises RpcError UNAVAILABLE, naming the rank, when one is lost. Only on the first rank.
        """
        self._check_alive()
        result = await self._computed(
            self._engine.forward_tokens(
                generation_id, tokens, sampling=sampling, wants_token=wants_token, prefix=prefix
            )
        )
        if not isinstance(result, Hidden) or self._downstream is None:
            return result if isinstance(result, Sampled) else None
        activation = self._activation(generation_id, position, len(tokens), result, sample=wants_token)
        if position == 0 or prefix is not None:
            activation.sampling.CopyFrom(sampling)
            activation.begins_with = prefix.sequence_id if prefix is not None else ""
        if looks_back(sampling):
            activation.token_ids.extend(tokens)
        frame = ForwardRequest(activation=activation)
        if not wants_token:
            await self._sent(frame)
            return None
        (sampled,) = await self._answered(frame, [generation_id])
        return sampled

    async def step_batch(self, rows: Sequence[frames.BatchRow], tokens: Sequence[int]) -> Sequence[Sampled]:
        """Take one of `tokens` further along each of the sequences `rows` names, and return what comes after each.

        Raises RpcError as `step`. Only on the first rank.
        """
        self._check_alive()
        result = await self._computed(self._engine.forward_token_batch(rows, tokens))
        if not isinstance(result, Hidden):
            return result
        return await self._answered(
            ForwardRequest(batch=self._batch(rows, result)), [row.generation_id for row in rows]
        )

    async def _answered(self, frame: ForwardRequest, generation_ids: Sequence[str]) -> Sequence[Sampled]:
        """The tokens sampled after `frame`, one for each of the sequences in it."""
        loop = asyncio.get_running_loop()
        awaited: dict[str, asyncio.Future[Sampled]] = {each: loop.create_future() for each in generation_ids}
        self._awaited.update(awaited)
        try:
            await self._sent(frame)
            return await asyncio.gather(*awaited.values())
        finally:
            for each in generation_ids:
                self._awaited.pop(each, None)

    async def _sent(self, frame: ForwardRequest) -> None:
        assert self._downstream is not None  # noqa: S101 - there is nobody to send to without neighbours
        await self._downstream.send(frame)
        self._check_alive()
        self._steps_asked += 1

    def close_sequence(self, generation_id: str) -> None:
        """Free the sequence's cache here, and have every other rank do so. Only on the first rank.

        Waits for nothing: whoever asked may be gone, and what is asked of a rank after this is done after this.
        """
        if self._downstream is not None:
            self._downstream.send_now(_closed(generation_id))
        self._engine.close_sequence(generation_id)

    @property
    def keeps_prefixes(self) -> bool:
        """Whether a sequence of this model can begin with what another one has computed."""
        return self._engine.keeps_prefixes

    async def stop(self) -> None:
        """Leave the ring."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._downstream is not None:
            await self._downstream.close()

    def _activation(
        self, generation_id: str, position: int, tokens: int, hidden: Hidden, *, sample: bool
    ) -> runner_service_pb2.Activation:
        return runner_service_pb2.Activation(
            generation_id=generation_id,
            position=position,
            tokens=tokens,
            hidden_size=self._assignment.model.hidden_size,
            element_type=hidden.element_type,
            data=hidden.data,
            sample=sample,
        )

    def _batch(self, rows: Sequence[frames.BatchRow], hidden: Hidden) -> runner_service_pb2.ActivationBatch:
        return runner_service_pb2.ActivationBatch(
            rows=rows,
            hidden_size=self._assignment.model.hidden_size,
            element_type=hidden.element_type,
            data=hidden.data,
        )

    async def _take(self, frame: ForwardRequest) -> None:
        """Check a frame from the rank before, and see that it is worked on. Raises RpcError for a wrong one."""
        kind = frame.WhichOneof("frame")
        if self._assignment.rank == 0:
            self._take_tokens(frame)
        elif kind == "activation":
            self._inspector.check(frame.activation)
            await self._inbox.put(frame)
        elif kind == "batch":
            self._inspector.check_batch(frame.batch)
            await self._inbox.put(frame)
        elif kind == "closed":
            self._inspector.closed(frame.closed.generation_id)
            await self._inbox.put(frame)
        else:
            raise _unexpected(frame)

    def _take_tokens(self, frame: ForwardRequest) -> None:
        tokens = frame.tokens.tokens if frame.HasField("tokens") else [frame.token]
        vocabulary_size = self._assignment.model.vocabulary_size
        if frame.WhichOneof("frame") not in {"token", "tokens"} or any(t.token_id >= vocabulary_size for t in tokens):
            raise _unexpected(frame)
        self._tokens_received += 1
        for token in tokens:
            awaited = self._awaited.get(token.generation_id)
            # A token of a sequence that was closed meanwhile is of no use to anybody.
            if awaited is not None and not awaited.done():
                awaited.set_result(frames.sampled(token))

    async def _compute(self) -> None:
        """Work on what came, for ever: the life of every rank but the first."""
        while True:
            frame = await self._inbox.get()
            try:
                await self._work_on(frame)
            except Exception as error:
                # Whatever it was, the caches behind the stream are no longer what the others believe.
                log.error("a step failed", exc_info=error)
                self._life.fail(f"its computation failed: {error}")
                return

    async def _work_on(self, frame: ForwardRequest) -> None:
        assert self._downstream is not None  # noqa: S101 - there is no _compute without neighbours
        if frame.WhichOneof("frame") == "closed":
            if not self._is_last:
                self._downstream.send_now(frame)
            self._engine.close_sequence(frame.closed.generation_id)
            return
        if frame.WhichOneof("frame") == "batch":
            await self._work_on_batch(frame.batch, self._downstream)
            return
        taken = frame.activation
        result = await self._engine.forward_hidden(taken)
        if isinstance(result, Sampled):
            token = frames.token(taken.generation_id, taken.position + taken.tokens, result)
            self._downstream.send_now(ForwardRequest(token=token))
        elif isinstance(result, Hidden):
            passed = self._activation(taken.generation_id, taken.position, taken.tokens, result, sample=taken.sample)
            passed.token_ids.extend(taken.token_ids)
            passed.begins_with = taken.begins_with
            if taken.HasField("sampling"):
                passed.sampling.CopyFrom(taken.sampling)
            await self._downstream.send(ForwardRequest(activation=passed))

    async def _work_on_batch(self, taken: runner_service_pb2.ActivationBatch, downstream: Downstream) -> None:
        result = await self._engine.forward_hidden_batch(taken)
        if isinstance(result, Hidden):
            await downstream.send(ForwardRequest(batch=self._batch(taken.rows, result)))
            return
        tokens = [
            frames.token(row.generation_id, row.position + 1, sampled)
            for row, sampled in zip(taken.rows, result, strict=True)
        ]
        downstream.send_now(ForwardRequest(tokens=runner_service_pb2.SampledTokens(tokens=tokens)))

    async def _computed(self, step: Awaitable[T]) -> T:
        """The result of a step on this rank; one that fails takes the shard with it.

        Where the shard fails meanwhile, for the step hangs, it is waited for no longer.
        """
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - there is no `await` outside of one
        self._computing.add(task)
        try:
            return await step
        except asyncio.CancelledError:
            if not self._life.has_failed:
                raise
            task.uncancel()
            raise self._rank_lost() from None
        except Exception as error:
            self._computing.discard(task)
            log.error("a step failed", exc_info=error)
            self._life.fail(f"its computation failed: {error}")
            raise self._rank_lost() from error
        finally:
            self._computing.discard(task)

    async def _guard(self, link: Downstream | Upstream) -> None:
        """Run `link`, and fail the shard when it is lost."""
        try:
            await link.run()
        except LinkError as error:
            self._life.fail(str(error), blamed_rank=error.blamed_rank)

    async def _watch_steps(self) -> None:
        """Fail the shard when a step of its own will not end: nobody else sees it while heartbeats go on."""
        watch = StepWatch(on_cpu=self._engine.on_cpu)
        hindrance = None
        while hindrance is None:
            await self._clock.sleep(LOOK_SECONDS)
            hindrance = watch.hindrance(self._engine.step_began, effort(), self._engine.step_seconds_max)
        self._life.fail(f"its computation hangs: {hindrance}")

    async def _watch_progress(self) -> None:
        """Fail the shard when a token is awaited and no rank known here gets on."""
        seen, seen_at = self._progress(), self._clock.monotonic()
        while True:
            await self._clock.sleep(1.0)
            now = self._progress()
            if now != seen or not self._awaited:
                seen, seen_at = now, self._clock.monotonic()
            elif self._clock.monotonic() - seen_at > STEP_SECONDS_MAX:
                stuck = self._stuck_rank()
                self._life.fail(
                    f"no token within {STEP_SECONDS_MAX:.0f} s: {rank_name(self._assignment, stuck)} is stuck",
                    blamed_rank=stuck,
                )
                return

    def _progress(self) -> tuple[int, ...]:
        assert self._downstream is not None  # noqa: S101 - as for _work_on
        assert self._upstream is not None  # noqa: S101 - as for _work_on
        return (
            self._engine.steps_done,
            self._tokens_received,
            self._downstream.steps_done_there,
            self._upstream.steps_done_there,
        )

    def _stuck_rank(self) -> int:
        """The first rank known to be behind. Only its neighbours tell the first rank how far they are."""
        assert self._downstream is not None  # noqa: S101 - as for _work_on
        assert self._upstream is not None  # noqa: S101 - as for _work_on
        if self._downstream.steps_done_there < self._steps_asked:
            return self._downstream.rank
        # All it was asked has left the second rank. With three ranks only the last can hold it.
        return min(self._downstream.rank + 1, self._upstream.rank)

    def _steps_done(self) -> int:
        return self._engine.steps_done

    def _check_alive(self) -> None:
        if self._life.has_failed:
            raise self._rank_lost()

    def _rank_lost(self) -> RpcError:
        rank, message = blame(self._life, self._assignment)
        return RpcError(grpc.StatusCode.UNAVAILABLE, message, reason=RANK_LOST, metadata={"rank": str(rank)})

    def _fail_awaited(self) -> None:
        for awaited in self._awaited.values():
            if not awaited.done():
                awaited.set_exception(self._rank_lost())
        for task in self._computing:
            task.cancel()
        if self._downstream is not None:
            rank, message = blame(self._life, self._assignment)
            self._downstream.give_up(ForwardRequest(lost=runner_service_pb2.RankLost(rank=rank, message=message)))


async def _pass_on(said: asyncio.Event, told: asyncio.Event) -> None:
    await said.wait()
    told.set()


def _closed(generation_id: str) -> ForwardRequest:
    return ForwardRequest(closed=runner_service_pb2.SequenceClosed(generation_id=generation_id))


def _unexpected(frame: ForwardRequest) -> RpcError:
    kind = frame.WhichOneof("frame") or "an empty frame"
    return RpcError(
        grpc.StatusCode.INVALID_ARGUMENT, f"{kind} is not what this rank takes from the one before", reason="BAD_FRAME"
    )
