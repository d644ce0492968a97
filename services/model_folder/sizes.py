"""The sizes in config.json, under whichever name a family of models gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from services.model_folder.errors import ModelFolderError

CONFIG_FILE: Final = "config.json"
SIZE_MAX: Final = 2**40
"""No dimension of a model is larger; one that is would only make later sums meaningless."""

_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd",),
    "intermediate_size": ("n_inner", "ffn_hidden_size"),
    "num_attention_heads": ("n_head",),
    "num_key_value_heads": ("n_kv_heads", "num_attention_groups"),
    "max_position_embeddings": ("n_positions", "block_size", "model_max_length"),
    "num_experts_per_tok": ("experts_per_token", "moe_k", "moe_topk", "moe_top_k"),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
}
"""What older or other families call a size, tried in this order where the usual name is absent."""


def size(values: Mapping[str, Any], key: str, *, default: int | None = None, largest: int = SIZE_MAX) -> int:
    """The size config.json gives for `key`, or `default`. Raises ModelFolderError for what is no size."""
    value = values.get(key)
    for other in _OTHER_NAMES.get(key, ()):
        value = values.get(other) if value is None else value
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value <= largest:
        raise ModelFolderError(f"{CONFIG_FILE} says {key} is {value!r}, which is no size: copy it again")
    return value
