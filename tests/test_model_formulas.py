"""What a model weighs by its config.json alone: held to published tables, and to what the runtime makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services import model_folder
from services.model_folder import ModelFolderError
from ullage.v1 import model_pb2

SMALL = {"vocab_size": 1000, "max_position_embeddings": 4096, "num_hidden_layers": 2}
FOUR_BITS = {"bits": 4, "group_size": 64}


def written(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**SMALL, **config}))
    return folder


def computed(folder: Path, **config: Any) -> model_pb2.Model:
    return model_folder.computed(written(folder, **config), model_id="m", source="folder:m")


def shape(
    hidden: int, width: int, heads: int, kv_heads: int, head_dim: int | None = None, **more: Any
) -> dict[str, Any]:
    said = {"hidden_size": hidden, "intermediate_size": width, "num_attention_heads": heads}
    return {**said, "num_key_value_heads": kv_heads, **({"head_dim": head_dim} if head_dim else {}), **more}


QWEN3_30B = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
DEEPSEEK_V3 = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
}

# Of a layer: numbers, bytes as bfloat16, bytes at 4 bits in groups of 64; from instantiated models.
TABLE = [
    ("Llama-3.1-8B", "llama", shape(4096, 14336, 32, 8), 218_112_000, 436_224_000, 122_699_776),
    ("Qwen3-0.6B", "qwen3", shape(1024, 3072, 16, 8, 128), 15_730_944, 31_461_888, 8_851_968),
    ("Qwen2.5-7B", "qwen2", shape(3584, 18944, 28, 4), 233_057_792, 466_115_584, 131_111_936),
    (
        "Mixtral-8x7B",
        "mixtral",
        shape(4096, 14336, 32, 8, num_local_experts=8, num_experts_per_tok=2),
        1_451_270_144,
        2_902_540_288,
        816_351_232,
    ),
    ("Qwen3-30B-A3B", "qwen3_moe", shape(2048, 6144, 32, 4, 128, **QWEN3_30B), 623_120_640, 1_246_241_280, 350_511_616),
    (
        "gpt-oss-20b",
        "gpt_oss",
        shape(2880, 2880, 64, 8, 64, num_local_experts=32, num_experts_per_tok=4, sliding_window=128),
        823_186_976,
        1_646_373_952,
        463_460_032,
    ),
    ("Gemma3-1B", "gemma3_text", shape(1152, 6912, 4, 1, 256, sliding_window=512), 26_842_112, 53_684_224, 15_106_048),
    (
        "DeepSeek-V3, a dense layer",
        "deepseek_v3",
        shape(7168, 18432, 128, 128, **DEEPSEEK_V3),
        583_483_392,
        1_166_966_784,
        328_232_960,
    ),
]


@pytest.mark.parametrize(("model_type", "said", "numbers", "whole", "packed"), [row[1:] for row in TABLE])
def test_a_layer_weighs_what_the_runtime_makes_of_it(
    tmp_path: Path, model_type: str, said: dict[str, Any], numbers: int, whole: int, packed: int
) -> None:
    plain = computed(tmp_path, model_type=model_type, **said).layers[0].weight
    quantised = computed(tmp_path, model_type=model_type, quantization=FOUR_BITS, **said).layers[0].weight

    assert (plain.parameters, plain.stored_bytes, quantised.stored_bytes) == (numbers, whole, packed)


def test_a_whole_model_weighs_its_layers_its_embedding_and_its_head(tmp_path: Path) -> None:
    said = shape(8192, 28672, 64, 8, tie_word_embeddings=False, quantization=FOUR_BITS)
    model = computed(tmp_path, model_type="llama", **{**said, "num_hidden_layers": 80, "vocab_size": 128_256})

    assert model.layers[0].weight.stored_bytes == 481_329_152
    assert (model.embedding.stored_bytes, model.head.stored_bytes) == (591_003_648, 591_003_648 + 2 * 8192)
    parts = [*(layer.weight for layer in model.layers), model.embedding, model.head]
    assert sum(part.stored_bytes for part in parts) == 39_688_355_840
    assert (model.quantization, model.computed_from_config) == ("4-bit, groups of 64", True)


def test_of_experts_a_token_goes_through_few(tmp_path: Path) -> None:
    said = shape(2048, 6144, 32, 4, 128, **QWEN3_30B)
    weight = computed(tmp_path, model_type="qwen3_moe", **said).layers[0].weight

    assert weight.parameters - weight.active_parameters == 120 * 3 * 2048 * 768


def test_a_type_without_a_formula_is_refused_by_name(tmp_path: Path) -> None:
    written(tmp_path, model_type="phi", **shape(64, 128, 4, 2))

    with pytest.raises(ModelFolderError, match="what a phi weighs is known from its files only: bring them here"):
        model_folder.computed(tmp_path, model_id="m", source="folder:m")


def test_a_config_that_says_too_little_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    written(tmp_path, model_type="mixtral", **shape(64, 128, 4, 2))

    with pytest.raises(ModelFolderError, match="num_local_experts is None, which is no size"):
        model_folder.computed(tmp_path, model_id="m", source="folder:m")
