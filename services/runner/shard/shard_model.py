"""One shard's weights and what they compute. Everything here runs on one thread, the one that loaded them.

MLX's arrays are promises until evaluated: the whole model is described lazily, cut, and only then are the
remaining parts read, one after the other, so that a shard reads its own bytes and nothing else, and holds
at no time more than its weights and one part in its stored form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import nan
from pathlib import Path
from typing import Any, Final, Literal

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear, quantize
from mlx.utils import tree_flatten, tree_map

from services import model_folder
from services.runner.shard import architecture
from services.runner.shard.architecture import Cut
from services.runner.shard.cache_room import make_room

WEIGHT_FILES: Final = "model*.safetensors"

BLOCK_BYTES: Final = 8 << 20
"""Of the floats that a packed weight is widened to at once: MLX takes as much again, and more, for what is between."""

_FLOAT_TAG: Final = "__float__"
_FLOATS: Final = ("Infinity", "-Infinity", "NaN")

WeightForm = Literal["float32", "stored"]
Progress = Callable[[int, int], None]
"""Called with the bytes that are in memory and the bytes that will be."""


class ModelLoadError(Exception):
    """The folder's weights do not make the model its config describes; str() says what is wrong."""


class ShardModel:
    """A range of a model's layers, with the embedding on the first rank and the head on the last."""

    def __init__(self, pieces: architecture.Pieces, dtype: mx.Dtype, *, side_by_side: bool) -> None:
        self._pieces = pieces
        self.side_by_side = side_by_side
        """Whether `forward_batch` and `scores_batch` may be used."""
        self.keeps_prefixes = pieces.keeps_prefixes
        """Whether `trim` cuts any of the model's caches, this shard's and others', to any beginning of a sequence."""
        self.dtype = dtype
        """The type of activations and KV cache."""

    def new_cache(self) -> list[Any]:
        """An empty KV cache for one sequence: an entry for each of the shard's layers."""
        return self._pieces.new_caches()

    def forward(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """The hidden states after this shard, a row for each token or row of `inputs`; `cache` grows by as many."""
        make_room(cache, inputs.shape[0])
        return self._pieces.hidden(inputs[None], cache)[0]

    def forward_batch(self, inputs: mx.array, caches: list[Any]) -> mx.array:
        """As `forward`, where each token or row of `inputs` is of another sequence, in the order of `caches`."""
        make_room(caches, 1)
        return self._pieces.hidden(inputs[:, None], caches)[:, 0]

    def scores(self, hidden: mx.array) -> mx.array:
        """The scores of the token that follows the last row of `hidden`. Only on the last rank."""
        return self._pieces.scores(hidden[None, -1:])[0, 0]

    def scores_batch(self, hidden: mx.array) -> mx.array:
        """The scores of the token that follows each row of `hidden`, all of other sequences. Only on the last rank."""
        return self._pieces.scores(hidden[:, None])[:, 0]


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json."""
    text = (folder / "config.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text, object_hook=_untagged)
    return {**_rotation(config), **config}


def _untagged(values: dict[str, Any]) -> Any:
    """`values`, or the number they stand for: JSON has no infinity, and newer files write {"__float__": "Infinity"}."""
    tag = values.get(_FLOAT_TAG)
    return float(tag) if len(values) == 1 and tag in _FLOATS else values


def _rotation(config: Mapping[str, Any]) -> dict[str, Any]:
    """What newer files say of rotary positions in `rope_parameters`, by the names that the runtime reads it by.

    Most of its models know no others, and would turn by what is usual for their type, and answer nonsense.
    """
    said = config.get("rope_parameters")
    if not isinstance(said, dict):
        return {}
    # Where layers slide, either for all of them or for each kind.
    whole, sliding = said.get("full_attention", said), said.get("sliding_attention")
    found = {key: whole[key] for key in ("rope_theta", "partial_rotary_factor") if whole.get(key) is not None}
    found["rope_scaling"] = None if whole.get("rope_type", "default") == "default" else whole
    if isinstance(sliding, dict) and "rope_theta" in sliding:
        found["rope_local_base_freq"] = sliding["rope_theta"]
    return found


def load(folder: Path, cut: Cut, form: WeightForm, *, on_cpu: bool, progress: Progress) -> ShardModel:
    """The shard of the model in `folder` that `cut` names, in memory.

    Raises UnsupportedModelError for a model that cannot be split, ModelLoadError for weights that do not
    fit its config.
    """
    config = read_config(folder)
    model = architecture.build(config)
    _bind(model, config, folder)
    architecture.leave_out(model, cut)
    widened = _Widened()
    if form == "float32":
        _dequantise(model, widened)
    elif on_cpu:
        _widen_vectors(model)
    dtype = mx.float32 if on_cpu or form == "float32" else _float_type(model.layers[cut.first_layer])
    # A GPU is given a step as a whole: there it was never measured what pieces of one gain.
    pieces = architecture.Pieces(model, cut, dtype, at_once=on_cpu)
    _evaluate(pieces.parts, widened, progress)
    return ShardModel(pieces, dtype, side_by_side=architecture.admit(config).side_by_side)


def try_out(model: ShardModel, cut: Cut, *, hidden_size: int, tokens: int) -> None:
    """Compute a chunk of `tokens` as a rank before would send it, so that the first request meets nothing new.

    Raises ModelLoadError when what comes out is no number: weights that were damaged, or do not fit each other.
    """
    if cut.is_first:
        inputs = mx.zeros((tokens,), dtype=mx.int32)
    else:
        inputs = mx.random.normal((tokens, hidden_size), key=mx.random.key(0)).astype(model.dtype)
    made = model.forward(inputs, model.new_cache())
    if cut.is_last:
        made = model.scores(made)
    if not bool(mx.isfinite(made).all()):
        raise ModelLoadError(
            f"layers {cut.first_layer} to {cut.end_layer - 1} give no numbers: some of the weights are damaged; run "
            "`ullage models add` again"
        )


def _bind(model: Any, config: architecture.Config, folder: Path) -> None:
    """Give `model` the arrays of the folder's files, without reading them."""
    weights: dict[str, mx.array] = {}
    for path in sorted(folder.glob(WEIGHT_FILES)):
        loaded: Any = mx.load(str(path))
        weights.update((name, array) for name, array in loaded.items() if not model_folder.is_unused(name))
    if hasattr(model, "sanitize"):
        weights = model.sanitize(weights)
    if config.get("tie_word_embeddings") is True:
        weights = _without_copy_of_head(model, weights)
    if "quantization" in config:
        _quantise_like(model, config["quantization"], weights)
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelLoadError(
            f"the weights in {folder.name} are not those its config.json describes: {error}"
        ) from error
    model.eval()


def _without_copy_of_head(model: Any, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The weights of a model whose head is its embedding, without the copy that some files hold besides."""
    flat: Any = tree_flatten(model.parameters())
    known = {name for name, _ in flat}
    return {
        name: array
        for name, array in weights.items()
        if not model_folder.is_matrix_of_head(name) or f"{name.rpartition('.')[0]}.weight" in known
    }


def _quantise_like(model: Any, quantization: Mapping[str, Any], weights: Mapping[str, mx.array]) -> None:
    """Make those modules quantised whose weights are, each with its own bits and group size."""

    def parameters(path: str, module: Any) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        columns = module.weight.shape[-1]
        group_size = columns // weights[f"{path}.scales"].shape[-1]
        bits = weights[f"{path}.weight"].shape[-1] * 32 // columns
        return {"group_size": group_size, "bits": bits, "mode": quantization.get("mode", "affine")}

    quantize(model, class_predicate=parameters)


class _Widened:
    """Weights that are packed in their files and 4-byte floats here: described now, and filled when they are read."""

    def __init__(self) -> None:
        self._packed: dict[int, Any] = {}
        """By what stands for its weight, the module that holds it packed."""

    def weight(self, module: Any) -> mx.array:
        """The weight of a quantised module, of numbers once `fill` was called with it."""
        rows, *others = module.scales.shape
        columns = module.weight.shape[-1] * 32 // module.bits
        # One that was forgotten would be noticed: a shard is tried out before it runs.
        weight = mx.full((rows, *others[:-1], columns), nan, mx.float32)
        if weight.nbytes <= BLOCK_BYTES:
            return _floats(module, slice(0, rows))
        self._packed[id(weight)] = module
        return weight

    def fill(self, weight: mx.array) -> None:
        """Widen the weight block by block, each where it is to lie; any other array is left as it is."""
        module = self._packed.pop(id(weight), None)
        if module is None:
            return
        rows = weight.shape[0]
        step = max(1, BLOCK_BYTES * rows // weight.nbytes)
        for first in range(0, rows, step):
            weight[first : first + step] = _floats(module, slice(first, first + step))
            mx.eval(weight)


def _floats(module: Any, rows: slice) -> mx.array:
    """Those rows of a quantised module's weight, as 4-byte floats."""
    biases = module.get("biases")
    return mx.dequantize(
        module.weight[rows],
        # Widened first: the products are then exact.
        module.scales[rows].astype(mx.float32),
        None if biases is None else biases[rows].astype(mx.float32),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def _dequantise(model: Any, widened: _Widened) -> None:
    """Make every parameter a 4-byte float, once it is evaluated and `widened` has filled it."""

    def plain(module: Any) -> Any:
        return _plain(module, widened)

    model.update_modules(tree_map(plain, model.leaf_modules(), is_leaf=Module.is_module))
    # What stands for a weight stays the array it is.
    model.apply(lambda array: array.astype(mx.float32) if _is_float(array) and array.dtype != mx.float32 else array)


def _plain(module: Any, widened: _Widened) -> Any:
    """The unquantised twin of a quantised module of this shard; any other as it is."""
    plain = None if architecture.is_left_out(module) else _twin(module)
    if plain is None:
        return module
    if "bias" in module:
        plain.bias = module.bias
    plain.weight = widened.weight(module)
    return plain


def _twin(module: Any) -> Any:
    """A module like the quantised `module` that takes plain weights; None where it is not quantised."""
    switch, mla = architecture.runtime_module("switch_layers"), architecture.runtime_module("mla")
    twin: Any = None
    if isinstance(module, QuantizedEmbedding):
        twin = Embedding(1, 1)
    elif isinstance(module, QuantizedLinear):
        twin = Linear(1, 1, bias=False)
    elif isinstance(module, switch.QuantizedSwitchLinear):
        twin = switch.SwitchLinear(1, 1, 1, bias=False)
    elif isinstance(module, mla.QuantizedMultiLinear):
        twin = mla.MultiLinear(1, 1, 1)
    return twin


def _widen_vectors(model: Any) -> None:
    """Make norms and biases 4-byte floats: small, and the CPU is slow at mixing types."""
    model.apply(lambda array: array.astype(mx.float32) if array.ndim == 1 and _is_float(array) else array)


def _is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _float_type(module: Any) -> mx.Dtype:
    return next(array.dtype for array in _arrays(module) if _is_float(array))


def _arrays(module: Any) -> list[mx.array]:
    flat: Any = tree_flatten(module.parameters())
    return [array for _, array in flat]


def _evaluate(parts: Sequence[Sequence[mx.array]], widened: _Widened, progress: Progress) -> None:
    """Read the parts, one after the other."""
    sizes = [sum(array.nbytes for array in part) for part in parts]
    done_bytes = 0
    progress(0, sum(sizes))
    for part, part_bytes in zip(parts, sizes, strict=True):
        for array in part:
            widened.fill(array)
        mx.eval(part)
        done_bytes += part_bytes
        progress(done_bytes, sum(sizes))
