"""Answers: from a prompt to the text that is certain so far, one token after the other. On the first rank.

As many answers are made at once as the instance was placed for, as many more may wait, and any further one
is refused. What is asked and answered is said to nobody but the caller: the log learns of counts and times.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

import grpc

from services.clock import Clock
from services.rpc import RpcError
from services.runner.shard import frames, sampling
from services.runner.shard.batches import Batches
from services.runner.shard.life import Life
from services.runner.shard.pipeline import Pipeline
from services.runner.shard.prefixes import Prefix, Prefixes
from services.runner.shard.sampling import Sampled, looks_back
from services.runner.shard.text import REPLACEMENT, Detokenizer, StopStrings, Text, TextError
from ullage.v1 import dispatch_service_pb2, event_pb2, runner_service_pb2

CONTINUED_TOKENS: Final = 8
"""How many of a text prompt's last tokens an answer is decoded with: it continues them, spaces included."""

PREFIX_SECONDS_MAX: Final = 120.0
"""How long the beginning of a prompt is kept for another that begins alike: a conversation's pause."""

GENERATION_ID_CHARACTERS_MAX: Final = 128

GenerateRequest = runner_service_pb2.GenerateRequest
GenerateResponse = runner_service_pb2.GenerateResponse


@dataclass
class _Answer:
    """One answer in the making."""

    generation_id: str
    """What the caller calls it, for the log; not always unique."""
    sequence_id: str
    """What the ranks call it."""
    prompt: Sequence[int]
    sampling: runner_service_pb2.SamplingParameters
    tokens_max: int
    detokenizer: Detokenizer
    stops: StopStrings
    started_at: float
    first_token_at: float | None = None
    generated: int = 0
    prefix: Prefix | None = None
    """What the prompt begins with, and was computed before."""
    finish_reason: runner_service_pb2.FinishReason.ValueType = runner_service_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def is_finished(self) -> bool:
        return self.finish_reason != runner_service_pb2.FINISH_REASON_UNSPECIFIED


class Generations:
    """All the answers of an instance."""

    def __init__(
        self, assignment: dispatch_service_pb2.Assignment, pipeline: Pipeline, text: Text, life: Life, clock: Clock
    ) -> None:
        self._assignment = assignment
        self._pipeline = pipeline
        self._batches = Batches(pipeline, groups=len(assignment.peers))
        self._text = text
        self._life = life
        self._clock = clock
        self._at_once = max(1, assignment.concurrent_sequences)
        self._places = asyncio.Semaphore(self._at_once)
        self._admitted = 0
        self._open = 0
        """Answers that have a sequence."""
        self._chunk_tokens = frames.chunk_tokens(assignment.model.hidden_size)
        self._prefixes = Prefixes(self._chunk_tokens)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        """The answer, in the pieces in which it becomes certain; the last response has the summary.

        Raises RpcError as RunnerService.Generate says.
        """
        prompt = self._checked_prompt(request)
        sampling.checked(request.sampling)
        if len(request.generation_id) > GENERATION_ID_CHARACTERS_MAX:
            raise _invalid(f"generation_id is longer than {GENERATION_ID_CHARACTERS_MAX} characters")
        await self._wait_for_place()
        answer = self._begin(request, prompt)
        reason = "error"
        try:
            async for response in self._pieces(answer):
                yield response
            reason = runner_service_pb2.FinishReason.Name(answer.finish_reason)
            reason = reason.removeprefix("FINISH_REASON_").lower()
        except (asyncio.CancelledError, GeneratorExit):
            reason = "cancelled"
            raise
        finally:
            self._end(answer, reason)

    def _checked_prompt(self, request: GenerateRequest) -> Sequence[int]:
        try:
            prompt = self._prompt_tokens(request)
        except TextError as error:
            raise _invalid(str(error)) from error
        if not prompt:
            raise _invalid("the prompt is empty: send text, chat messages or tokens")
        vocabulary_size = self._assignment.model.vocabulary_size
        if max(prompt) >= vocabulary_size:
            raise _invalid(f"token {max(prompt)} is not in the vocabulary of {vocabulary_size} tokens")
        context_tokens = self._assignment.context_tokens
        if len(prompt) >= context_tokens:
            raise _invalid(
                f"the prompt has {len(prompt)} tokens and the context holds {context_tokens}, the answer included: "
                f"send at most {max(0, context_tokens - 1)}, or place the model with a longer --context"
            )
        return prompt

    def _prompt_tokens(self, request: GenerateRequest) -> Sequence[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return self._text.encode(request.text) if request.text else ()
            case "chat":
                return self._text.encode_chat(request.chat.messages) if request.chat.messages else ()
            case "tokens":
                return tuple(request.tokens.token_ids)
            case _:
                return ()

    async def _wait_for_place(self) -> None:
        """Take a place among the answers made at once, after those who wait. Raises RpcError when too many do."""
        if self._admitted >= 2 * self._at_once:
            raise RpcError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self._at_once} answers are being made and {self._at_once} wait: try again later, or place the model "
                "with more --sequences",
                reason="QUEUE_FULL",
            )
        self._admitted += 1
        try:
            await self._places.acquire()
        except BaseException:
            self._admitted -= 1
            raise

    def _leave_place(self) -> None:
        self._places.release()
        self._admitted -= 1

    def _begin(self, request: GenerateRequest, prompt: Sequence[int]) -> _Answer:
        parameters = runner_service_pb2.SamplingParameters()
        parameters.CopyFrom(request.sampling)
        if not parameters.HasField("seed"):
            parameters.seed = secrets.randbits(63)
        room = self._assignment.context_tokens - len(prompt)
        continued = prompt[-CONTINUED_TOKENS:] if request.WhichOneof("prompt") == "text" else ()
        sequence_id = uuid.uuid4().hex
        answer = _Answer(
            generation_id=request.generation_id or sequence_id,
            sequence_id=sequence_id,
            prompt=prompt,
            sampling=parameters,
            tokens_max=min(room, parameters.max_tokens) if parameters.HasField("max_tokens") else room,
            detokenizer=Detokenizer(self._text, continued),
            stops=StopStrings(parameters.stop),
            started_at=self._clock.monotonic(),
            # What sampling looks back at would be missing.
            prefix=None if looks_back(parameters) else self._prefixes.take(prompt),
        )
        self._open += 1
        self._make_room()
        self._life.generation_started(
            event_pb2.GenerationStarted(
                generation_id=answer.generation_id,
                instance_id=self._assignment.instance_id,
                prompt_tokens=len(prompt),
            )
        )
        return answer

    async def _pieces(self, answer: _Answer) -> AsyncIterator[GenerateResponse]:
        sampled = await self._prefilled(answer)
        while True:
            response = self._taken(answer, sampled)
            if answer.is_finished:
                response.text += answer.stops.rest()
                response.summary.CopyFrom(self._summary(answer))
                yield response
                return
            position = len(answer.prompt) + answer.generated - 1
            following = self._batches.step(answer.sequence_id, position, sampled.token_id, answer.sampling)
            # The ranks set out for the next token, and are at work on it while the caller is told of this one.
            await asyncio.sleep(0)
            yield response
            sampled = await following

    async def _prefilled(self, answer: _Answer) -> Sampled:
        """Send the prompt through the ranks, as far as it is new, and return the first token of the answer."""
        size, prefix, first = self._chunk_tokens, answer.prefix, None
        for start in range(0 if prefix is None else prefix.tokens, len(answer.prompt), size):
            chunk, is_last = answer.prompt[start : start + size], start + size >= len(answer.prompt)
            first = await self._pipeline.step(
                answer.sequence_id, start, chunk, answer.sampling, wants_token=is_last, prefix=prefix
            )
            prefix = None
        assert first is not None  # noqa: S101 - what `wants_token` promises
        answer.first_token_at = self._clock.monotonic()
        return first

    def _taken(self, answer: _Answer, sampled: Sampled) -> GenerateResponse:
        """What becomes certain with a token; decides whether the answer is finished."""
        token = sampled.token_id
        if token in self._text.end_ids:
            answer.finish_reason = runner_service_pb2.FINISH_REASON_STOP
            return GenerateResponse()
        answer.generated += 1
        text = answer.stops.add(answer.detokenizer.add(token))
        if answer.stops.is_stopped:
            answer.finish_reason = runner_service_pb2.FINISH_REASON_STOP
        elif answer.generated >= answer.tokens_max:
            answer.finish_reason = runner_service_pb2.FINISH_REASON_LENGTH
        logprobs = [self._logprob(sampled)] if answer.sampling.HasField("logprobs") else []
        return GenerateResponse(text=text, token_ids=[token], logprobs=logprobs)

    def _logprob(self, sampled: Sampled) -> runner_service_pb2.TokenLogprob:
        likeliest = [
            runner_service_pb2.TokenCandidate(token_id=token, logprob=logprob, text=self._alone(token))
            for token, logprob in sampled.likeliest
        ]
        return runner_service_pb2.TokenLogprob(
            token_id=sampled.token_id,
            logprob=sampled.logprob,
            text=self._alone(sampled.token_id),
            likeliest=likeliest,
        )

    def _alone(self, token: int) -> str:
        """What a token reads as without its neighbours; empty where that is no whole character."""
        text = self._text.decode([token])
        return "" if REPLACEMENT in text else text

    def _summary(self, answer: _Answer) -> runner_service_pb2.GenerationSummary:
        prefill_seconds, decode_seconds = self._seconds(answer)
        return runner_service_pb2.GenerationSummary(
            generation_id=answer.generation_id,
            finish_reason=answer.finish_reason,
            prompt_tokens=len(answer.prompt),
            generated_tokens=answer.generated,
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            seed=answer.sampling.seed,
            reused_prompt_tokens=0 if answer.prefix is None else answer.prefix.tokens,
        )

    def _seconds(self, answer: _Answer) -> tuple[float, float]:
        """How long the prompt took, up to the first token, and how long the rest."""
        now = self._clock.monotonic()
        prefilled_at = now if answer.first_token_at is None else answer.first_token_at
        return prefilled_at - answer.started_at, now - prefilled_at

    def _end(self, answer: _Answer, reason: str) -> None:
        def close() -> None:
            self._open -= 1
            if not (answer.is_finished and self._is_kept(answer)):
                self._pipeline.close_sequence(answer.sequence_id)
                if answer.prefix is not None:
                    # Whoever left before its first step went round is known by this name on the other ranks.
                    self._pipeline.close_sequence(answer.prefix.sequence_id)
            # Only now: the other ranks hold no more sequences than there are places.
            self._leave_place()

        self._batches.leave(answer.sequence_id, close)
        prefill_seconds, decode_seconds = self._seconds(answer)
        self._life.generation_finished(
            event_pb2.GenerationFinished(
                generation_id=answer.generation_id,
                instance_id=self._assignment.instance_id,
                prompt_tokens=len(answer.prompt),
                generated_tokens=answer.generated,
                prefill_seconds=prefill_seconds,
                decode_seconds=decode_seconds,
                finish_reason=reason,
            )
        )

    def _is_kept(self, answer: _Answer) -> bool:
        """Keep the beginning of the answer's prompt for a while, if it is worth that."""
        if not self._pipeline.keeps_prefixes or self._prefixes.keep(answer.sequence_id, answer.prompt) == 0:
            return False
        asyncio.get_running_loop().call_later(PREFIX_SECONDS_MAX, self._forget, answer.sequence_id)
        return True

    def _forget(self, sequence_id: str) -> None:
        if self._prefixes.drop(sequence_id):
            self._pipeline.close_sequence(sequence_id)

    def _make_room(self) -> None:
        """Give up what is kept where answers need its place."""
        while len(self._prefixes) and self._open + len(self._prefixes) > self._at_once:
            self._forget(self._prefixes.oldest())


def _invalid(message: str) -> RpcError:
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, reason="PROMPT")
