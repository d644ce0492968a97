"""Which types of models can be split, and why the others cannot.

A type is admitted when a split of it at every layer gives, bit for bit, what the whole gives, and its cache takes
what is promised for it: tests/runner/shard proves both for every type named here. docs/architectures.md is printed
from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from services.model_folder import kv_cache, states
from services.model_folder.kv_cache import ElementsRule, WindowsRule
from services.model_folder.states import StatesRule

FULL: Final = frozenset({"full_attention"})
FULL_OR_SLIDING: Final = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Architecture:
    """What must be known of a type beside its tensors."""

    kv_elements: ElementsRule = kv_cache.heads
    windows: WindowsRule = kv_cache.no_windows
    states: StatesRule = states.none
    kinds: frozenset[str] = FULL
    """What config.json's layer_types, where there are any, may name."""
    module: str = ""
    """The runtime's module for it, where that is not named like the type."""
    side_by_side: bool = True
    """Whether the runtime can take several sequences, of different lengths, further in one step."""
    attends: bool = True
    """Without any layer that does, config.json names neither heads nor a longest context."""
    short_of_window: bool = False
    """The runtime ignores the model's windows, so a context must not reach beyond one."""


_HEADS: Final = Architecture()
_LINEAR: Final = frozenset({"full_attention", "linear_attention"})
_CONVOLVED: Final = Architecture(
    states=states.where(states.not_full_attention, states.short_convolution),
    kinds=frozenset({"full_attention", "conv"}),
)
_LATENT: Final = Architecture(kv_elements=kv_cache.latent)
_UNFOLDED: Final = Architecture(kv_elements=kv_cache.latent_unfolded)
_BY_KIND: Final = Architecture(windows=kv_cache.by_layer_types, kinds=FULL_OR_SLIDING)


def _sliding(windows: WindowsRule) -> Architecture:
    return Architecture(windows=windows, kinds=FULL_OR_SLIDING)


ADMITTED: Final[Mapping[str, Architecture]] = {
    "Klear": _HEADS,
    "afmoe": _BY_KIND,
    "apertus": _HEADS,
    "bailing_moe": _HEADS,
    "bailing_moe_v3": Architecture(kv_elements=kv_cache.latent, states=states.where(states.by_groups, states.kda)),
    "cohere": _HEADS,
    "cohere2": _sliding(kv_cache.by_pattern(4)),
    "deepseek": _HEADS,
    "deepseek_v2": _UNFOLDED,
    "deepseek_v3": _LATENT,
    "deepseek_v32": Architecture(kv_elements=kv_cache.latent_indexed),
    "dots1": _HEADS,
    "ernie4_5": _HEADS,
    "ernie4_5_moe": _HEADS,
    "exaone": _HEADS,
    "exaone4": _sliding(kv_cache.by_letters),
    "exaone_moe": _BY_KIND,
    "falcon_h1": Architecture(states=states.everywhere(states.mamba2_heads, attends=True)),
    "falcon_mamba": Architecture(
        kv_elements=kv_cache.nothing,
        states=states.everywhere(states.mamba, attends=False),
        attends=False,
        module="mamba",
    ),
    "gemma": _HEADS,
    "gemma2": Architecture(kinds=FULL_OR_SLIDING, short_of_window=True, side_by_side=False),
    "gemma3_text": _sliding(kv_cache.by_pattern(6)),
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe": _HEADS,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": Architecture(kv_elements=kv_cache.latent_indexed),
    "gpt2": Architecture(kv_elements=kv_cache.every_head),
    "gpt_bigcode": Architecture(kv_elements=kv_cache.one_head_or_every, side_by_side=False),
    "gpt_neox": Architecture(kv_elements=kv_cache.every_head),
    "gpt_oss": _sliding(kv_cache.by_layer_types_or(lambda place: place % 2 == 0)),
    "granite": _HEADS,
    "granitemoe": _HEADS,
    "granitemoehybrid": Architecture(
        states=states.where(states.mamba_by_types, states.mamba2_heads), kinds=frozenset({"mamba", "attention"})
    ),
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "internlm2": _HEADS,
    "internlm3": _HEADS,
    "iquestcoder": Architecture(windows=kv_cache.by_layer_types, kinds=FULL_OR_SLIDING, module="llama"),
    "jamba": Architecture(states=states.where(states.mamba_by_blocks, states.mamba_expanded)),
    "joyai_llm_flash": Architecture(kv_elements=kv_cache.latent, module="deepseek_v3"),
    "kimi_k2": Architecture(kv_elements=kv_cache.latent, module="deepseek_v3"),
    "kimi_linear": Architecture(
        kv_elements=kv_cache.latent, states=states.where(states.by_linear_config, states.kda_apart)
    ),
    "laguna": _BY_KIND,
    "lfm2": _CONVOLVED,
    "lfm2_moe": _CONVOLVED,
    "lille-130m": _HEADS,
    "llama": _BY_KIND,
    "longcat_flash": Architecture(kv_elements=kv_cache.latent_twice),
    "mamba": Architecture(
        kv_elements=kv_cache.nothing, states=states.everywhere(states.mamba, attends=False), attends=False
    ),
    "mamba2": Architecture(
        kv_elements=kv_cache.nothing, states=states.everywhere(states.mamba2, attends=False), attends=False
    ),
    "mellum": _BY_KIND,
    "mimo": _HEADS,
    "mimo_v2_flash": Architecture(windows=kv_cache.by_hybrid_pattern),
    "minicpm": _HEADS,
    "minicpm3": _UNFOLDED,
    "minimax": _HEADS,
    "minimax_m2": Architecture(module="minimax"),
    "ministral3": _BY_KIND,
    "mistral": Architecture(windows=kv_cache.by_layer_types, kinds=FULL_OR_SLIDING, module="llama"),
    "mistral4": _LATENT,
    "mixtral": _HEADS,
    "nanochat": _HEADS,
    "nemotron": _HEADS,
    "olmo2": _HEADS,
    "olmo3": _sliding(kv_cache.by_layer_types_or(lambda place: (place + 1) % 4 != 0)),
    "olmoe": _HEADS,
    "phi": _HEADS,
    "phi3": _HEADS,
    "phimoe": _HEADS,
    "qwen": Architecture(kv_elements=kv_cache.every_head),
    "qwen2": _HEADS,
    "qwen2_moe": _HEADS,
    "qwen3": _HEADS,
    "qwen3_moe": _HEADS,
    "qwen3_next": Architecture(states=states.where(states.by_interval, states.delta), kinds=_LINEAR),
    "recurrent_gemma": Architecture(
        kv_elements=kv_cache.one_head,
        windows=kv_cache.by_attention_window,
        states=states.where(states.by_block_types, states.recurrence),
    ),
    "seed_oss": _HEADS,
    "smollm3": _HEADS,
    "solar_open": _HEADS,
    "spark2_5": _BY_KIND,
    "stablelm": _HEADS,
    "starcoder2": _HEADS,
    "step3p5": _BY_KIND,
    "telechat3": _HEADS,
    "xverse": Architecture(windows=kv_cache.by_layer_types, kinds=FULL_OR_SLIDING, module="llama"),
    "youtu_llm": _UNFOLDED,
}

_PLACE: Final = "its layers that keep a state ask others, which may be on another rank, for the place in the sequence"
_PICTURES: Final = "it wraps a language model with one for pictures, which is not read here yet"
_SIZES: Final = "its config.json names its sizes in a way of its own, which is not read here yet"
_SHARED: Final = "its layers hand more than a hidden state to the next one"
_LOOPS: Final = "its layers may run more than once for each token"
_NESTED: Final = "the runtime keeps its layers in a module of their own, which is not followed here yet"
_CACHES: Final = "its caches are not one for each layer"

REFUSED: Final[Mapping[str, str]] = {
    "afm7": _CACHES,
    "baichuan_m1": "the runtime makes no head for it where that is tied",
    "bailing_hybrid": _PLACE,
    "bailing_moe_linear": _PLACE,
    "bitnet": "its products exist for Metal only",
    "dbrx": _SIZES,
    "deepseek_v41": _SHARED,
    "deepseek_v41_text": _SHARED,
    "gear": "no model of this type was at hand to see what its config.json says",
    "gemma3": _PICTURES,
    "gemma3n": _PICTURES,
    "gemma4": _PICTURES,
    "gemma4_text": _SHARED,
    "gemma4_unified": _PICTURES,
    "gptj": "the runtime calls its layers in a way of its own, which is not followed here yet",
    "hunyuan": _SHARED,
    "iquestloopcoder": _LOOPS,
    "kimi_k25": _PICTURES,
    "kimi_k3": _PICTURES,
    "kimi_vl": _PICTURES,
    "lfm2-vl": _PICTURES,
    "llama4": _PICTURES,
    "llama4_text": "the runtime keeps its caches in chunks, which no test with a chunk's length covers yet",
    "llava": _PICTURES,
    "longcat_flash_ngram": _CACHES,
    "minimax_m3_vl": _PICTURES,
    "mistral3": _PICTURES,
    "muse_glimmer": "no model of this type was at hand to see what its config.json says",
    "muse_spark": _PICTURES,
    "nanbeige": _LOOPS,
    "nemotron-nas": _CACHES,
    "nemotron_h": _CACHES,
    "olmo": "the runtime needs a package for it that is not installed",
    "olmo_hybrid": _PLACE,
    "openelm": _SIZES,
    "phi-msft": _SIZES,
    "phi3small": "the runtime crashes on a processor without Metal",
    "phixtral": _SIZES,
    "pixtral": _PICTURES,
    "plamo": _NESTED,
    "plamo2": _NESTED,
    "plamo3": _NESTED,
    "prism_hadamard_qwen35": _PICTURES,
    "qwen2_5_vl": _PICTURES,
    "qwen2_vl": _PICTURES,
    "qwen3_5": _PICTURES,
    "qwen3_5_moe": _PICTURES,
    "qwen3_vl": _PICTURES,
    "qwen3_vl_moe": _PICTURES,
    "rwkv7": _SHARED,
    "talkie": "its layers also take what came out of the embedding",
}
"""The runtime's other types, and what stands in the way of each."""


def refusal(values: Mapping[str, Any]) -> str | None:
    """Why the model with this config.json cannot be split; None when it can."""
    model_type = values.get("model_type")
    architecture = ADMITTED.get(str(model_type))
    if architecture is None:
        reason = REFUSED.get(str(model_type), "the runtime does not know the type")
        return f"architecture {model_type!r} cannot be split over nodes yet: {reason}"
    kinds = values.get("layer_types") or []
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        return f"config.json says layer_types is {kinds!r}, which is no list of names: copy it again"
    if set(kinds) - architecture.kinds:
        named = ", ".join(sorted(set(kinds)))
        return (
            f"this {model_type} has layers of kinds that cannot be split yet ({named}): use a model whose layers "
            "attend to the whole context"
        )
    return None
