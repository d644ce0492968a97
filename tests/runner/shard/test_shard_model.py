"""The real model, split over processes, against the same model whole."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from services import model_folder
from services.runner.shard import frames, shard_model
from services.runner.shard.architecture import Cut
from services.runner.shard.text import Text
from tests.runner.shard.ring import running
from tests.runner.shard.test_describe import described
from ullage.v1 import model_pb2

PROMPT = "<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 64


def whole(folder: Path, layers: int, prompt: list[int]) -> list[int]:
    model = shard_model.load(folder, Cut(0, layers, layers), "float32", on_cpu=True, progress=lambda *_: None)
    cache = model.new_cache()
    for start in range(0, len(prompt), frames.CHUNK_TOKENS_MAX):
        hidden = model.forward(mx.array(prompt[start : start + frames.CHUNK_TOKENS_MAX]), cache)
    found: list[int] = []
    for _ in range(TOKENS):
        found.append(int(str(mx.argmax(model.scores(hidden)).item())))
        hidden = model.forward(mx.array(found[-1:]), cache)
    return found


def weight_bytes(model: model_pb2.Model, cut: model_pb2.Shard) -> int:
    """The bytes a shard's weights take as 4-byte floats."""
    is_last = cut.end_layer == len(model.layers)
    parameters = sum(layer.weight.parameters for layer in model.layers[cut.first_layer : cut.end_layer])
    if cut.first_layer == 0 or (is_last and model.tied_embedding):
        parameters += model.embedding.parameters
    return 4 * (parameters + (model.head.parameters if is_last else 0))


@pytest.mark.model
async def test_two_shards_of_smollm2_give_its_tokens_in_the_bytes_they_were_promised(
    smollm2_folder: Path,
) -> None:
    model = model_folder.read_manifest(smollm2_folder)
    prompt = Text.read(smollm2_folder).encode(PROMPT)
    overhead_bytes = described()["shard_overhead_bytes"]
    async with running(smollm2_folder, model, 11, context_tokens=512) as ring:
        for one, (first, end) in zip(ring.children, ((0, 11), (11, 30)), strict=True):
            held_bytes = one.resident_bytes() - weight_bytes(model, model_pb2.Shard(first_layer=first, end_layer=end))
            assert 0 < held_bytes <= overhead_bytes
        answer = await ring.generate(tokens=prompt, max_tokens=TOKENS)
    expected = whole(smollm2_folder, len(model.layers), prompt)
    ends = Text.read(smollm2_folder).end_ids
    until_end = next((place for place, token in enumerate(expected) if token in ends), TOKENS)
    assert answer.token_ids == expected[:until_end]
    assert until_end > 32


@pytest.mark.model
def test_hardly_more_than_the_weights_is_held_while_they_are_read(smollm2_folder: Path) -> None:
    mx.clear_cache()
    before_bytes = mx.get_active_memory()
    mx.reset_peak_memory()
    model = shard_model.load(smollm2_folder, Cut(0, 1, 30), "float32", on_cpu=True, progress=lambda *_: None)
    held_bytes = mx.get_active_memory()
    # The embedding and one layer; widened as a whole, the embedding would take 132 MiB more for a moment.
    assert 120 << 20 < held_bytes - before_bytes < 125 << 20
    assert mx.get_peak_memory() - held_bytes <= 6 * shard_model.BLOCK_BYTES
    assert mx.isfinite(model.forward(mx.arange(8), model.new_cache())).all()
