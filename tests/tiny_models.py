"""Model folders small enough to weigh by hand: no numbers that mean anything, every size right."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensors = dict[str, tuple[str, tuple[int, ...]]]

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCABULARY = 64, 128, 4, 2, 16, 2, 100
KEYS = KV_HEADS * HEAD_DIM
DTYPE_BYTES = {"U8": 1, "F16": 2, "BF16": 2, "F32": 4, "U32": 4}

CONFIG: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}


def tensors(dtype: str = "BF16") -> Tensors:
    """Every tensor of the tied model that CONFIG describes."""
    found: Tensors = {
        "model.embed_tokens.weight": (dtype, (VOCABULARY, HIDDEN)),
        "model.norm.weight": (dtype, (HIDDEN,)),
    }
    for index in range(LAYERS):
        prefix = f"model.layers.{index}"
        found |= {f"{prefix}.{name}.weight": (dtype, shape) for name, shape in LINEAR.items()}
        found[f"{prefix}.input_layernorm.weight"] = (dtype, (HIDDEN,))
        found[f"{prefix}.post_attention_layernorm.weight"] = (dtype, (HIDDEN,))
    return found


def quantized(plain: Tensors, module: str, *, bits: int = 4, group_size: int = 32) -> Tensors:
    """`plain` with the module's weight packed as MLX packs it."""
    _, (rows, columns) = plain[f"{module}.weight"]
    groups = ("F16", (rows, columns // group_size))
    packed: Tensors = {
        f"{module}.weight": ("U32", (rows, columns * bits // 32)),
        f"{module}.scales": groups,
        f"{module}.biases": groups,
    }
    return plain | packed


def safetensors(content: Tensors) -> bytes:
    """A safetensors file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    begin = 0
    for name, (dtype, shape) in content.items():
        end = begin + math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(begin)


def write(folder: Path, content: Tensors | None = None, **config: Any) -> Path:
    """A model folder with CONFIG, changed by `config`, and `content` in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(safetensors(tensors() if content is None else content))
    return folder
