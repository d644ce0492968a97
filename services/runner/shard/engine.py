"""The shard's computation, on one thread of its own, offered to the event loop.

All of MLX happens on that thread: an array that is not evaluated yet belongs to the thread that described
it. What crosses over is bytes, tokens and numbers. A thread and not the loop, because a step takes
milliseconds and heartbeats must go out meanwhile.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import mlx.core as mx

from services.runner.shard import frames, shard_model, step_watch
from services.runner.shard.architecture import Cut
from services.runner.shard.prefixes import Prefix
from services.runner.shard.sampling import Sampled, looks_back, pick
from services.runner.shard.sequences import OneSequence, Sequences
from services.runner.shard.shard_model import Progress, ShardModel, WeightForm
from services.runner.shard.step_watch import Effort
from ullage.v1 import runner_service_pb2

T = TypeVar("T")


class Hidden(NamedTuple):
    """A hidden state as it travels."""

    element_type: runner_service_pb2.ElementType.ValueType
    data: bytes


class Engine:
    """A shard's weights and the KV caches of its sequences. Calls run in the order they were made."""

    def __init__(self, *, on_cpu: bool) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlx")
        self.on_cpu = on_cpu
        self._model: ShardModel | None = None
        self._cut = Cut(0, 0, 0)
        self._sequences = Sequences(lambda: self._loaded().new_cache())
        self.steps_done = 0
        self.step_began: Effort | None = None
        """What the process had done when the step under way began; None between steps."""
        self.step_seconds_max: float | None = None
        """What a step may take, by `step_watch`; None until the shard was tried."""

    async def load(
        self, folder: Path, cut: Cut, form: WeightForm, progress: Progress, *, hidden_size: int, context_tokens: int
    ) -> None:
        """Load the shard `cut` of the model in `folder`, and try it on a chunk of a prompt.

        `progress` is called on the event loop. Raises UnsupportedModelError or ModelLoadError.
        """
        loop = asyncio.get_running_loop()

        def report(done_bytes: int, total_bytes: int) -> None:
            loop.call_soon_threadsafe(progress, done_bytes, total_bytes)

        def on_thread() -> None:
            self._model = shard_model.load(folder, cut, form, on_cpu=self.on_cpu, progress=report)
            self._cut = cut
            self._try_out(hidden_size, context_tokens)
            _give_memory_back()

        await loop.run_in_executor(self._thread, on_thread)

    def _try_out(self, hidden_size: int, context_tokens: int) -> None:
        model, began = self._loaded(), step_watch.effort()
        tokens = min(frames.chunk_tokens(hidden_size), context_tokens)
        self._watched(lambda: shard_model.try_out(model, self._cut, hidden_size=hidden_size, tokens=tokens))
        self.step_seconds_max = step_watch.allowed_seconds(
            step_watch.spent_seconds(began, step_watch.effort(), on_cpu=self.on_cpu),
            context_tokens=context_tokens,
            hidden_size=hidden_size,
        )

    async def forward_tokens(
        self,
        generation_id: str,
        tokens: Sequence[int],
        *,
        sampling: runner_service_pb2.SamplingParameters,
        wants_token: bool,
        prefix: Prefix | None = None,
    ) -> Hidden | Sampled | None:
        """Take `tokens` further along their sequence, on the first rank.

        Gives the hidden state for the next rank; where this rank is also the last, the token sampled after
        the last of them, or None unless `wants_token`. The first call for a sequence opens it, after `prefix`.
        """
        token_ids = list(tokens) if looks_back(sampling) else []
        return await self._run(
            lambda: self._step(
                self._sequences.begun(generation_id, sampling, prefix),
                mx.array(list(tokens), dtype=mx.int32),
                token_ids,
                wants_token=wants_token,
            )
        )

    async def forward_hidden(self, activation: runner_service_pb2.Activation) -> Hidden | Sampled | None:
        """Take a checked activation further along its sequence, on a later rank; else as `forward_tokens`."""
        begins_with = activation.begins_with
        prefix = Prefix(begins_with, activation.position) if begins_with else None
        return await self._run(
            lambda: self._step(
                self._sequences.begun(activation.generation_id, activation.sampling, prefix),
                frames.unpacked(activation),
                activation.token_ids,
                wants_token=activation.sample,
            )
        )

    async def forward_token_batch(
        self, rows: Sequence[frames.BatchRow], tokens: Sequence[int]
    ) -> Hidden | list[Sampled]:
        """Take one of `tokens` further along each of the open sequences `rows` names, on the first rank.

        Gives the hidden states for the next rank, or, where this is also the last, the tokens after them.
        """
        return await self._run(lambda: self._step_batch(rows, mx.array(list(tokens), dtype=mx.int32)))

    async def forward_hidden_batch(self, batch: runner_service_pb2.ActivationBatch) -> Hidden | list[Sampled]:
        """Take a checked batch further along its sequences, on a later rank; else as `forward_token_batch`."""
        return await self._run(lambda: self._step_batch(batch.rows, frames.unpacked_batch(batch)))

    @property
    def keeps_prefixes(self) -> bool:
        """Whether the caches of the model, on every rank, can be cut to the beginning of a sequence."""
        return self._loaded().keeps_prefixes

    def close_sequence(self, generation_id: str) -> None:
        """Have the sequence's KV cache freed, after the steps asked for so far; one that is not there is no error."""

        def on_thread() -> None:
            if self._sequences.close(generation_id):
                _give_memory_back()

        self._thread.submit(on_thread)

    def _step(
        self, sequence: OneSequence, inputs: mx.array, token_ids: Sequence[int], *, wants_token: bool
    ) -> Hidden | Sampled | None:
        model = self._loaded()
        hidden = model.forward(self._widened(inputs), sequence.caches)
        sequence.tokens += inputs.shape[0]
        sequence.seen.update(token_ids)
        result = self._finish(model, sequence, hidden, wants_token=wants_token)
        self.steps_done += 1
        return result

    def _finish(
        self, model: ShardModel, sequence: OneSequence, hidden: mx.array, *, wants_token: bool
    ) -> Hidden | Sampled | None:
        if not self._cut.is_last:
            mx.eval(hidden)
            return Hidden(*frames.packed(hidden))
        if not wants_token:
            # The hidden state itself is not needed; the caches are.
            mx.eval([entry.state for entry in sequence.caches])
            return None
        return pick(model.scores(hidden), sequence.sampling, sequence.tokens, sequence.seen)

    def _step_batch(self, rows: Sequence[frames.BatchRow], inputs: mx.array) -> Hidden | list[Sampled]:
        model = self._loaded()
        inputs = self._widened(inputs)
        members, hidden = self._side_by_side(model, rows, inputs)
        for row, sequence in zip(rows, members, strict=True):
            sequence.tokens += 1
            if row.HasField("token_id"):
                sequence.seen.add(row.token_id)
        self.steps_done += 1
        if not self._cut.is_last:
            mx.eval(hidden)
            return Hidden(*frames.packed(hidden))
        scores = model.scores_batch(hidden)
        mx.eval(scores)
        return [
            pick(scores[place], sequence.sampling, sequence.tokens, sequence.seen)
            for place, sequence in enumerate(members)
        ]

    def _side_by_side(
        self, model: ShardModel, rows: Sequence[frames.BatchRow], inputs: mx.array
    ) -> tuple[Sequence[OneSequence], mx.array]:
        """The sequences `rows` names, and their hidden states after one more row of `inputs` each."""
        ids = [row.generation_id for row in rows]
        if model.side_by_side:
            batch = self._sequences.together(ids)
            return batch.members, model.forward_batch(inputs, batch.caches)
        members = [self._sequences.alone(each) for each in ids]
        each_alone = [model.forward(inputs[row : row + 1], one.caches) for row, one in enumerate(members)]
        return members, mx.concatenate(each_alone)

    def _widened(self, inputs: mx.array) -> mx.array:
        """Hidden states in the type this shard computes in; tokens as they are."""
        return inputs.astype(self._loaded().dtype) if mx.issubdtype(inputs.dtype, mx.floating) else inputs

    def _loaded(self) -> ShardModel:
        if self._model is None:
            raise RuntimeError("a step was asked of a shard that is not loaded")
        return self._model

    async def _run(self, step: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._watched, step)

    def _watched(self, step: Callable[[], T]) -> T:
        self.step_began = step_watch.effort()
        try:
            return step()
        finally:
            self.step_began = None


def _give_memory_back() -> None:
    """Hand what is free to the system, so that resident bytes are what is held."""
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
