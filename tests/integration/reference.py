"""What the unsharded model says: `python -m tests.integration.reference FOLDER TOKENS PROMPT...` prints token ids.

The model of mlx-lm in one process, its weights as 32-bit floats as the runner's are on a CPU, and the likeliest token
each time. No code of the runner's is used.
"""

from __future__ import annotations

import json
import sys

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.utils import dequantize_model


def main(folder: str, tokens: str, *prompts: str) -> None:
    """Print, as JSON, the token ids that follow each prompt."""
    model, tokenizer = load(folder)[:2]
    model = dequantize_model(model)
    model.update(tree_map(lambda weights: weights.astype(mx.float32), model.parameters()))
    answers = []
    for prompt in prompts:
        ids = mx.array(tokenizer.encode(prompt))
        answers.append([int(token) for token, _ in generate_step(ids, model, max_tokens=int(tokens))])
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
