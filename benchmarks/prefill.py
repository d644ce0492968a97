"""How fast a prompt is taken in, split and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import answers, split
from benchmarks.row import Row
from benchmarks.unsharded import PROMPT_TOKENS


def rows() -> Iterator[Row]:
    """All rows of the section."""
    ours, floors = split.rates("prefill", _taken_in)
    name = f"prefill of {PROMPT_TOKENS} tokens"
    yield from split.rows("prefill", name, ours, floors, {1: 0.8, 2: 0.9, 3: 0.9})


async def _taken_in(stub: Any, instance_id: str) -> float:
    # A short one first: what comes for the first time is slower.
    await answers.ask(stub, instance_id, 8, 1)
    answer = await answers.ask(stub, instance_id, PROMPT_TOKENS, 1)
    return PROMPT_TOKENS / answer.summary.prefill_seconds
