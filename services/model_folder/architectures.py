"""Which tensors a model is made of, for the types whose every tensor is checked against config.json.

Models of other admitted types are weighed by the names of their tensors: see by_name.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from services.model_folder.config import Config


@dataclass(frozen=True, slots=True)
class Module:
    """A module with weights, its name within its part, e.g. "mlp.up_proj"."""

    name: str
    weight_shape: tuple[int, ...]
    """Once dequantised: (out, in), (experts, out, in), or (size,) of a norm."""
    bias: bool = False
    packed: bool = True
    """Its matrix is packed where the model's matrices are."""


def _llama(config: Config) -> tuple[Module, ...]:
    return _decoder_layer(config, input_bias=config.attention_bias, output_bias=config.attention_bias)


def _qwen2(config: Config) -> tuple[Module, ...]:
    return _decoder_layer(config, input_bias=True, output_bias=False)


def _qwen3(config: Config) -> tuple[Module, ...]:
    norms = tuple(Module(f"self_attn.{name}", (config.head_dim,)) for name in ("q_norm", "k_norm"))
    return (*_decoder_layer(config, input_bias=False, output_bias=False), *norms)


def _seed_oss(config: Config) -> tuple[Module, ...]:
    return _decoder_layer(config, input_bias=config.attention_bias, output_bias=config.attention_out_bias)


def _olmo2(config: Config) -> tuple[Module, ...]:
    """Norms come after attention and feed-forward, and span all heads."""
    queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    modules = _decoder_layer(config, input_bias=config.attention_bias, output_bias=config.attention_bias)
    return (
        *(module for module in modules if module.name != "input_layernorm"),
        Module("post_feedforward_layernorm", (config.hidden_size,)),
        Module("self_attn.q_norm", (queries,)),
        Module("self_attn.k_norm", (keys,)),
    )


def _decoder_layer(config: Config, *, input_bias: bool, output_bias: bool) -> tuple[Module, ...]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    return (
        Module("input_layernorm", (hidden,)),
        Module("self_attn.q_proj", (queries, hidden), bias=input_bias),
        Module("self_attn.k_proj", (keys, hidden), bias=input_bias),
        Module("self_attn.v_proj", (keys, hidden), bias=input_bias),
        Module("self_attn.o_proj", (hidden, queries), bias=output_bias),
        Module("post_attention_layernorm", (hidden,)),
        Module("mlp.gate_proj", (ffn, hidden), bias=config.mlp_bias),
        Module("mlp.up_proj", (ffn, hidden), bias=config.mlp_bias),
        Module("mlp.down_proj", (hidden, ffn), bias=config.mlp_bias),
    )


LAYER_MODULES: Final[Mapping[str, Callable[[Config], tuple[Module, ...]]]] = {
    "granite": _llama,
    "llama": _llama,
    "mistral": _llama,
    "olmo2": _olmo2,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "seed_oss": _seed_oss,
    "smollm3": _llama,
}


def embedding_module(config: Config) -> Module:
    """The token embedding."""
    return Module("model.embed_tokens", (config.vocabulary_size, config.hidden_size))


def head_modules(config: Config) -> tuple[Module, ...]:
    """The final norm, and the output head where it is not the embedding again."""
    norm = Module("model.norm", (config.hidden_size,))
    head = Module("lm_head", (config.vocabulary_size, config.hidden_size))
    return (norm,) if config.tied_embedding else (norm, head)
