"""What a model weighs, summed from the headers of its files: no tensor is read, and nothing is averaged."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from services.model_folder import architectures, by_name
from services.model_folder.architectures import Module
from services.model_folder.by_name import BITS, FLOAT_NAMES, GROUP_SIZES, Weights, in_words, is_unused
from services.model_folder.config import Config, read_config
from services.model_folder.errors import ModelFolderError
from services.model_folder.safetensors import Tensor, read_header
from ullage.v1 import model_pb2

INDEX_FILE: Final = "model.safetensors.index.json"
KV_ALLOCATION_STEP_TOKENS: Final = 256
"""Tokens by which MLX's cache grows."""

_SCALE_DTYPES: Final = frozenset({"F16", "BF16", "F32"})


def weigh(folder: Path, *, model_id: str, source: str, digest: str) -> model_pb2.Model:
    """The model in `folder`. Raises ModelFolderError unless every tensor it needs is there, whole and of its shape."""
    config = read_config(folder)
    tensors = read_tensors(folder)
    if config.model_type in architectures.LAYER_MODULES:
        weights = _weights_by_shape(config, tensors)
    else:
        weights = by_name.weigh(config, tensors)
    return model_of(config, weights, model_id=model_id, source=source, digest=digest)


def model_of(config: Config, weights: Weights, *, model_id: str, source: str, digest: str) -> model_pb2.Model:
    """The model of the shape that config.json says, whose parts weigh so."""
    kept = zip(weights.layers, config.kv_windows_tokens, config.keeps, strict=True)
    layers = [
        model_pb2.Layer(
            weight=weight,
            kv_elements_per_token=config.kv_elements if keeps.attends else 0,
            kv_window_tokens=window_tokens if keeps.attends else None,
            state_elements=keeps.state_elements,
        )
        for weight, window_tokens, keeps in kept
    ]
    return model_pb2.Model(
        model_id=model_id,
        model_type=config.model_type,
        layers=layers,
        embedding=weights.embedding,
        head=weights.head,
        tied_embedding=weights.tied_embedding,
        hidden_size=config.hidden_size,
        intermediate_size=max(config.intermediate_size, config.experts_size),
        vocabulary_size=config.vocabulary_size,
        attention_heads=config.attention_heads,
        kv_heads=config.kv_heads,
        kv_allocation_step_tokens=KV_ALLOCATION_STEP_TOKENS,
        context_tokens_max=config.context_tokens_max,
        quantization=weights.stored_as,
        source=source,
        digest=digest,
    )


def _weights_by_shape(config: Config, tensors: Mapping[str, Tensor]) -> Weights:
    """The weights of a model whose every tensor and its shape is known from config.json."""
    scale = _Scale(config, tensors)
    modules = architectures.LAYER_MODULES[config.model_type](config)
    layers = [scale.weigh(_in_layer(index, modules)) for index in range(config.layers)]
    embedding = scale.weigh([architectures.embedding_module(config)])
    head = scale.weigh(architectures.head_modules(config))
    scale.check_nothing_left()
    return Weights(layers, embedding, head, config.tied_embedding, scale.in_words())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder by name. Raises ModelFolderError where a file is missing or not whole."""
    # The runtime reads these and no others.
    paths = sorted(folder.glob("model*.safetensors"))
    _check_index(folder, {path.name for path in paths})
    if not paths:
        raise ModelFolderError(f"{folder.name or folder} has no model*.safetensors: copy the weights into it")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise ModelFolderError(
                    f"tensor {name} is in both {tensors[name].file_name} and {path.name}: "
                    "remove the files that are not the model's"
                )
            tensors[name] = tensor
    return tensors


def _check_index(folder: Path, file_names: set[str]) -> None:
    path = folder / INDEX_FILE
    if not path.exists():
        return
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        listed = set(weight_map.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelFolderError(f"{INDEX_FILE} cannot be understood: copy it again") from error
    if missing := sorted(str(name) for name in listed - file_names):
        raise ModelFolderError(f"{INDEX_FILE} lists {', '.join(missing)}, not in the folder: copy what is missing")


def _in_layer(index: int, modules: Iterable[Module]) -> list[Module]:
    return [Module(f"model.layers.{index}.{m.name}", m.weight_shape, bias=m.bias) for m in modules]


class _Scale:
    """Weighs modules, and remembers what it weighed: in the end every tensor has been, once."""

    def __init__(self, config: Config, tensors: Mapping[str, Tensor]) -> None:
        self._config = config
        self._tensors = tensors
        self._seen: set[str] = set()
        self._packings: Counter[tuple[int, int]] = Counter()
        self._dtypes: Counter[str] = Counter()

    def weigh(self, modules: Iterable[Module]) -> model_pb2.Weight:
        """The modules' bytes as stored and their numbers once dequantised, together."""
        stored_bytes = parameters = 0
        for module in modules:
            tensors = self._weight(module)
            parameters += math.prod(module.weight_shape)
            if module.bias:
                tensors.append(self._shaped(f"{module.name}.bias", module.weight_shape[:1]))
                parameters += module.weight_shape[0]
            stored_bytes += sum(tensor.stored_bytes for tensor in tensors)
        return model_pb2.Weight(stored_bytes=stored_bytes, parameters=parameters)

    def check_nothing_left(self) -> None:
        """Raises ModelFolderError for a tensor that is no part of the model: the runtime would refuse it."""
        ignored = {"lm_head.weight", "lm_head.scales", "lm_head.biases"} if self._config.tied_embedding else set()
        left = sorted(name for name in self._tensors.keys() - self._seen - ignored if not is_unused(name))
        if left:
            others = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
            raise ModelFolderError(
                f"tensor {left[0]}{others} in {self._tensors[left[0]].file_name} is no part of a "
                f"{self._config.model_type} model of {self._config.layers} layers: config.json and weights do not match"
            )

    def in_words(self) -> str:
        """How the weights are stored, e.g. "4-bit, groups of 32; 1 part 8-bit, groups of 32"."""
        return in_words(self._packings, self._dtypes)

    def _weight(self, module: Module) -> list[Tensor]:
        if f"{module.name}.scales" in self._tensors:
            return self._quantized(module)
        weight = self._shaped(f"{module.name}.weight", module.weight_shape)
        if len(module.weight_shape) > 1:
            self._dtypes[weight.dtype] += 1
        return [weight]

    def _quantized(self, module: Module) -> list[Tensor]:
        """The packed weight with its scales and biases."""
        weight, scales, biases = (self._taken(f"{module.name}.{part}") for part in ("weight", "scales", "biases"))
        is_said = self._config.quantization is not None
        packing = _packing(weight, scales, biases, module.weight_shape) if is_said else None
        if packing is None:
            raise ModelFolderError(
                f"the quantisation of {module.name} in {weight.file_name} is not understood: "
                f"{weight.dtype} {list(weight.shape)} with scales {scales.dtype} {list(scales.shape)} for a weight of "
                f"{list(module.weight_shape)}; take an MLX conversion (affine) with its own config.json"
            )
        self._packings[packing] += 1
        return [weight, scales, biases]

    def _shaped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._taken(name)
        if tensor.dtype not in FLOAT_NAMES:
            raise ModelFolderError(
                f"the quantisation of tensor {name} in {tensor.file_name} ({tensor.dtype}) is not understood: "
                "take an MLX conversion of the model (affine, 2 to 8 bits), or one that is not quantised"
            )
        if tensor.shape != shape:
            raise ModelFolderError(
                f"tensor {name} in {tensor.file_name} is {list(tensor.shape)} where config.json makes it "
                f"{list(shape)}: config.json and weights are of two models"
            )
        return tensor

    def _taken(self, name: str) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelFolderError(
                f"tensor {name} is in none of the folder's files: copy the model again, all of its *.safetensors"
            )
        self._seen.add(name)
        return tensor


def _packing(weight: Tensor, scales: Tensor, biases: Tensor, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Bits and group size as MLX reads them off the shapes, or None where these make no sense."""
    if len(shape) != 2 or len(weight.shape) != 2 or len(scales.shape) != 2 or 0 in scales.shape:
        return None
    rows, columns = shape
    bits, odd_bits = divmod(weight.shape[1] * 32, columns)
    group_size, odd_numbers = divmod(columns, scales.shape[1])
    understood = (
        not odd_bits
        and not odd_numbers
        and bits in BITS
        and group_size in GROUP_SIZES
        and weight.shape[0] == scales.shape[0] == rows
        and weight.dtype == "U32"
        and scales.dtype in _SCALE_DTYPES
        and (scales.dtype, scales.shape) == (biases.dtype, biases.shape)
    )
    return (bits, group_size) if understood else None
