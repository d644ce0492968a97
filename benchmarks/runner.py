"""The runner's speed: tokens one after the other, split and not, beside mlx-lm and llama.cpp."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from typing import Any, Final

from benchmarks import answers, split
from benchmarks.row import Row

LLAMA_VARIABLE: Final = "ULLAGE_BENCH_LLAMA"
"""A Python with llama-cpp-python, and the GGUF file of the same model, as PYTHON:FILE; empty: llama.cpp is left out."""


def rows() -> Iterator[Row]:
    """All rows of the section."""
    ours, floors = split.rates("decode", _decoded)
    yield from split.rows("runner", "decode", ours, floors, {1: 0.9, 2: 0.9, 3: 0.8})
    alone, name = split.unsharded(1, "none", "decode"), f"decode, {split.over(2)}"
    yield Row("runner", name, ours[2], "tokens/s", "higher", 1.0, alone, "mlx-lm alone, its own BLAS")
    yield from _llama_rows(ours[2])


async def _decoded(stub: Any, instance_id: str) -> float:
    await answers.ask(stub, instance_id, 8, 8)
    return await answers.rate(stub, instance_id, 1)


def _llama_rows(ours: float) -> Iterator[Row]:
    """llama.cpp on the same model's 4-bit file, where somebody has built it."""
    python, _, file = os.environ.get(LLAMA_VARIABLE, "").partition(":")
    if not python:
        return
    program = (
        "import sys, time, llama_cpp\n"
        f"m = llama_cpp.Llama(sys.argv[1], n_ctx=1024, n_threads={os.cpu_count()}, verbose=False)\n"
        f"m.eval(list(range(100, 108)))\nbegan = time.perf_counter()\n"
        f"for _ in range({answers.DECODED_TOKENS}): m.eval([int(m.sample(temp=0))])\n"
        f"print({answers.DECODED_TOKENS} / (time.perf_counter() - began))\n"
    )
    done = subprocess.run([python, "-c", program, file], check=True, capture_output=True, text=True, timeout=300)
    name = "decode, over 2 shards, 4-byte floats"
    yield Row("runner", name, ours, "tokens/s", "higher", 0.1, float(done.stdout), "llama.cpp, 4 bit, one process")
