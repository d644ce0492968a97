"""The unsharded model in one process, mlx-lm alone: `python -m benchmarks.unsharded FOLDER THREADS ours|none WHAT`.

Prints a rate in tokens a second; WHAT is "decode", or "prefill" of PROMPT_TOKENS. Weights are 4-byte floats, as the
runner's are on a CPU; products go through the runner's own BLAS with "ours", with "none" through what MLX brings.
"""

from __future__ import annotations

import sys
import time
from typing import Any

PROMPT_TOKENS = 512
CHUNK_TOKENS = 128
DECODED_TOKENS = {"ours": 24, "none": 3}


def main(folder: str, threads: str, choice: str, what: str) -> None:
    from services.runner.shard import blas  # noqa: PLC0415 - loads before anything imports MLX

    if choice == "ours":
        blas.load(int(threads))
    model = _model(folder)
    _decode(model, 2)
    print(_prefill(model) if what == "prefill" else _decode(model, DECODED_TOKENS[choice]))


def _model(folder: str) -> Any:
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS
    from mlx.utils import tree_map  # noqa: PLC0415 - after the BLAS
    from mlx_lm import load  # noqa: PLC0415 - after the BLAS
    from mlx_lm.utils import dequantize_model  # noqa: PLC0415 - after the BLAS

    model: Any = dequantize_model(load(folder)[0])
    model.update(tree_map(lambda array: array.astype(mx.float32), model.parameters()))
    mx.eval(model.parameters())
    return model


def _prompt(tokens: int) -> Any:
    import mlx.core as mx  # noqa: PLC0415 - after the BLAS

    return mx.array([100 + number % 500 for number in range(tokens)])


def _prefill(model: Any) -> float:
    """Prompt tokens a second."""
    from mlx_lm.generate import generate_step  # noqa: PLC0415 - after the BLAS

    began = time.perf_counter()
    next(iter(generate_step(_prompt(PROMPT_TOKENS), model, max_tokens=1, prefill_step_size=CHUNK_TOKENS)))
    return PROMPT_TOKENS / (time.perf_counter() - began)


def _decode(model: Any, count: int) -> float:
    """Tokens a second, after the first."""
    from mlx_lm.generate import generate_step  # noqa: PLC0415 - after the BLAS

    tokens = generate_step(_prompt(8), model, max_tokens=count + 1)
    next(tokens)
    began = time.perf_counter()
    return sum(1 for _ in tokens) / (time.perf_counter() - began)


if __name__ == "__main__":
    main(*sys.argv[1:])
