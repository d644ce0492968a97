"""What is reserved for a shard is what its process then takes: the real model, loaded, with its context filled."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from services import model_folder
from services.master.allocator.demand import Form, Load, demand
from services.runner.shard.text import Text
from tests.runner.shard.ring import running
from tests.runner.shard.test_describe import described
from ullage.v1 import model_pb2, node_pb2

CONTEXT_TOKENS = 512
ANSWER_TOKENS = 24


def reserved_bytes(model: model_pb2.Model, first: int, end: int) -> int:
    """The promise for a shard on this machine, its process included."""
    form = Form(node_pb2.WEIGHT_FORM_FLOAT32, described()["compute_element_bytes"], fused_attention=False)
    needs = demand(model, form, Load(CONTEXT_TOKENS, 1))
    return int(needs.parts(first, end).total_bytes) + int(described()["shard_overhead_bytes"])


@pytest.mark.model
async def test_shards_with_a_full_context_stay_within_the_bytes_reserved_for_them(smollm2_folder: Path) -> None:
    model = model_folder.read_manifest(smollm2_folder)
    words = "The tide comes in and the tide goes out, and nobody has to ask it to. "
    prompt = Text.read(smollm2_folder).encode(words * 50)[: CONTEXT_TOKENS - ANSWER_TOKENS]

    async with running(smollm2_folder, model, 12, 20, context_tokens=CONTEXT_TOKENS) as ring:
        await ring.generate(tokens=prompt, max_tokens=ANSWER_TOKENS)
        taken = [child.resident_bytes() for child in ring.children]

    reserved = [reserved_bytes(model, first, end) for first, end in pairwise((0, 12, 20, len(model.layers)))]
    assert len(prompt) == CONTEXT_TOKENS - ANSWER_TOKENS
    assert all(held <= promised for held, promised in zip(taken, reserved, strict=True)), (taken, reserved)
    # And not by promising what nobody takes: another such shard would fit into what is promised twice over.
    assert all(held * 2 > promised for held, promised in zip(taken, reserved, strict=True)), (taken, reserved)
