"""What the runtime's KV cache holds of each layer: numbers for each token, and how far back.

Rules this module lives by:
- A rule is a function of config.json as the runtime reads it, defaults included: tests/runner/shard compares each
  with what the runtime's caches really take.
- A window counts only where the runtime keeps one; a `sliding_window` it ignores is ignored here too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from services.model_folder.errors import ModelFolderError
from services.model_folder.sizes import CONFIG_FILE, size

Values: TypeAlias = Mapping[str, Any]
ElementsRule: TypeAlias = Callable[[Values], int]
"""From config.json to the numbers one token leaves in one layer."""
WindowsRule: TypeAlias = Callable[[Values, int], tuple[int | None, ...]]
"""From config.json and the number of layers to the most tokens each layer keeps, None where it keeps all."""


def heads(values: Values) -> int:
    """A key and a value for each of the heads that share them."""
    return 2 * kv_heads(values) * head_dim(values)


def one_head(values: Values) -> int:
    """A key and a value that all heads share."""
    return 2 * head_dim(values)


def one_head_or_every(values: Values) -> int:
    """As `one_head`, unless multi_query is said not to be."""
    return every_head(values) if values.get("multi_query") is False else one_head(values)


def nothing(_: Values) -> int:
    """No layer attends."""
    return 0


def every_head(values: Values) -> int:
    """A key and a value for every head, whatever num_key_value_heads says."""
    return 2 * size(values, "num_attention_heads") * head_dim(values)


def latent(values: Values) -> int:
    """One compressed key and value for all heads, and the part of the key that carries the position."""
    return size(values, "kv_lora_rank") + size(values, "qk_rope_head_dim")


def latent_twice(values: Values) -> int:
    """As `latent`, for a layer that attends twice."""
    return 2 * latent(values)


def latent_indexed(values: Values) -> int:
    """As `latent`, with the keys of an index that picks what is attended to; the runtime keeps these twice."""
    return latent(values) + 2 * size(values, "index_head_dim")


def latent_unfolded(values: Values) -> int:
    """Keys and values made of the compressed ones for every head, and kept so."""
    keys = size(values, "qk_nope_head_dim") + size(values, "qk_rope_head_dim")
    return size(values, "num_attention_heads") * (keys + size(values, "v_head_dim", default=head_dim(values)))


def kv_heads(values: Values) -> int:
    """How many heads have keys and values of their own."""
    return size(values, "num_key_value_heads", default=size(values, "num_attention_heads"))


def head_dim(values: Values) -> int:
    """The numbers of one head's key."""
    default = size(values, "hidden_size") // size(values, "num_attention_heads")
    return size(values, "kv_channels", default=size(values, "head_dim", default=default))


def no_windows(values: Values, layers: int) -> tuple[int | None, ...]:
    """Every layer keeps the whole context."""
    return (None,) * layers


def by_layer_types(values: Values, layers: int) -> tuple[int | None, ...]:
    """Windows where layer_types names sliding layers; none without it."""
    kinds = values.get("layer_types")
    if kinds is None:
        return (None,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFolderError(f"{CONFIG_FILE} must name one of layer_types for each of {layers} layers: copy it again")
    return _where([kind == "sliding_attention" for kind in kinds], values)


def by_layer_types_or(slides: Callable[[int], bool]) -> WindowsRule:
    """As `by_layer_types`; without them a layer slides where `slides` of its place says so."""

    def rule(values: Values, layers: int) -> tuple[int | None, ...]:
        if values.get("layer_types") is not None:
            return by_layer_types(values, layers)
        return _where([slides(place) for place in range(layers)], values)

    return rule


def by_pattern(default: int) -> WindowsRule:
    """Every layer slides but each last of `sliding_window_pattern`, which is `default` where it is not said."""

    def rule(values: Values, layers: int) -> tuple[int | None, ...]:
        period = size(values, "sliding_window_pattern", default=default)
        return _where([(place + 1) % period != 0 for place in range(layers)], values)

    return rule


def by_letters(values: Values, layers: int) -> tuple[int | None, ...]:
    """A layer slides where its letter in `sliding_window_pattern`, used again and again, is L; none without it."""
    pattern = values.get("sliding_window_pattern")
    if not pattern:
        return (None,) * layers
    if not isinstance(pattern, str):
        raise ModelFolderError(f"{CONFIG_FILE} says sliding_window_pattern is {pattern!r}, no letters: copy it again")
    return _where([pattern[place % len(pattern)] == "L" for place in range(layers)], values)


def by_hybrid_pattern(values: Values, layers: int) -> tuple[int | None, ...]:
    """A layer slides where hybrid_layer_pattern has a 1, over sliding_window_size tokens."""
    marks = values.get("hybrid_layer_pattern")
    if not isinstance(marks, list) or len(marks) != layers:
        raise ModelFolderError(f"hybrid_layer_pattern in {CONFIG_FILE} must mark {layers} layers: copy it again")
    return _where([mark == 1 for mark in marks], {"sliding_window": values.get("sliding_window_size")})


def by_attention_window(values: Values, layers: int) -> tuple[int | None, ...]:
    """Every layer that attends does so over attention_window_size tokens."""
    return (size(values, "attention_window_size"),) * layers


def _where(slides: list[bool], values: Values) -> tuple[int | None, ...]:
    if not any(slides):
        return (None,) * len(slides)
    window_tokens = size(values, "sliding_window")
    return tuple(window_tokens if each else None for each in slides)
