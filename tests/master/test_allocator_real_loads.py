"""What is reserved for a shard is what its process then takes: the real model, loaded, with its context filled."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest

from services import model_folder
from services.master.allocator.demand import Form, Load, demand
from services.runner.grant import over_grant_bytes
from services.runner.shard.text import Text
from tests.runner.shard import tiny_weights
from tests.runner.shard.ring import Child, running
from tests.runner.shard.test_describe import described
from ullage.v1 import model_pb2, node_pb2

CONTEXT_TOKENS = 512
ANSWER_TOKENS = 24


def reserved_bytes(model: model_pb2.Model, first: int, end: int, sequences: int = 1) -> int:
    """The promise for a shard on this machine, its process included."""
    form = Form(node_pb2.WEIGHT_FORM_FLOAT32, described()["compute_element_bytes"], fused_attention=False)
    needs = demand(model, form, Load(CONTEXT_TOKENS, sequences))
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


async def most_resident_bytes(child: Child) -> int:
    """The most it is seen to hold until this is cancelled."""
    most_bytes = 0
    try:
        while True:
            most_bytes = max(most_bytes, child.resident_bytes())
            await asyncio.sleep(0.02)
    except asyncio.CancelledError:
        return most_bytes


async def test_full_contexts_that_join_and_leave_one_another_stay_within_the_margin_of_their_promise(
    tmp_path: Path,
) -> None:
    # Small weights and large caches: 8 sequences of 60 MiB, which end between two steps when they join.
    layers, sequences, answer_tokens = 30, 8, 40
    folder = tiny_weights.write(
        tmp_path / "wide", num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=16, head_dim=32
    )
    model = tiny_weights.prepared(folder, "wide")
    prompts = [[(7 * one + place) % 250 for place in range(CONTEXT_TOKENS - answer_tokens)] for one in range(sequences)]

    async with running(folder, model, context_tokens=CONTEXT_TOKENS, concurrent_sequences=sequences) as ring:
        watch = asyncio.create_task(most_resident_bytes(ring.children[0]))
        await asyncio.gather(*(ring.generate(tokens=prompt, max_tokens=answer_tokens) for prompt in prompts))
        watch.cancel()
        most_bytes = await watch

    promised = reserved_bytes(model, 0, layers, sequences)
    # Beyond the margin no more requests are taken.
    assert over_grant_bytes(most_bytes, promised) is None, (most_bytes, promised)
