"""What is computed from config.json alone is what the files of such a model weigh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from services import model_folder
from services.model_folder.formulas import LAYERS
from tests.runner.shard import tiny_weights
from ullage.v1 import model_pb2

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("model_type", sorted(LAYERS))
def test_a_formula_gives_what_the_headers_say(model_type: str, bits: int | None, tmp_path: Path) -> None:
    # Wide enough for groups of 32.
    widths: dict[str, Any] = dict.fromkeys(LATENT, 32) if model_type == "deepseek_v3" else {}
    folder = tiny_weights.write(tmp_path, model_type, bits=bits, dtype=mx.bfloat16, **widths)
    weighed = model_folder.describe(folder, model_id="m", source="test")

    computed = model_folder.computed(folder, model_id="m", source="test")

    assert computed.computed_from_config
    assert [parts(layer.weight) for layer in computed.layers] == [parts(layer.weight) for layer in weighed.layers]
    assert parts(computed.embedding) == parts(weighed.embedding)
    assert parts(computed.head) == parts(weighed.head)


def parts(weight: model_pb2.Weight) -> tuple[int, int, int]:
    return weight.stored_bytes, weight.parameters, weight.active_parameters
