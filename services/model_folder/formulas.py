"""What a model will weigh, computed from its config.json alone, before its files are at hand.

Rules this module lives by:
- A fallback: where headers can be read, what they say counts. What was computed is marked so for ever.
- Keyed by model_type, layer by layer: types that name the same sizes need not weigh the same.
- Matrices take the bits config.json says they are packed in, with a scale and a bias of 2 bytes for each group;
  norms and biases are never packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from services.model_folder import architectures
from services.model_folder.architectures import Module
from services.model_folder.by_name import Weights
from services.model_folder.config import Config, read_config, read_values
from services.model_folder.description import model_of
from services.model_folder.errors import ModelFolderError
from services.model_folder.sizes import size
from ullage.v1 import model_pb2

Values: TypeAlias = Mapping[str, Any]
Layer: TypeAlias = Callable[[Config, Values, int], tuple[Module, ...]]

GROUP_BYTES: Final = 4
"""A scale and a bias for each group of packed numbers."""

FLOAT_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
FLOAT_BYTES_DEFAULT: Final = 2


def _gemma3(config: Config, values: Values, index: int) -> tuple[Module, ...]:
    norms = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
    return (
        *_plain(architectures.LAYER_MODULES["qwen3"])(config, values, index),
        *(Module(name, (config.hidden_size,)) for name in norms),
    )


def _mixtral(config: Config, values: Values, index: int) -> tuple[Module, ...]:
    count = size(values, "num_local_experts")
    return (
        *_attention(config, "llama"),
        Module("block_sparse_moe.gate", (count, config.hidden_size)),
        *_experts("block_sparse_moe.switch_mlp", count, config.intermediate_size, config.hidden_size),
    )


def _qwen3_moe(config: Config, values: Values, index: int) -> tuple[Module, ...]:
    if not _sparse(values, index):
        return _plain(architectures.LAYER_MODULES["qwen3"])(config, values, index)
    return (*_attention(config, "qwen3"), *_routed(config, values))


def _qwen2_moe(config: Config, values: Values, index: int) -> tuple[Module, ...]:
    shared = size(values, "shared_expert_intermediate_size")
    return (
        *_attention(config, "qwen2"),
        *_routed(config, values),
        *_feed_forward("mlp.shared_expert", shared, config.hidden_size),
        Module("mlp.shared_expert_gate", (1, config.hidden_size)),
    )


def _gpt_oss(config: Config, values: Values, index: int) -> tuple[Module, ...]:
    count = size(values, "num_local_experts")
    projections = (replace(module, bias=True) for module in _attention(config, "llama") if len(module.weight_shape) > 1)
    return (
        *projections,
        *(Module(name, (config.hidden_size,)) for name in ("input_layernorm", "post_attention_layernorm")),
        Module("self_attn.sinks", (config.attention_heads,)),
        Module("mlp.router", (count, config.hidden_size), bias=True),
        *_experts("mlp.experts", count, config.intermediate_size, config.hidden_size, bias=True),
    )


def _deepseek_v3(config: Config, values: Values, index: int) -> tuple[Module, ...]:
    hidden, heads, rank = config.hidden_size, config.attention_heads, size(values, "kv_lora_rank")
    rope, keys, numbers = (size(values, key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    queries = size(values, "q_lora_rank")
    return (
        *(Module(name, (hidden,)) for name in ("input_layernorm", "post_attention_layernorm")),
        Module("self_attn.q_a_proj", (queries, hidden)),
        Module("self_attn.q_a_layernorm", (queries,)),
        Module("self_attn.q_b_proj", (heads * (keys + rope), queries)),
        Module("self_attn.kv_a_proj_with_mqa", (rank + rope, hidden)),
        Module("self_attn.kv_a_layernorm", (rank,)),
        Module("self_attn.embed_q", (heads, rank, keys)),
        Module("self_attn.unembed_out", (heads, numbers, rank)),
        Module("self_attn.o_proj", (hidden, heads * numbers)),
        *_deepseek_feed_forward(config, values, index),
    )


def _deepseek_feed_forward(config: Config, values: Values, index: int) -> tuple[Module, ...]:
    hidden = config.hidden_size
    if index < size(values, "first_k_dense_replace", default=0) or index % size(values, "moe_layer_freq", default=1):
        return _feed_forward("mlp", config.intermediate_size, hidden)
    count, width = size(values, "n_routed_experts"), size(values, "moe_intermediate_size")
    return (
        # The runtime keeps the router as numbers of its own, which are not packed with the matrices.
        Module("mlp.gate", (count, hidden), packed=False),
        Module("mlp.gate.e_score_correction_bias", (count,)),
        *_experts("mlp.switch_mlp", count, width, hidden),
        *_feed_forward("mlp.shared_experts", width * size(values, "n_shared_experts"), hidden),
    )


def _attention(config: Config, model_type: str) -> tuple[Module, ...]:
    """The layer of a type without its feed-forward part."""
    modules = architectures.LAYER_MODULES[model_type](config)
    return tuple(module for module in modules if not module.name.startswith("mlp."))


def _routed(config: Config, values: Values) -> tuple[Module, ...]:
    count, width = size(values, "num_experts"), size(values, "moe_intermediate_size")
    gate = Module("mlp.gate", (count, config.hidden_size))
    return (gate, *_experts("mlp.switch_mlp", count, width, config.hidden_size))


def _experts(name: str, count: int, width: int, hidden: int, *, bias: bool = False) -> tuple[Module, ...]:
    return tuple(
        Module(module.name, (count, *module.weight_shape), bias=bias) for module in _feed_forward(name, width, hidden)
    )


def _feed_forward(name: str, width: int, hidden: int) -> tuple[Module, ...]:
    wide = tuple(Module(f"{name}.{part}", (width, hidden)) for part in ("gate_proj", "up_proj"))
    return (*wide, Module(f"{name}.down_proj", (hidden, width)))


def _sparse(values: Values, index: int) -> bool:
    """Whether the layer has experts."""
    dense = values.get("mlp_only_layers") or ()
    return index not in dense and (index + 1) % size(values, "decoder_sparse_step", default=1) == 0


def _plain(modules: Callable[[Config], tuple[Module, ...]]) -> Layer:
    return lambda config, values, index: modules(config)


LAYERS: Final[Mapping[str, Layer]] = {
    **{model_type: _plain(modules) for model_type, modules in architectures.LAYER_MODULES.items()},
    "deepseek_v3": _deepseek_v3,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
}
"""The types there is a formula for, each held to what the runtime makes of it."""


class Packing(NamedTuple):
    """How many bits a number takes, and how many numbers share a scale and a bias."""

    bits: int
    group_size: int


def computed(folder: Path, *, model_id: str, source: str, digest: str) -> model_pb2.Model:
    """The model that config.json in `folder` describes, marked as computed.

    Raises ModelFolderError where it says too little, or for a type there is no formula for.
    """
    config, values = read_config(folder), read_values(folder)
    layer = LAYERS.get(config.model_type)
    if layer is None:
        raise ModelFolderError(
            f"what a {config.model_type} weighs is known from its files only: bring them here; "
            f"formulas exist for {', '.join(sorted(LAYERS))}"
        )
    scale = _Scale(config, values)
    weights = Weights(
        layers=[scale.weigh(layer(config, values, index), f"model.layers.{index}.") for index in range(config.layers)],
        embedding=scale.weigh([architectures.embedding_module(config)]),
        head=scale.weigh(architectures.head_modules(config)),
        tied_embedding=config.tied_embedding,
        stored_as=scale.in_words(),
    )
    model = model_of(config, weights, model_id=model_id, source=source, digest=digest)
    model.computed_from_config = True
    return model


class _Scale:
    """Weighs modules by their shapes."""

    def __init__(self, config: Config, values: Values) -> None:
        self._chosen = config.experts_per_token
        self._said = config.quantization
        self._float_name = str(values.get("torch_dtype") or values.get("dtype") or "bfloat16")
        self._float_bytes = FLOAT_BYTES.get(self._float_name, FLOAT_BYTES_DEFAULT)

    def weigh(self, modules: Iterable[Module], prefix: str = "") -> model_pb2.Weight:
        """What the modules take as stored, and how many numbers they hold."""
        weight, active = model_pb2.Weight(), 0
        for module in modules:
            numbers = math.prod(module.weight_shape)
            extra = math.prod(module.weight_shape[:-1]) if module.bias else 0
            weight.stored_bytes += self._stored_bytes(module, numbers, prefix) + extra * self._float_bytes
            weight.parameters += numbers + extra
            count = module.weight_shape[0] if ".switch_mlp." in module.name or ".experts." in module.name else 0
            chosen = min(self._chosen or count, count)
            active += (numbers + extra) * chosen // count if count else numbers + extra
        if active < weight.parameters:
            weight.active_parameters = active
        return weight

    def in_words(self) -> str:
        """How the weights are stored, e.g. "4-bit, groups of 64"."""
        packing = self._packing("")
        return self._float_name if packing is None else f"{packing.bits}-bit, groups of {packing.group_size}"

    def _stored_bytes(self, module: Module, numbers: int, prefix: str) -> int:
        packing = self._packing(prefix + module.name)
        if packing is None or len(module.weight_shape) < 2 or not module.packed:
            return numbers * self._float_bytes
        return numbers * packing.bits // 8 + numbers // packing.group_size * GROUP_BYTES

    def _packing(self, name: str) -> Packing | None:
        """How a module is packed: as config.json says of it, or else of all."""
        said = self._said
        if said is None or said.get(name) is False:
            return None
        own = said.get(name)
        found = own if isinstance(own, dict) else said
        return Packing(size(found, "bits", largest=8), size(found, "group_size"))
