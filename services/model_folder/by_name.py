"""What a model weighs by the names of its tensors, where their shapes are not told by config.json alone.

Rules this module lives by:
- Every tensor is of a layer, of the embedding, or of the head; one that is of none is refused, not guessed at.
- The runner sorts the runtime's parameters by the same names, so that what is weighed here is what a shard loads.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from services.model_folder.config import Config
from services.model_folder.errors import ModelFolderError
from services.model_folder.safetensors import Tensor
from ullage.v1 import model_pb2

Part: TypeAlias = int | Literal["embedding", "head"]
"""A layer by its number, what comes before the layers, or what comes after them."""

BITS: Final = frozenset({2, 3, 4, 5, 6, 8})
GROUP_SIZES: Final = frozenset({32, 64, 128})
"""What the runtime unpacks: with others a folder would be taken, and no shard of it would start."""

FLOAT_NAMES: Final[Mapping[str, str]] = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_UNUSED: Final = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$")
"""Tensors of older files that the runtime computes by itself."""

_LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens|embed_in|wte|wpe|word_embeddings|tok_embeddings|embeddings?)\.[a-z]+$"
)
_HEAD: Final = re.compile(
    r"(?:^|\.)(?:norm|norm_f|ln_f|final_layernorm|final_layer_norm|final_norm|embedding_norm|lm_head|embed_out|output)\.[a-z]+$"
)
_EXPERTS: Final = re.compile(r"\.(?:experts|switch_mlp)\.(?:(\d+)\.)?|\.block_sparse_moe\.(?:input|output)_linear\.")
"""Tensors of the experts a token is sent to: one expert's by its number, else those of all, one behind the other."""
_MATRIX_OF_HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.")


class Weights(NamedTuple):
    """What the parts of a model weigh."""

    layers: Sequence[model_pb2.Weight]
    embedding: model_pb2.Weight
    head: model_pb2.Weight
    tied_embedding: bool
    stored_as: str


def is_unused(name: str) -> bool:
    """Whether the tensor is one of an older file that the runtime computes by itself, and is not to be given."""
    return _UNUSED.search(name) is not None


def is_matrix_of_head(name: str) -> bool:
    """Whether the tensor is of what makes scores of the last hidden state; where the embedding does, it is a copy."""
    return _MATRIX_OF_HEAD.search(name) is not None


def part_of(name: str) -> Part | None:
    """The part of a model that the tensor or parameter `name` belongs to; None when it cannot be told."""
    layer = _LAYER.search(name)
    if layer is not None:
        return int(layer.group(1))
    if _EMBEDDING.search(name):
        return "embedding"
    return "head" if _HEAD.search(name) else None


def in_words(packings: Counter[tuple[int, int]], dtypes: Counter[str]) -> str:
    """How weights are stored, e.g. "4-bit, groups of 32; 1 part 8-bit, groups of 32".

    `packings` counts parts by bits and group size, `dtypes` the matrices that are not packed.
    """
    if not packings:
        return FLOAT_NAMES[max(dtypes, key=lambda dtype: dtypes[dtype])] if dtypes else ""
    (usual, _), *others = packings.most_common()
    words = [_packing_in_words(usual)]
    words += [f"{count} {'part' if count == 1 else 'parts'} {_packing_in_words(each)}" for each, count in others]
    return "; ".join(words)


def _packing_in_words(packing: tuple[int, int]) -> str:
    bits, group_size = packing
    return f"{bits}-bit, groups of {group_size}"


def weigh(config: Config, tensors: Mapping[str, Tensor]) -> Weights:
    """The weights of the model made of `tensors`. Raises ModelFolderError for one that is of no part."""
    scale = _Scale(config, tensors)
    is_tied = config.says_tied or not any(map(is_matrix_of_head, tensors))
    for name, tensor in tensors.items():
        if not is_unused(name) and not (is_tied and is_matrix_of_head(name)):
            scale.add(name, tensor)
    empty = [str(index) for index in range(config.layers) if index not in scale.sums]
    if empty or "embedding" not in scale.sums:
        what = f"layer {empty[0]}" if empty else "the embedding"
        raise ModelFolderError(
            f"no tensor of {what} is in the folder's files: copy the model again, all of its *.safetensors"
        )
    layers = [scale.layer(index) for index in range(config.layers)]
    head = scale.sums.get("head", model_pb2.Weight())
    return Weights(layers, scale.sums["embedding"], head, is_tied, in_words(scale.packings, scale.dtypes))


@dataclass
class _Experts:
    """What a layer's experts hold together."""

    parameters: int = 0
    count: int = 0


@dataclass
class _Scale:
    """Adds up tensors by part."""

    config: Config
    tensors: Mapping[str, Tensor]
    sums: dict[Part, model_pb2.Weight] = field(default_factory=dict)
    packings: Counter[tuple[int, int]] = field(default_factory=Counter)
    dtypes: Counter[str] = field(default_factory=Counter)
    experts: dict[int, _Experts] = field(default_factory=dict)

    def layer(self, index: int) -> model_pb2.Weight:
        """A layer's sums, with what one token is multiplied with where it goes through some of the experts only."""
        weight, experts, chosen = self.sums[index], self.experts.get(index), self.config.experts_per_token
        if experts is not None and chosen is not None and chosen < experts.count:
            # Experts are alike, so that each has its part of what all of them hold.
            weight.active_parameters = (
                weight.parameters - experts.parameters * (experts.count - chosen) // experts.count
            )
        return weight

    def add(self, name: str, tensor: Tensor) -> None:
        part = part_of(name)
        if part is None:
            raise ModelFolderError(
                f"tensor {name} in {tensor.file_name} is no part of a {self.config.model_type} model of "
                f"{self.config.layers} layers: config.json and weights do not match"
            )
        if isinstance(part, int) and part >= self.config.layers:
            # Layers that only guess further tokens come after the last; the runtime leaves them out.
            return
        weight = self.sums.setdefault(part, model_pb2.Weight())
        weight.stored_bytes += tensor.stored_bytes
        parameters = self._parameters(name, tensor)
        weight.parameters += parameters
        found = _EXPERTS.search(name)
        if isinstance(part, int) and found is not None:
            experts = self.experts.setdefault(part, _Experts())
            experts.parameters += parameters
            experts.count = max(experts.count, int(found[1]) + 1 if found[1] else tensor.shape[0])

    def _parameters(self, name: str, tensor: Tensor) -> int:
        module, _, kind = name.rpartition(".")
        scales = self.tensors.get(f"{module}.scales")
        if scales is None:
            if len(tensor.shape) > 1:
                self._check_float(name, tensor)
                self.dtypes[tensor.dtype] += 1
            return math.prod(tensor.shape)
        if kind != "weight":
            # A bias is a number of the model's; scales and biases of groups are not.
            return math.prod(tensor.shape) if kind == "bias" else 0
        return self._unpacked(module, tensor, scales)

    def _unpacked(self, module: str, weight: Tensor, scales: Tensor) -> int:
        group_size = _group_size(self.config.quantization or {}, module)
        columns = scales.shape[-1] * group_size if scales.shape else 0
        bits, odd_bits = divmod(weight.shape[-1] * 32, columns) if columns and weight.shape else (0, 1)
        if (
            odd_bits
            or bits not in BITS
            or group_size not in GROUP_SIZES
            or weight.dtype != "U32"
            or weight.shape[:-1] != scales.shape[:-1]
        ):
            raise ModelFolderError(
                f"the quantisation of {module} in {weight.file_name} is not understood: {weight.dtype} "
                f"{list(weight.shape)} with scales {scales.dtype} {list(scales.shape)}; take an MLX conversion "
                "(affine) with its own config.json"
            )
        self.packings[bits, group_size] += 1
        return math.prod(weight.shape[:-1]) * columns

    def _check_float(self, name: str, tensor: Tensor) -> None:
        if tensor.dtype not in FLOAT_NAMES:
            raise ModelFolderError(
                f"the quantisation of tensor {name} in {tensor.file_name} ({tensor.dtype}) is not understood: "
                "take an MLX conversion of the model (affine, 2 to 8 bits), or one that is not quantised"
            )


def _group_size(quantization: Mapping[str, Any], module: str) -> int:
    """What config.json says of the module, or else of all; 0 where it says nothing that can be."""
    said = quantization.get(module)
    found = (said if isinstance(said, dict) else quantization).get("group_size", 0)
    return found if type(found) is int and found > 0 else 0
