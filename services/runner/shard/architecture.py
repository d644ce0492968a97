"""Which models can be split, and how mlx-lm's code for them is cut into a shard.

A model type is admitted when a split of it gives, bit for bit, what the whole gives: tests/runner/shard
proves that for every type named here, at every split. All of them have one shape in mlx-lm: an outer model
with an inner `model` of `embed_tokens`, `layers` and `norm`. A shard is that model with its layers cut,
and the parts it does not own replaced by ones that pass on what they are given; so a model's own way of
masking, scaling and ending is mlx-lm's, whole or split.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.base import Module

Config = Mapping[str, Any]


class UnsupportedModelError(Exception):
    """The model cannot be split here; str() names it, says why and what to use instead."""


@dataclass(frozen=True)
class Architecture:
    """How one model type is run: its module in mlx_lm.models, and how its embedding's scaling is undone."""

    module: str
    unscale: Callable[[Any], None] | None = None
    """Makes the inner model leave its input as it is, where it scales what comes out of the embedding."""
    attention: frozenset[str] = frozenset({"full_attention"})
    """The kinds of layers, as config.json's layer_types, that can be cut."""


def _without_multiplier(inner: Any) -> None:
    inner.embedding_multiplier = 1.0


_FULL_OR_SLIDING: Final = frozenset({"full_attention", "sliding_attention"})

ADMITTED: Final[Mapping[str, Architecture]] = {
    "granite": Architecture("granite", _without_multiplier),
    "llama": Architecture("llama", attention=_FULL_OR_SLIDING),
    "mistral": Architecture("llama", attention=_FULL_OR_SLIDING),
    "olmo2": Architecture("olmo2"),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3"),
}


def admit(config: Config) -> Architecture:
    """How to run the model `config` (its config.json) describes. Raises UnsupportedModelError with the reason."""
    model_type = config.get("model_type")
    architecture = ADMITTED.get(str(model_type))
    if architecture is None:
        raise UnsupportedModelError(
            f"models of type {model_type!r} cannot be split yet: no test shows that their parts give what the "
            f"whole gives; these can: {', '.join(sorted(ADMITTED))}"
        )
    if set(config.get("layer_types") or ()) - architecture.attention:
        kinds = ", ".join(sorted(set(config["layer_types"])))
        raise UnsupportedModelError(
            f"this {model_type} has layers of kinds that cannot be split yet ({kinds}): use a model whose layers "
            "attend to the whole context"
        )
    if "quantization" not in config and "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise UnsupportedModelError(
            f"this {model_type} is quantised as {method!r}, which is not read here; use an MLX-quantised or "
            "unquantised folder, or a GGUF file"
        )
    return architecture


def build(config: Config) -> Any:
    """mlx-lm's model for `config`, with its weights not yet made. Raises UnsupportedModelError."""
    architecture = admit(config)
    module = _module(architecture.module)
    return module.Model(module.ModelArgs.from_dict(dict(config)))


def _module(name: str) -> Any:
    """The module mlx_lm.models.`name`, without what mlx_lm itself imports.

    mlx_lm's own __init__ brings transformers, two seconds and 36 MiB for every shard, and lowers the limit of
    open files for good. Its models need none of it, so the package is entered without running that file.
    """
    if "mlx_lm" not in sys.modules:
        spec = importlib.util.find_spec("mlx_lm")
        if spec is None:
            raise UnsupportedModelError("mlx-lm is not installed: install Ullage with its dependencies")
        sys.modules["mlx_lm"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"mlx_lm.models.{name}")


class _StandIn(Module):
    """Replaces a part of a model."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # MLX types its modules in part


class PassedOn(_StandIn):
    """Stands where the embedding or the final norm does on a rank without it: what comes in goes out."""

    def __call__(self, hidden: mx.array) -> mx.array:
        return hidden


class Embedded(_StandIn):
    """The embedding of the first rank, in the type the shard computes in."""

    def __init__(self, embedding: Any, dtype: mx.Dtype) -> None:
        super().__init__()
        self.embedding = embedding
        self._dtype = dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        hidden: mx.array = self.embedding(tokens)
        return hidden.astype(self._dtype)


class Finished(_StandIn):
    """Stands where the inner model does when only the head is to run; a tied head finds the embedding here."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embed_tokens = embedding

    def __call__(self, hidden: mx.array, *_: object, **__: object) -> mx.array:
        return hidden


@dataclass(frozen=True)
class Cut:
    """Which part of a model a shard is: layers [first_layer, end_layer) of `layers`."""

    first_layer: int
    end_layer: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.layers


@dataclass(frozen=True)
class Pieces:
    """What is left of a model after the cut. `inner` takes tokens or hidden states to hidden states."""

    inner: Any
    head: Any | None
    """Takes hidden states to scores; None but on the last rank."""
    parts: list[Any]
    """The modules that hold the shard's weights, each once, in the order they are computed."""


def cut_out(model: Any, config: Config, cut: Cut, dtype: mx.Dtype) -> Pieces:
    """The part of `model`, as `build` made it, that `cut` names, computing in `dtype`. Takes `model` apart."""
    inner, embedding = model.model, model.model.embed_tokens
    is_tied = "lm_head" not in model
    inner.layers = inner.layers[cut.first_layer : cut.end_layer]
    _find_windows(inner)
    parts = list(inner.layers)
    if cut.is_first or (cut.is_last and is_tied):
        parts.insert(0, embedding)
    if cut.is_first:
        inner.embed_tokens = Embedded(embedding, dtype)
    else:
        inner.embed_tokens = PassedOn()
        unscale = admit(config).unscale
        if unscale is not None:
            unscale(inner)
    if not cut.is_last:
        inner.norm = PassedOn()
        return Pieces(inner, None, parts)
    model.model = Finished(embedding if is_tied else None)
    parts += [inner.norm] if is_tied else [inner.norm, model.lm_head]
    return Pieces(inner, model, parts)


def _find_windows(inner: Any) -> None:
    """Have the masks of a model with sliding windows made from the caches of layers it still has."""
    if not hasattr(inner, "swa_idx"):
        return
    slides = [layer.use_sliding for layer in inner.layers]
    # Where no layer attends to everything that mask is made, from any cache, and not used.
    inner.fa_idx = slides.index(False) if False in slides else 0
    inner.swa_idx = slides.index(True) if True in slides else None


def new_cache(inner: Any) -> list[Any]:
    """An empty KV cache for one sequence: an entry for each layer of `inner`, as long as it can look back."""
    cache = _module("cache")
    return [
        cache.RotatingKVCache(max_size=inner.sliding_window)
        if getattr(layer, "use_sliding", False)
        else cache.KVCache()
        for layer in inner.layers
    ]
