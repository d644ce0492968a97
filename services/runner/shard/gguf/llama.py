"""GGUF's llama architecture in Hugging Face's words: config.json, and the names of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from services.runner.shard.gguf.blocks import BITS, GROUP_SIZE, UNDERSTOOD
from services.runner.shard.gguf.file import GgufError, GgufFile, TensorInfo

ARCHITECTURE: Final = "llama"

_LAYER_NAMES: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD: Final = "output.weight"


def modules(file: GgufFile) -> dict[str, TensorInfo]:
    """The tensors by the name of their module. Raises GgufError for one missing, not known, or not understood."""
    architecture = file.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise GgufError(
            f"{file.path.name} is of the architecture {architecture!r} and only {ARCHITECTURE!r} is converted: "
            "add the model from its Hugging Face or MLX folder instead"
        )
    layers = _integer(file, "block_count")
    if layers > len(file.tensors):
        # Else a damaged count would be believed, and its names made.
        raise GgufError(f"{file.path.name} lists {len(file.tensors)} tensors for {layers} layers: download it again")
    names = _module_names(layers, tied=_HEAD not in file.tensors)
    for name in names:
        if name not in file.tensors:
            raise GgufError(f"{file.path.name} has no tensor {name}: download it again")
    for info in file.tensors.values():
        _check(file, info, names)
    found = {module: file.tensors[name] for name, module in names.items()}
    _check_heads(file, found)
    return found


def _check_heads(file: GgufFile, found: Mapping[str, TensorInfo]) -> None:
    for module, info in found.items():
        heads = heads_permuted(file, module)
        if heads is not None and info.shape[0] % (2 * heads):
            raise GgufError(
                f"{file.path.name} is damaged: {info.name} does not divide into {heads} heads; download it again"
            )


def _module_names(layers: int, *, tied: bool) -> dict[str, str]:
    names = {"token_embd.weight": "model.embed_tokens", "output_norm.weight": "model.norm"}
    if not tied:
        names[_HEAD] = "lm_head"
    for index in range(layers):
        names |= {
            f"blk.{index}.{ours}.weight": f"model.layers.{index}.{theirs}" for ours, theirs in _LAYER_NAMES.items()
        }
    return names


def _check(file: GgufFile, info: TensorInfo, names: Mapping[str, str]) -> None:
    if info.name not in names:
        raise GgufError(
            f"{file.path.name} has a tensor {info.name}, which is not understood: "
            "add the model from its Hugging Face or MLX folder instead"
        )
    if info.kind not in UNDERSTOOD:
        raise GgufError(
            f"tensor {info.name} of {file.path.name} is quantised as {info.kind.name}, which MLX cannot hold: "
            f"take a file of {', '.join(sorted(kind.name for kind in UNDERSTOOD))}, or the model's MLX folder"
        )


def heads_permuted(file: GgufFile, module: str) -> int | None:
    """The heads by which GGUF permuted the rows of `module`, or None where it did not."""
    if module.endswith("q_proj"):
        return _integer(file, "attention.head_count")
    if module.endswith("k_proj"):
        return _kv_heads(file)
    return None


def config(file: GgufFile, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The content of config.json. Raises GgufError for a feature of the file it cannot express."""
    heads, hidden_size = _integer(file, "attention.head_count"), _integer(file, "embedding_length")
    head_dim = _integer(file, "attention.key_length", default=hidden_size // heads)
    _check_features(file, head_dim)
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "num_hidden_layers": _integer(file, "block_count"),
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(file),
        "head_dim": head_dim,
        "vocab_size": tensors["model.embed_tokens"].shape[0],
        "max_position_embeddings": _integer(file, "context_length"),
        "rms_norm_eps": _float(file, "attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": _float(file, "rope.freq_base", 10000.0),
        "tie_word_embeddings": "lm_head" not in tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    if quantization := _quantization(tensors):
        values["quantization"] = quantization
    return values


def _quantization(tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The usual bits, and those of each module that differs."""
    bits = {module: BITS[info.kind] for module, info in tensors.items() if info.kind in BITS}
    if not bits:
        return {}
    [(usual, _)] = Counter(bits.values()).most_common(1)
    others = {module: {"group_size": GROUP_SIZE, "bits": own} for module, own in bits.items() if own != usual}
    return {"group_size": GROUP_SIZE, "bits": usual, **others}


def _check_features(file: GgufFile, head_dim: int) -> None:
    scaling = _value(file, "rope.scaling.type")
    features = {
        f"rope scaling {scaling!r}": scaling not in {None, "none"},
        "a mixture of experts": bool(_value(file, "expert_count")),
        "rotation of a part of each head": _integer(file, "rope.dimension_count", default=head_dim) != head_dim,
        "values of another size than keys": _integer(file, "attention.value_length", default=head_dim) != head_dim,
    }
    for feature, present in features.items():
        if present:
            raise GgufError(
                f"{file.path.name} uses {feature}, which is not converted: "
                "add the model from its Hugging Face or MLX folder instead"
            )


def _kv_heads(file: GgufFile) -> int:
    return _integer(file, "attention.head_count_kv", default=_integer(file, "attention.head_count"))


def _value(file: GgufFile, key: str) -> Any:
    return file.metadata.get(f"{ARCHITECTURE}.{key}")


def _integer(file: GgufFile, key: str, *, default: int | None = None) -> int:
    value = _value(file, key)
    if value is None and default is not None:
        return default
    if type(value) is not int or value <= 0:
        raise GgufError(f"{file.path.name} says {ARCHITECTURE}.{key} is {value!r}: it is damaged, download it again")
    return value


def _float(file: GgufFile, key: str, default: float) -> float:
    value = _value(file, key)
    # Stored as float32: the shortest decimal that is the same float32 is what the author wrote.
    return default if value is None else float(str(np.float32(value)))
