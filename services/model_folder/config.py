"""config.json: the shape of a model, as far as its bytes and its KV cache depend on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.model_folder.errors import ModelFolderError

CONFIG_FILE: Final = "config.json"
SIZE_MAX: Final = 2**40
"""No dimension of a model is larger; one that is would only make later sums meaningless."""

LAYERS_MAX: Final = 10_000
"""Far above any model; what is told of each layer must not fill the memory for a damaged number."""


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
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    quantized: bool
    kv_windows_tokens: tuple[int | None, ...]
    """For each layer the most tokens its KV cache keeps, or None where it keeps all."""


def read_config(folder: Path, admitted_model_types: frozenset[str]) -> Config:
    """The folder's config. Raises ModelFolderError where it is absent, incomplete, or of a type not admitted."""
    values = _values(folder)
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFolderError(f"{CONFIG_FILE} does not say model_type: this is no model folder of Hugging Face or MLX")
    if model_type not in admitted_model_types:
        raise ModelFolderError(
            f"architecture {model_type!r} cannot be split over nodes yet: choose a model of the type "
            + ", ".join(sorted(admitted_model_types))
        )
    return _config(model_type, values)


def _values(folder: Path) -> Mapping[str, Any]:
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
    layers = _size(values, "num_hidden_layers", largest=LAYERS_MAX)
    hidden_size = _size(values, "hidden_size")
    attention_heads = _size(values, "num_attention_heads")
    return Config(
        model_type=model_type,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=_size(values, "intermediate_size"),
        vocabulary_size=_size(values, "vocab_size"),
        attention_heads=attention_heads,
        kv_heads=_size(values, "num_key_value_heads", default=attention_heads),
        head_dim=_size(values, "head_dim", default=hidden_size // attention_heads),
        context_tokens_max=_size(values, "max_position_embeddings"),
        # The runtime ties them where nothing is said.
        tied_embedding=values.get("tie_word_embeddings", True) is True,
        attention_bias=values.get("attention_bias") is True,
        attention_out_bias=values.get("attention_out_bias") is True,
        mlp_bias=values.get("mlp_bias") is True,
        quantized=_quantized(values),
        kv_windows_tokens=_windows(model_type, values, layers),
    )


def _size(values: Mapping[str, Any], key: str, *, default: int | None = None, largest: int = SIZE_MAX) -> int:
    value = values.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value <= largest:
        raise ModelFolderError(f"{CONFIG_FILE} says {key} is {value!r}, which is no size: copy it again")
    return value


def _quantized(values: Mapping[str, Any]) -> bool:
    """Whether weights may be packed as MLX packs them; how each one is, its own shape says."""
    if values.get("quantization") is not None:
        mode = values["quantization"].get("mode", "affine") if isinstance(values["quantization"], dict) else None
        if mode != "affine":
            raise _not_understood(f"mode {mode!r}")
        return True
    foreign = values.get("quantization_config")
    if foreign is not None:
        raise _not_understood(repr(foreign.get("quant_method") if isinstance(foreign, dict) else foreign))
    return False


def _not_understood(what: str) -> ModelFolderError:
    return ModelFolderError(
        f"{CONFIG_FILE} says the weights are quantised by {what}, which is not understood: "
        "take an MLX conversion of the model (affine, 2 to 8 bits), or one that is not quantised"
    )


def _windows(model_type: str, values: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Windows as the runtime keeps them: only where layer_types says so; `sliding_window` alone it ignores."""
    kinds = values.get("layer_types")
    if kinds is None or model_type not in {"llama", "mistral"}:
        return (None,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFolderError(f"{CONFIG_FILE} must name one of layer_types for each of {layers} layers: copy it again")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window_tokens = _size(values, "sliding_window")
    return tuple(window_tokens if kind == "sliding_attention" else None for kind in kinds)
