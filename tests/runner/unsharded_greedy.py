"""`unsharded_greedy.py FOLDER PROMPT TOKENS`: what mlx-lm itself says to a prompt, greedily, computed in float32."""

from __future__ import annotations

import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.generate import generate
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer


def widened(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if array.dtype == mx.float16 else array


def main(folder: Path, prompt: str, tokens: int) -> None:
    model, _ = load_model(folder, lazy=True)
    # Scales first: dequantised from float16 ones, weights would be rounded to float16.
    model.update(tree_map(widened, model.parameters()))
    tokenizer = load_tokenizer(folder)  # type: ignore[no-untyped-call]  # mlx-lm's has no types
    print(generate(dequantize_model(model), tokenizer, prompt, max_tokens=tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
