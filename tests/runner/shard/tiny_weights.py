"""Models of random numbers, small enough to compute whole and split in a test, with a tokenizer of bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy
from mlx.nn.layers.quantized import quantize
from mlx.utils import tree_flatten, tree_map
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.model_folder import describe, write_manifest
from services.runner.shard import architecture
from tests.runner.shard.tiny_configs import config_of
from ullage.v1 import model_pb2

SPECIALS: Final = ("<|end|>", "<|user|>", "<|assistant|>")


def write(
    folder: Path,
    model_type: str = "llama",
    *,
    bits: int | None = None,
    dtype: mx.Dtype = mx.float32,
    chat_template: str | None = None,
    **changes: Any,
) -> Path:
    """A model's folder, its weights the same at every call; with `bits`, quantised in groups of 32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(model_type, **changes)
    model = architecture.build(config)
    generator = numpy.random.default_rng(7)
    # Large enough for a token's score to stand out, so that equal tokens mean something.
    model.update(
        tree_map(
            lambda array: mx.array(generator.normal(0.0, 0.2, array.shape).astype(numpy.float32)), model.parameters()
        )
    )
    if bits is not None:
        quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    flat: Any = tree_flatten(model.parameters())
    weights = {name: array.astype(dtype) if array.dtype == mx.float32 else array for name, array in flat}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    _write_tokenizer(folder, chat_template)
    return folder


def prepared(folder: Path, model_id: str = "tiny") -> model_pb2.Model:
    """The model in a folder that `write` made, with its manifest written."""
    model = describe(folder, model_id=model_id, source="test")
    write_manifest(folder, model)
    return model


def _write_tokenizer(folder: Path, chat_template: str | None) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: place for place, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    said = {"eos_token": SPECIALS[0], **({} if chat_template is None else {"chat_template": chat_template})}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
