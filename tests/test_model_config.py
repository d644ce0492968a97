"""Whatever a config.json says, a folder is described or refused with words, and nothing else happens."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.model_folder import ModelFolderError, describe
from services.model_folder.admission import ADMITTED
from tests import tiny_models

KEYS = (
    *tiny_models.CONFIG,
    "head_dim",
    "layer_types",
    "sliding_window",
    "full_attention_interval",
    "kv_lora_rank",
    "num_experts",
    "num_local_experts",
    "quantization",
    "quantization_config",
    "rope_scaling",
    "text_config",
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, 4, 64, 2**31, 2**63])
    | st.floats()
    | st.sampled_from(["", "x", "full_attention", "sliding_attention"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["bits", "group_size", "mode", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.sampled_from(["llama", *sorted(ADMITTED)]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_any_values_are_described_or_refused(model_type: str, config: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ModelFolderError):
        written = tiny_models.write(Path(folder), **{"model_type": model_type, **config})
        assert describe(written, model_id="m", source="test").layers
