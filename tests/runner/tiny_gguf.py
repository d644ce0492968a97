"""GGUF files of the llama architecture small enough to make in a test, with random weights quantised by gguf itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS = 2, 64, 128, 4, 2
HEAD_DIM = HIDDEN // HEADS
TOKENS = ["<|end|>", "<|user|>", *"abcdefgh", "1", "2", "Ġ", "ab", "Ġab"]
MERGES = ["a b", "Ġ ab"]

SHAPES = {
    "token_embd": (len(TOKENS), HIDDEN),
    "output_norm": (HIDDEN,),
    **{
        f"blk.{index}.{name}": shape
        for index in range(LAYERS)
        for name, shape in {
            "attn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_norm": (HIDDEN,),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items()
    },
}


def weights() -> dict[str, np.ndarray[Any, Any]]:
    """Random weights by GGUF's name, the same in every run."""
    random = np.random.default_rng(7)
    return {f"{name}.weight": random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def write(
    path: Path,
    kind: Kind = Kind.Q4_1,
    *,
    kinds: dict[str, Kind] | None = None,
    without: str = "",
    architecture: str = "llama",
    tokenizer: str = "smollm",
    **metadata: int,
) -> Path:
    """A whole file: matrices of `kind`, or that of their name in `kinds`; norms as F32; `metadata` besides."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    for key, value in metadata.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, weight in weights().items():
        if name == without:
            continue
        own = (kinds or {}).get(name, kind) if weight.ndim > 1 else Kind.F32
        writer.add_tensor(name, gguf.quantize(weight, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
