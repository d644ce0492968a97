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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx

from services.runner.shard import frames, shard_model
from services.runner.shard.architecture import Cut
from services.runner.shard.sampling import Sampled, pick
from services.runner.shard.shard_model import Progress, ShardModel, WeightForm
from ullage.v1 import runner_service_pb2

T = TypeVar("T")


class Hidden(NamedTuple):
    """A hidden state as it travels."""

    element_type: runner_service_pb2.ElementType.ValueType
    data: bytes


@dataclass
class _Sequence:
    cache: list[Any]
    sampling: runner_service_pb2.SamplingParameters
    tokens: int = 0
    """How many have been taken so far."""


class Engine:
    """A shard's weights and the KV caches of its sequences. Calls run in the order they were made."""

    def __init__(self, *, on_cpu: bool) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mlx")
        self._on_cpu = on_cpu
        self._model: ShardModel | None = None
        self._cut = Cut(0, 0, 0)
        self._sequences: dict[str, _Sequence] = {}
        self.steps_done = 0

    async def load(self, folder: Path, cut: Cut, form: WeightForm, progress: Progress) -> None:
        """Load the shard `cut` of the model in `folder`; `progress` is called on the event loop.

        Raises UnsupportedModelError or ModelLoadError.
        """
        loop = asyncio.get_running_loop()

        def report(done_bytes: int, total_bytes: int) -> None:
            loop.call_soon_threadsafe(progress, done_bytes, total_bytes)

        def on_thread() -> None:
            self._model = shard_model.load(folder, cut, form, on_cpu=self._on_cpu, progress=report)
            self._cut = cut
            _give_memory_back()

        await self._run(on_thread)

    async def forward_tokens(
        self,
        generation_id: str,
        tokens: Sequence[int],
        *,
        sampling: runner_service_pb2.SamplingParameters,
        wants_token: bool,
    ) -> Hidden | Sampled | None:
        """Take `tokens` further along their sequence, on the first rank.

        Gives the hidden state for the next rank; where this rank is also the last, the token sampled after
        the last of them, or None unless `wants_token`. The first call for a sequence opens it.
        """
        return await self._run(
            lambda: self._step(generation_id, mx.array(list(tokens), dtype=mx.int32), sampling, wants_token=wants_token)
        )

    async def forward_hidden(self, activation: runner_service_pb2.Activation) -> Hidden | Sampled | None:
        """Take a checked activation further along its sequence, on a later rank; else as `forward_tokens`."""
        return await self._run(
            lambda: self._step(
                activation.generation_id,
                frames.unpacked(activation),
                activation.sampling,
                wants_token=activation.sample,
            )
        )

    def close_sequence(self, generation_id: str) -> None:
        """Have the sequence's KV cache freed, after the steps asked for so far; one that is not there is no error."""

        def on_thread() -> None:
            if self._sequences.pop(generation_id, None) is not None:
                _give_memory_back()

        self._thread.submit(on_thread)

    def _step(
        self,
        generation_id: str,
        inputs: mx.array,
        sampling: runner_service_pb2.SamplingParameters,
        *,
        wants_token: bool,
    ) -> Hidden | Sampled | None:
        model = self._loaded()
        sequence = self._sequences.get(generation_id)
        if sequence is None:
            sequence = self._sequences[generation_id] = _Sequence(model.new_cache(), sampling)
        if mx.issubdtype(inputs.dtype, mx.floating):
            inputs = inputs.astype(model.dtype)
        hidden = model.forward(inputs, sequence.cache)
        sequence.tokens += inputs.shape[0]
        result = self._finish(model, sequence, hidden, wants_token=wants_token)
        self.steps_done += 1
        return result

    def _finish(
        self, model: ShardModel, sequence: _Sequence, hidden: mx.array, *, wants_token: bool
    ) -> Hidden | Sampled | None:
        if not self._cut.is_last:
            mx.eval(hidden)
            return Hidden(*frames.packed(hidden))
        if not wants_token:
            # The hidden state itself is not needed; the caches are.
            mx.eval([entry.state for entry in model.own(sequence.cache)])
            return None
        position = sequence.tokens
        return pick(model.scores(hidden), sequence.sampling, position)

    def _loaded(self) -> ShardModel:
        if self._model is None:
            raise RuntimeError("a step was asked of a shard that is not loaded")
        return self._model

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def _give_memory_back() -> None:
    """Hand what is free to the system, so that resident bytes are what is held."""
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
