"""How mlx-lm's code for a model is cut into a shard.

The model stays whole in its structure: layers of other ranks are replaced by ones that pass on what they are given,
so that whatever a model does around its layers (masks, windows, patterns of kinds, scaling) it does as it does whole.
Where a rank's layers begin, what the rank before computed is put in the place of what this model made so far, and
where they end it is taken out; what the model does outside is described but never evaluated, as MLX's arrays are
promises. Which types are admitted, services/model_folder says; tests/runner/shard proves it for each, at every split.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from services import model_folder

Config = Mapping[str, Any]


class UnsupportedModelError(Exception):
    """The model cannot be split here; str() names it, says why and what to use instead."""


def admit(config: Config) -> model_folder.Architecture:
    """What is known of the type `config` (its config.json) names. Raises UnsupportedModelError with the reason."""
    refused = model_folder.refusal(config)
    if refused is not None:
        raise UnsupportedModelError(refused)
    model_type = str(config["model_type"])
    if "quantization" not in config and "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unnamed")
        raise UnsupportedModelError(
            f"this {model_type} is quantised as {method!r}, which is not read here; use an MLX-quantised or "
            "unquantised folder, or a GGUF file"
        )
    return model_folder.ADMITTED[model_type]


def build(config: Config) -> Any:
    """mlx-lm's model for `config`, with its weights not yet made. Raises UnsupportedModelError."""
    module = runtime_module(admit(config).module or str(config["model_type"]))
    try:
        return module.Model(module.ModelArgs.from_dict(dict(config)))
    except Exception as error:
        # Each of the runtime's models has words of its own for what it misses or cannot take.
        raise UnsupportedModelError(
            f"config.json of this {config['model_type']} says what the runtime cannot make a model of "
            f"({type(error).__name__}: {error}): copy it again from where the model came from"
        ) from error


def runtime_module(name: str) -> Any:
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

    def has(self, layer: int) -> bool:
        """Whether `layer` is this shard's."""
        return self.first_layer <= layer < self.end_layer


class _Elsewhere:
    """Stands where a layer of another rank does: it is asked what it is, and passes on what it is given."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: mx.array, *_: object, **__: object) -> mx.array:
        return hidden


class _Here:
    """A layer of this rank. With `at_once` it is computed while those after it are still being described.

    Describing takes a tenth of what computing a token does: one would wait for the other for so long, at every token.
    """

    def __init__(self, layer: Any, *, at_once: bool) -> None:
        self._layer = layer
        self._at_once = at_once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden: mx.array, *arguments: object, **named: object) -> mx.array:
        made: mx.array = self._layer(hidden, *arguments, **named)
        if self._at_once:
            mx.async_eval(made)  # type: ignore[no-untyped-call]  # the runtime says no types of it
        return made


class _Border(_Here):
    """The first or last layer of a rank. The first is given what came before it; what the last made can be taken."""

    def __init__(self, layer: Any, dtype: mx.Dtype, *, at_once: bool) -> None:
        super().__init__(layer, at_once=at_once)
        self._dtype = dtype
        self.given: mx.array | None = None
        self.made: mx.array | None = None

    def __call__(self, hidden: mx.array, *arguments: object, **named: object) -> mx.array:
        entering = hidden if self.given is None else self.given
        self.made = super().__call__(entering.astype(self._dtype), *arguments, **named)
        return self.made


class _Finished:
    """Stands where the inner model does when only the head is to run."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.hidden: mx.array | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *_: object, **__: object) -> mx.array | None:
        return self.hidden


_NOTHING: Final = mx.array(())
_ANY_TOKEN: Final = 0
"""What is given for tokens where only their number matters."""


def leave_out(model: Any, cut: Cut) -> None:
    """Let go of the parameters of every layer of `model` that is another rank's.

    They are promises that hold the files open, and are never kept; what is made of them costs memory all the same.
    """
    for place, layer in enumerate(model.layers):
        if not cut.has(place):
            layer.apply(lambda _: _NOTHING)


def is_left_out(module: Any) -> bool:
    """Whether `module` is part of a layer that was left out."""
    return any(part is _NOTHING for part in module.values())


class Pieces:
    """What is left of a model after the cut, and what it computes."""

    def __init__(self, model: Any, cut: Cut, dtype: mx.Dtype, *, at_once: bool) -> None:
        """The part of `model`, as `build` made it, that `cut` names, computing in `dtype`. Takes `model` apart.

        With `at_once` each layer is computed as soon as it is described, and not when its results are asked for.
        """
        self.parts = _parts(model, cut)
        """The arrays of each part of the shard, in the order in which they are computed."""
        path, self._inner, name = _inner(model)
        layers = list(self._inner[name])
        if len(layers) != cut.layers:
            raise UnsupportedModelError(f"the runtime makes {len(layers)} layers of a model that has {cut.layers}")
        self._at_once = at_once
        self._first, self._last = (
            _Border(layers[place], dtype, at_once=at_once) for place in (cut.first_layer, cut.end_layer - 1)
        )
        if cut.end_layer - cut.first_layer == 1:
            self._last = self._first
        self._cut = cut
        # MLX's modules are dictionaries of their parts.
        self._inner[name] = [self._stand_in(place, layer) for place, layer in enumerate(layers)]
        self._finished = _Finished(self._inner)
        self._model = _with_inner(model, path, self._finished)
        caches = self._all_caches()
        self._mirrors = _mirrors(caches, cut)
        self._empty = caches
        # Others forget what leaves their window, or keep one state for all that came.
        self.keeps_prefixes = all(type(cache) is runtime_module("cache").KVCache for cache in caches)

    def _stand_in(self, place: int, layer: Any) -> Any:
        if not self._cut.has(place):
            return _Elsewhere(layer)
        borders = {self._cut.end_layer - 1: self._last, self._cut.first_layer: self._first}
        return borders.get(place) or _Here(layer, at_once=self._at_once)

    def hidden(self, inputs: mx.array, caches: Sequence[Any]) -> mx.array:
        """The hidden states after this shard's layers; `inputs` are tokens or hidden states, sequence by sequence."""
        tokens = inputs
        if not self._cut.is_first:
            self._first.given = inputs
            tokens = mx.full(inputs.shape[:2], _ANY_TOKEN, dtype=mx.int32)
        after: mx.array = self._inner(tokens, cache=self._caches_everywhere(caches))
        made = after if self._last.made is None or self._cut.is_last else self._last.made
        # Else what was made here for one chunk would be kept until the next.
        self._first.given = self._first.made = self._last.made = None
        return made

    def _caches_everywhere(self, caches: Sequence[Any]) -> list[Any]:
        """A cache for each layer of the model."""
        return [
            empty if mirror is None else caches[mirror]
            for mirror, empty in zip(self._mirrors, self._empty, strict=True)
        ]

    def scores(self, hidden: mx.array) -> mx.array:
        """The scores of the tokens that follow each row of `hidden`. Only on the last rank."""
        if not self._cut.is_last:
            raise ValueError("only the last rank has the head")
        self._finished.hidden = hidden
        scores: mx.array = self._model(mx.full(hidden.shape[:2], _ANY_TOKEN, dtype=mx.int32))
        return scores

    def new_caches(self) -> list[Any]:
        """Empty caches for one sequence, one for each layer of the shard."""
        return self._all_caches()[self._cut.first_layer : self._cut.end_layer]

    def _all_caches(self) -> list[Any]:
        made = getattr(self._model, "make_cache", None)
        if made is None:
            return [runtime_module("cache").KVCache() for _ in range(self._cut.layers)]
        found: list[Any] = made()
        return found


def _inner(model: Any) -> tuple[list[str], Any, str]:
    """The module that holds the layers: the way to it, itself, and what it calls them."""
    layers = model.layers
    for path, module in model.named_modules():
        for name, part in module.items():
            if isinstance(part, list) and len(part) == len(layers) and part and part[0] is layers[0]:
                return path.split("."), module, name
    raise UnsupportedModelError("the runtime's model keeps its layers where they are not found")


def _with_inner(model: Any, path: Sequence[str], inner: _Finished) -> Any:
    *outer, name = path
    parent = model
    for each in outer:
        parent = getattr(parent, each)
    setattr(parent, name, inner)
    return model


def _parts(model: Any, cut: Cut) -> list[list[mx.array]]:
    """What each part of the shard consists of, the embedding first and the head last."""
    by_part: dict[object, list[mx.array]] = {}
    flat: Any = tree_flatten(model.parameters())
    for name, array in flat:
        part = model_folder.part_of(name)
        if part is None:
            raise UnsupportedModelError(f"the runtime's parameter {name} is of no known part of the model")
        by_part.setdefault(part, []).append(array)
    is_tied = not any(array.ndim > 1 for array in by_part.get("head", ()))
    wanted: list[object] = list(range(cut.first_layer, cut.end_layer))
    if cut.is_first or (cut.is_last and is_tied):
        wanted.insert(0, "embedding")
    if cut.is_last:
        wanted.append("head")
    return [by_part[part] for part in wanted if part in by_part]


def _mirrors(caches: Sequence[Any], cut: Cut) -> list[int | None]:
    """For each layer of the model which of the shard's caches it is given: its own, or, elsewhere, one of its kind.

    A model asks one layer's cache for the place in the sequence on behalf of all, or of all of its kind. Where the
    shard has none of the kind, any that knows the place will do; None where there is none, or none is needed.
    """
    own = caches[cut.first_layer : cut.end_layer]
    kinds = {_kind(cache): place for place, cache in enumerate(own)}
    knowing = next((place for place, cache in enumerate(own) if hasattr(cache, "offset")), None)
    return [
        place - cut.first_layer
        if cut.has(place)
        else kinds.get(_kind(cache), knowing if hasattr(cache, "offset") else None)
        for place, cache in enumerate(caches)
    ]


def _kind(cache: Any) -> object:
    inner = getattr(cache, "caches", None)
    return (type(cache), getattr(cache, "max_size", None)) if inner is None else tuple(_kind(each) for each in inner)
