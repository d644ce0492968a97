"""Which layers keep a state of constant size for each sequence, beside or instead of what each token leaves.

Rules this module lives by: those of kv_cache.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from services.model_folder.errors import ModelFolderError
from services.model_folder.sizes import CONFIG_FILE, size

Values: TypeAlias = Mapping[str, Any]


class Keeps(NamedTuple):
    """What a layer keeps."""

    attends: bool
    """Each token leaves something."""
    state_elements: int
    """Numbers of a sequence's state, however long the sequence."""


StatesRule: TypeAlias = Callable[[Values, int], tuple[Keeps, ...]]
"""From config.json and the number of layers to what each layer keeps."""
StateRule: TypeAlias = Callable[[Values], int]
"""From config.json to the numbers of one layer's state."""

_ATTENDS = Keeps(attends=True, state_elements=0)


def none(values: Values, layers: int) -> tuple[Keeps, ...]:
    """Every layer attends, and keeps no state."""
    return (_ATTENDS,) * layers


def everywhere(state: StateRule, *, attends: bool) -> StatesRule:
    """Every layer keeps the state, and all attend as well, or none does."""

    def rule(values: Values, layers: int) -> tuple[Keeps, ...]:
        return (Keeps(attends, state(values)),) * layers

    return rule


def where(keeps_state: Callable[[Values, int], list[bool]], state: StateRule) -> StatesRule:
    """A layer keeps the state where `keeps_state` says so, and attends where not."""

    def rule(values: Values, layers: int) -> tuple[Keeps, ...]:
        kept = Keeps(attends=False, state_elements=state(values))
        return tuple(kept if each else _ATTENDS for each in keeps_state(values, layers))

    return rule


def not_full_attention(values: Values, layers: int) -> list[bool]:
    """Where layer_types, or full_attn_idxs before it, do not name a layer that attends."""
    places = values.get("full_attn_idxs")
    if isinstance(places, list):
        return [place not in places for place in range(layers)]
    return [kind != "full_attention" for kind in _kinds(values, "layer_types", layers)]


def mamba_by_types(values: Values, layers: int) -> list[bool]:
    """Where layer_types says mamba."""
    return [kind == "mamba" for kind in _kinds(values, "layer_types", layers)]


def mamba_by_blocks(values: Values, layers: int) -> list[bool]:
    """Where layers_block_type says mamba; without it all but one layer of each period."""
    if values.get("layers_block_type") is not None:
        return [kind == "mamba" for kind in _kinds(values, "layers_block_type", layers)]
    period, offset = size(values, "attn_layer_period"), values.get("attn_layer_offset")
    return [place % period != offset for place in range(layers)]


def by_interval(values: Values, layers: int) -> list[bool]:
    """Every layer but each last of full_attention_interval."""
    interval = size(values, "full_attention_interval", default=4)
    return [(place + 1) % interval != 0 for place in range(layers)]


def by_groups(values: Values, layers: int) -> list[bool]:
    """Every layer but the last of each group of layer_group_size, and those after the last whole group."""
    group = size(values, "layer_group_size")
    return [(place + 1) % group != 0 and place < layers // group * group for place in range(layers)]


def by_block_types(values: Values, layers: int) -> list[bool]:
    """Where block_types, used again and again, does not say attention."""
    kinds = values.get("block_types") or values.get("_block_types")
    if not isinstance(kinds, list) or not kinds:
        raise ModelFolderError(f"{CONFIG_FILE} must name block_types: copy it again")
    return [kinds[place % len(kinds)] != "attention" for place in range(layers)]


def by_linear_config(values: Values, layers: int) -> list[bool]:
    """Where linear_attn_config counts the layer, from 1, among kda_layers."""
    places = _linear(values).get("kda_layers")
    if not isinstance(places, list):
        raise ModelFolderError(f"linear_attn_config in {CONFIG_FILE} must list kda_layers: copy it again")
    return [place + 1 in places for place in range(layers)]


def mamba(values: Values) -> int:
    """The tokens a convolution looks back at, and a state for each channel."""
    channels = size(values, "intermediate_size")
    return channels * (size(values, "conv_kernel") - 1) + channels * size(values, "state_size")


def mamba_expanded(values: Values) -> int:
    """As `mamba`, for channels that are some times the hidden size."""
    channels = size(values, "mamba_expand") * size(values, "hidden_size")
    return channels * (size(values, "mamba_d_conv") - 1) + channels * size(values, "mamba_d_state")


def mamba2(values: Values) -> int:
    """As `mamba`, where heads have states, and the convolution takes in what goes into and out of them too."""
    channels, state = size(values, "num_heads") * size(values, "head_dim"), size(values, "state_size")
    return _mamba2(channels, state, size(values, "n_groups"), size(values, "conv_kernel"))


def mamba2_heads(values: Values) -> int:
    """As `mamba2`, by the names hybrid models have for the sizes."""
    channels = size(values, "mamba_n_heads") * size(values, "mamba_d_head")
    groups, kernel = size(values, "mamba_n_groups"), size(values, "mamba_d_conv")
    return _mamba2(channels, size(values, "mamba_d_state"), groups, kernel)


def delta(values: Values) -> int:
    """The tokens a convolution over keys, queries and values looks back at, and a matrix for each head."""
    key, value = size(values, "linear_key_head_dim"), size(values, "linear_value_head_dim")
    key_heads, value_heads = size(values, "linear_num_key_heads"), size(values, "linear_num_value_heads")
    channels = 2 * key_heads * key + value_heads * value
    return channels * (size(values, "linear_conv_kernel_dim") - 1) + value_heads * key * value


def kda(values: Values) -> int:
    """As `delta`, where keys, queries and values have a convolution each, and as many heads."""
    return _kda(size(values, "num_attention_heads"), size(values, "head_dim"), size(values, "short_conv_kernel_size"))


def kda_apart(values: Values) -> int:
    """As `kda`, with sizes of its own in linear_attn_config."""
    linear = _linear(values)
    return _kda(size(linear, "num_heads"), size(linear, "head_dim"), size(linear, "short_conv_kernel_size", default=4))


def short_convolution(values: Values) -> int:
    """The tokens a convolution looks back at."""
    return size(values, "hidden_size") * (size(values, "conv_L_cache") - 1)


def recurrence(values: Values) -> int:
    """The tokens a convolution looks back at, and one number for each channel."""
    return size(values, "hidden_size") * size(values, "conv1d_width")


def _mamba2(channels: int, state: int, groups: int, kernel: int) -> int:
    return (channels + 2 * groups * state) * (kernel - 1) + channels * state


def _kda(heads: int, head_dim: int, kernel: int) -> int:
    return 3 * heads * head_dim * (kernel - 1) + heads * head_dim * head_dim


def _linear(values: Values) -> Mapping[str, Any]:
    linear = values.get("linear_attn_config")
    if not isinstance(linear, dict):
        raise ModelFolderError(f"{CONFIG_FILE} has no linear_attn_config: copy it again")
    return linear


def _kinds(values: Values, key: str, layers: int) -> list[Any]:
    kinds = values.get(key)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ModelFolderError(f"{CONFIG_FILE} must name one of {key} for each of {layers} layers: copy it again")
    return kinds
