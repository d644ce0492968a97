"""A sequence's caches take the steps they were promised, whatever chunks its prompt came in and whoever it was with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from services.runner.shard import shard_model
from services.runner.shard.architecture import Cut, runtime_module
from services.runner.shard.cache_room import make_room
from services.runner.shard.sequences import Sequences
from services.runner.shard.shard_model import ShardModel
from tests.runner.shard import tiny_configs, tiny_weights
from ullage.v1 import runner_service_pb2

STEP_TOKENS = 256
SAMPLING = runner_service_pb2.SamplingParameters()


def numbers(first: int, tokens: int, rows: int = 1) -> mx.array:
    """Keys, or values, that tell their places."""
    places = mx.arange(first, first + tokens, dtype=mx.float32).reshape(1, 1, tokens, 1)
    return mx.broadcast_to(places, (rows, 1, tokens, 1))


def taken(cache: Any, first: int, tokens: int, rows: int = 1) -> tuple[int, list[float]]:
    """Put tokens into `cache`: how many there is room for then, and what it holds."""
    make_room([cache], tokens)
    keys, _ = cache.update_and_fetch(numbers(first, tokens, rows), numbers(first, tokens, rows))
    return cache.keys.shape[2], keys[0, 0, :, 0].tolist()


# 85, 91, 102: what a chunk is of models whose rows are 3,072, 2,880 and 2,560 numbers long.
@pytest.mark.parametrize("chunk", [1, 80, 85, 91, 102, 128])
def test_a_prompt_in_chunks_that_no_step_divides_takes_whole_steps(chunk: int) -> None:
    cache = runtime_module("cache").KVCache()
    for first in range(0, 1024, chunk):
        room, held = taken(cache, first, chunk)
        end = first + chunk
        assert room == -(-end // STEP_TOKENS) * STEP_TOKENS
        assert held == list(range(end))


def test_sequences_that_go_on_side_by_side_take_whole_steps() -> None:
    cache = runtime_module("cache")
    alone = []
    for tokens in (250, 30):
        alone.append(cache.KVCache())
        taken(alone[-1], 0, tokens)
    batch = cache.KVCache.merge(alone)
    for place in range(250, 256):
        assert taken(batch, place, 1, rows=2) == (STEP_TOKENS, list(range(place + 1)))
    assert taken(batch, 256, 1, rows=2)[0] == 2 * STEP_TOKENS

    left = batch.extract(0)
    assert taken(left, 257, 1) == (2 * STEP_TOKENS, list(range(258)))


def test_a_sliding_cache_takes_whole_steps_up_to_its_window() -> None:
    cache = runtime_module("cache").RotatingKVCache(max_size=300)
    assert taken(cache, 0, 200)[0] == 200
    rooms = {taken(cache, place, 1)[0] for place in range(200, 256)}
    assert rooms == {STEP_TOKENS}
    assert {taken(cache, place, 1)[0] for place in range(256, 400)} == {300}
    assert sorted(cache.keys[0, 0, :, 0].tolist()) == list(range(100, 400))


def test_what_does_not_grow_and_what_is_empty_is_left_alone() -> None:
    cache = runtime_module("cache")
    several = cache.CacheList(cache.KVCache(), cache.KVCache())
    taken(several[0], 0, 200)
    state = cache.ArraysCache(size=2)
    make_room([several, state], 100)
    assert several[0].keys.shape[2] == 2 * STEP_TOKENS
    assert several[1].keys is None
    assert state.cache == [None, None]


def loaded(folder: Path) -> ShardModel:
    layers = tiny_configs.LAYERS
    return shard_model.load(folder, Cut(0, layers, layers), "float32", on_cpu=True, progress=lambda done, total: None)


def begin(model: ShardModel, sequences: Sequences, name: str, tokens: int) -> None:
    caches = sequences.begun(name, SAMPLING).caches
    for first in range(0, tokens, 128):
        count = min(128, tokens - first)
        mx.eval(model.forward(mx.array([first % 200 + place for place in range(count)]) % 250, caches))


def go_on(model: ShardModel, sequences: Sequences, names: str, steps: int) -> set[int]:
    """Take sequences further side by side: the rooms their caches had meanwhile."""
    rooms: set[int] = set()
    for _ in range(steps):
        batch = sequences.together(list(names))
        mx.eval(model.forward_batch(mx.array([7] * len(names)), batch.caches))
        rooms |= {cache.keys.shape[2] for cache in batch.caches}
    return rooms


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_who_comes_and_goes_leaves_no_room_behind(model_type: str, tmp_path: Path) -> None:
    # The window is longer than the context of 512 tokens, so that it bounds nothing.
    folder = tiny_weights.write(tmp_path / model_type, model_type, sliding_window=2048)
    model, sequences = loaded(folder), Sequences(loaded(folder).new_cache)
    begin(model, sequences, "a", 500)
    begin(model, sequences, "b", 400)
    assert go_on(model, sequences, "ab", 10) == {512}
    sequences.close("a")
    begin(model, sequences, "c", 20)
    assert max(go_on(model, sequences, "bc", 100)) == 512
    sequences.close("b")
    begin(model, sequences, "d", 10)
    assert max(go_on(model, sequences, "cd", 100)) == 256
