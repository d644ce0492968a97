"""config.json: the shape of a model, as far as its bytes and its KV cache depend on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.model_folder.admission import ADMITTED, refusal
from services.model_folder.errors import ModelFolderError
from services.model_folder.kv_cache import head_dim, kv_heads
from services.model_folder.sizes import CONFIG_FILE, size
from services.model_folder.states import Keeps

LAYERS_MAX: Final = 10_000
"""Far above any model; what is told of each layer must not fill the memory for a damaged number."""


_WITHOUT_ATTENTION: Final[Mapping[str, Any]] = {"num_attention_heads": 1, "max_position_embeddings": 1 << 20}
"""For models none of whose layers attends: their memory does not grow, so that any context would do."""


@dataclass(frozen=True, slots=True)
class Config:
    """What config.json says, each value checked to be a size that can be."""

    model_type: str
    layers: int
    hidden_size: int
    intermediate_size: int
    vocabulary_size: int
    attention_heads: int
    kv_heads: int
    head_dim: int
    context_tokens_max: int
    tied_embedding: bool
    says_tied: bool
    """Whether tied_embedding was said, and not left to the runtime."""
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    quantization: Mapping[str, Any] | None
    """What is said of weights packed as MLX packs them; None where none are."""
    experts_size: int
    """The inner width of the experts one token goes through, together; 0 without experts."""
    experts_per_token: int | None
    """How many of a layer's experts one token goes through; None where nothing is said of it."""
    kv_elements: int
    """Numbers one token leaves in a layer's cache."""
    kv_windows_tokens: tuple[int | None, ...]
    """For each layer the most tokens its KV cache keeps, or None where it keeps all."""
    keeps: tuple[Keeps, ...]
    """Which layers have a KV cache, and which a state."""


def read_config(folder: Path) -> Config:
    """The folder's config. Raises ModelFolderError where it is absent, incomplete, or of a type not admitted."""
    values = read_values(folder)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFolderError(f"{CONFIG_FILE} does not say model_type: this is no model folder of Hugging Face or MLX")
    refused = refusal(values)
    if refused is not None:
        choice = "" if model_type in ADMITTED else f"; choose a model of the type {', '.join(sorted(ADMITTED))}"
        raise ModelFolderError(refused + choice)
    return _config(model_type, values)


def read_values(folder: Path) -> Mapping[str, Any]:
    """What config.json says, whatever it is. Raises ModelFolderError where it cannot be read."""
    try:
        values = json.loads((folder / CONFIG_FILE).read_bytes())
    except FileNotFoundError as error:
        raise ModelFolderError(
            f"{folder.name or folder} has no {CONFIG_FILE}: give the folder of a Hugging Face or MLX model"
        ) from error
    except OSError as error:
        raise ModelFolderError(f"{CONFIG_FILE} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFolderError(f"{CONFIG_FILE} is no JSON: copy it again") from error
    if not isinstance(values, dict):
        raise ModelFolderError(f"{CONFIG_FILE} is no JSON object: copy it again")
    return values


def _config(model_type: str, values: Mapping[str, Any]) -> Config:
    architecture = ADMITTED[model_type]
    layers = size(values, "num_hidden_layers", largest=LAYERS_MAX)
    hidden_size = size(values, "hidden_size")
    if not architecture.attends:
        values = {**_WITHOUT_ATTENTION, **values}
    context_tokens_max = size(values, "max_position_embeddings")
    if architecture.short_of_window:
        context_tokens_max = min(context_tokens_max, size(values, "sliding_window", default=context_tokens_max))
    return Config(
        model_type=model_type,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=size(values, "intermediate_size", default=4 * hidden_size),
        vocabulary_size=size(values, "vocab_size"),
        attention_heads=size(values, "num_attention_heads"),
        kv_heads=kv_heads(values),
        head_dim=head_dim(values),
        context_tokens_max=context_tokens_max,
        # The runtime ties them where nothing is said.
        tied_embedding=values.get("tie_word_embeddings", True) is True,
        says_tied=values.get("tie_word_embeddings") is True,
        attention_bias=values.get("attention_bias") is True,
        attention_out_bias=values.get("attention_out_bias") is True,
        mlp_bias=values.get("mlp_bias") is True,
        quantization=_quantization(values),
        experts_size=_experts_size(values),
        experts_per_token=size(values, "num_experts_per_tok", default=0) or None,
        kv_elements=architecture.kv_elements(values),
        kv_windows_tokens=architecture.windows(values, layers),
        keeps=architecture.states(values, layers),
    )


def _experts_size(values: Mapping[str, Any]) -> int:
    if values.get("moe_intermediate_size") is None and values.get("expert_ffn_hidden_size") is None:
        return 0
    return size(values, "moe_intermediate_size") * size(values, "num_experts_per_tok", default=1)


def _quantization(values: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What config.json says of packed weights; how each one is packed, its own shape says."""
    said = values.get("quantization")
    if said is not None:
        # Of all, and of single parts that are packed in another way.
        parts = [said, *said.values()] if isinstance(said, dict) else []
        modes = [part.get("mode", "affine") for part in parts if isinstance(part, dict)] or [None]
        for mode in modes:
            if mode != "affine":
                raise _not_understood(f"mode {mode!r}")
        return dict(said)
    foreign = values.get("quantization_config")
    if foreign is not None:
        raise _not_understood(repr(foreign.get("quant_method") if isinstance(foreign, dict) else foreign))
    return None


def _not_understood(what: str) -> ModelFolderError:
    return ModelFolderError(
        f"{CONFIG_FILE} says the weights are quantised by {what}, which is not understood: "
        "take an MLX conversion of the model (affine, 2 to 8 bits), or one that is not quantised"
    )
