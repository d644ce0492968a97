"""What a range of a model's layers takes of a node's memory, in whole bytes and by part.

Rules this module lives by:
- Nothing is an average: layers, endpoints and caches are summed one by one.
- What is not known counts as the larger of what it may be: a promise too small is a node that swaps.
- What a shard needs beside its layers does not depend on which layers they are, so that any two ranges compare.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np

from ullage.v1 import model_pb2, node_pb2

PREFILL_CHUNK_TOKENS: Final = 128
"""Tokens of a prompt a runner takes in one step."""

FLOAT32_BYTES: Final = 4

FREED_BYTES_KEPT_MAX: Final = 32 * 1024 * 1024
"""What a shard's runtime keeps at most of the buffers it has freed, to use them again: runners set this limit."""

SCORE_BYTES: Final = 2 * FLOAT32_BYTES
"""What the score of one token of the vocabulary takes: itself, and its place in a sorted copy."""

ANSWER_TOKENS: Final = 256
"""Over how many tokens of an answer the time of its prompt is spread."""

FLOPS_PER_PARAMETER: Final = 2
"""A multiplication and an addition for each token of a prompt."""

UINT64_MAX: Final = 2**64 - 1

NEEDED_BYTES_MAX: Final = 2**61
"""No need is counted as larger: more than any room, and small enough for sums not to overflow."""

DEMANDS_KEPT_MAX: Final = 64
"""How many demands are kept from one decision to the next."""

Sums = np.ndarray[tuple[int], np.dtype[np.float64]]


class Form(NamedTuple):
    """How a node holds a model; nodes of equal form need equal bytes for equal layers."""

    weight_form: node_pb2.WeightForm.ValueType
    element_bytes: int
    fused_attention: bool
    """Attention never holds its scores for a whole chunk: Metal's kernels do not, a CPU does."""
    can_hold_as_stored: bool = False
    """Where weights do not fit in weight_form they can be held as stored."""
    is_changed: bool = False
    """weight_form is not the node's usual one."""

    def as_stored(self) -> Form:
        """The form that takes less, where there is one; else this."""
        if not self.can_hold_as_stored:
            return self
        return self._replace(weight_form=node_pb2.WEIGHT_FORM_AS_STORED, can_hold_as_stored=False, is_changed=True)


class Load(NamedTuple):
    """What an instance shall serve at once."""

    context_tokens: int
    concurrent_sequences: int
    prompt_tokens: int = 0
    """How long the prompts are for which the placement shall be good; 0 where only the answer counts."""


def form_of(runner: node_pb2.RunnerProfile) -> Form:
    """The form in which a runner's shards hold a model."""
    return Form(
        weight_form=runner.weight_form,
        element_bytes=runner.compute_element_bytes or FLOAT32_BYTES,
        fused_attention=runner.device == "metal",
        can_hold_as_stored=runner.can_hold_as_stored,
    )


@dataclass(frozen=True, eq=False)
class Demand:
    """What one model takes on nodes of one form under one load.

    `weight_sums`, `kv_sums` and `layer_sums` (both together) hold at i the bytes of the first i layers, `read_sums`
    what one token reads of them with its cache half full.
    """

    form: Form
    weight_sums: tuple[int, ...]
    kv_sums: tuple[int, ...]
    layer_sums: tuple[int, ...]
    read_sums: tuple[int, ...]
    embedding_bytes: int
    head_bytes: int
    """The head without the copy of a tied embedding."""
    embedding_copy_bytes: int
    """What a last rank that is not the first holds besides: the embedding again when it is tied, else 0."""
    working_bytes: int
    """Activations of one prefill chunk, the copy of a cache while it grows, and freed buffers: in every shard."""
    logits_bytes: int
    """The scores of the next token of each sequence: a prompt's other tokens are not scored."""
    smallest_layer_bytes: int
    largest_layer_bytes: int
    parameter_sums: tuple[int, ...]
    """The numbers in the first i layers that a token is multiplied with."""
    activation_bytes: int
    """What one token carries from one rank to the next."""
    prompt_tokens: int

    @cached_property
    def read_array(self) -> Sums:
        """`read_sums` to reckon with."""
        return np.array([float(each) for each in self.read_sums])

    @cached_property
    def layer_array(self) -> Sums:
        """`layer_sums` to reckon with."""
        return np.array([float(each) for each in self.layer_sums])

    @cached_property
    def layer_ints(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """`layer_sums` to search in; for sums of 64 bits."""
        return np.array(self.layer_sums, dtype=np.int64)

    @cached_property
    def prompt_flops(self) -> Sums:
        """What the prompt costs the first i layers for each token of the answer."""
        share = self.prompt_tokens * FLOPS_PER_PARAMETER / ANSWER_TOKENS
        return np.array([each * share for each in self.parameter_sums])

    @property
    def prompt_activation_bytes(self) -> float:
        """What the prompt carries from one rank to the next for each token of the answer."""
        return self.activation_bytes * self.prompt_tokens / ANSWER_TOKENS

    @property
    def head_read_bytes(self) -> int:
        """What the last rank reads for a token besides its layers: a tied head reads the embedding."""
        return self.head_bytes + self.embedding_copy_bytes

    @property
    def alike(self) -> bool:
        """Every layer takes the same."""
        return self.smallest_layer_bytes == self.largest_layer_bytes

    @cached_property
    def least_window_bytes(self) -> tuple[int, ...]:
        """The bytes of the smallest n layers that follow each other, for n from 0 on."""
        if self.alike:
            return tuple(count * self.largest_layer_bytes for count in range(self.layers + 1))
        sums = self.layer_sums
        return tuple(
            min(after - before for before, after in zip(sums, sums[count:], strict=False)) for count in range(len(sums))
        )

    @cached_property
    def inner_bytes(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """What a shard between two others takes at least with n layers, for n from 0 on."""
        return np.array([min(NEEDED_BYTES_MAX, each + self.working_bytes) for each in self.least_window_bytes])

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.layer_sums) - 1

    @property
    def first_bytes(self) -> int:
        """What the first of several ranks needs beside its layers."""
        return self.working_bytes + self.embedding_bytes

    @property
    def last_bytes(self) -> int:
        """What the last of several ranks needs beside its layers."""
        return self.working_bytes + self.logits_bytes + self.head_bytes + self.embedding_copy_bytes

    @property
    def alone_bytes(self) -> int:
        """All a single rank needs."""
        return self.working_bytes + self.layer_sums[-1] + self.embedding_bytes + self.head_bytes + self.logits_bytes

    def parts(self, first_layer: int, end_layer: int) -> model_pb2.ShardBytes:
        """What the shard of layers [first_layer, end_layer) takes, without the overhead of its process."""
        first, last = first_layer == 0, end_layer == self.layers
        parts = model_pb2.ShardBytes(
            layers_bytes=_u64(self.weight_sums[end_layer] - self.weight_sums[first_layer]),
            kv_bytes=_u64(self.kv_sums[end_layer] - self.kv_sums[first_layer]),
            embedding_bytes=_u64(self.embedding_bytes if first else 0),
            head_bytes=_u64(self._head_bytes(first=first) if last else 0),
            activation_bytes=_u64(self.working_bytes + (self.logits_bytes if last else 0)),
        )
        parts.total_bytes = _u64(
            parts.layers_bytes + parts.kv_bytes + parts.embedding_bytes + parts.head_bytes + parts.activation_bytes
        )
        return parts

    def read_bytes(self, first_layer: int, end_layer: int) -> int:
        """What the shard reads for one token of one sequence."""
        read = self.read_sums[end_layer] - self.read_sums[first_layer]
        return read + self.head_read_bytes if end_layer == self.layers else read

    def _head_bytes(self, *, first: bool) -> int:
        return self.head_bytes if first else self.head_bytes + self.embedding_copy_bytes


def demand(model: model_pb2.Model, form: Form, load: Load) -> Demand:
    """What `model` takes on nodes of `form` under `load`."""
    weights = [_weight_bytes(layer.weight, form) for layer in model.layers]
    active = [_active(layer.weight, size) for layer, size in zip(model.layers, weights, strict=True)]
    sequence_kv = [_sequence_kv_bytes(model, layer, form, load.context_tokens) for layer in model.layers]
    kv = [each * load.concurrent_sequences for each in sequence_kv]
    both = [weight + cache for weight, cache in zip(weights, kv, strict=True)]
    embedding = _weight_bytes(model.embedding, form)
    chunk_bytes = _chunk_bytes(model, form, load.context_tokens)
    return Demand(
        form=form,
        weight_sums=tuple(accumulate(weights, initial=0)),
        kv_sums=tuple(accumulate(kv, initial=0)),
        layer_sums=tuple(accumulate(both, initial=0)),
        read_sums=tuple(accumulate((w + kv // 2 for w, kv in zip(active, sequence_kv, strict=True)), initial=0)),
        embedding_bytes=embedding,
        head_bytes=_weight_bytes(model.head, form),
        embedding_copy_bytes=embedding if model.tied_embedding else 0,
        working_bytes=chunk_bytes + max(sequence_kv) + _freed_bytes(model, chunk_bytes, kv, load.context_tokens),
        logits_bytes=load.concurrent_sequences * model.vocabulary_size * SCORE_BYTES,
        smallest_layer_bytes=min(both),
        largest_layer_bytes=max(both),
        parameter_sums=tuple(
            accumulate((_active(layer.weight, layer.weight.parameters) for layer in model.layers), initial=0)
        ),
        activation_bytes=model.hidden_size * form.element_bytes,
        prompt_tokens=load.prompt_tokens,
    )


class Demands:
    """Demands that were worked out before; what is in it changes nothing but the time they take."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Form, Load], tuple[model_pb2.Model, Demand]] = {}

    def of(self, model: model_pb2.Model, form: Form, load: Load) -> Demand:
        """What `model` takes on nodes of `form` under `load`."""
        key = model.model_id, form, load
        kept = self._kept.get(key)
        # A model that is registered again is another message under the same id.
        if kept is not None and kept[0] is model:
            return kept[1]
        found = demand(model, form, load)
        if len(self._kept) >= DEMANDS_KEPT_MAX:
            self._kept.clear()  # In one step, since decisions in other threads look here meanwhile.
        self._kept[key] = model, found
        return found


def least_bytes(demands: Iterable[Demand]) -> int:
    """What the model takes at least, however it is split among nodes of these forms; there must be one."""
    forms = list({each.form: each for each in demands}.values())
    layer_bytes = ([after - before for before, after in pairwise(each.layer_sums)] for each in forms)
    beside = min(each.alone_bytes - each.layer_sums[-1] for each in forms)
    return sum(map(min, *layer_bytes)) + beside if len(forms) > 1 else forms[0].alone_bytes


def _weight_bytes(weight: model_pb2.Weight, form: Form) -> int:
    match form.weight_form:
        case node_pb2.WEIGHT_FORM_FLOAT32:
            return weight.parameters * FLOAT32_BYTES
        case node_pb2.WEIGHT_FORM_AS_STORED:
            return weight.stored_bytes
        case _:
            return max(weight.parameters * FLOAT32_BYTES, weight.stored_bytes)


def _active(weight: model_pb2.Weight, whole: int) -> int:
    """The part of `whole` that one token reads of a layer: of experts only those it goes through."""
    if not weight.HasField("active_parameters") or not weight.parameters:
        return whole
    return whole * min(weight.active_parameters, weight.parameters) // weight.parameters


def _sequence_kv_bytes(model: model_pb2.Model, layer: model_pb2.Layer, form: Form, context_tokens: int) -> int:
    """The cache one sequence has in `layer`, at the steps in which the runtime allocates it."""
    tokens = context_tokens
    if layer.kv_window_tokens:  # A window of 0 is none: it would hold nothing.
        # While a prompt is taken in, a sliding cache holds its window and the chunk that goes through it.
        tokens = min(tokens, layer.kv_window_tokens + PREFILL_CHUNK_TOKENS)
    step = max(1, model.kv_allocation_step_tokens)
    # A state is kept in 4-byte numbers where it matters, whatever the device computes in.
    state_bytes = layer.state_elements * FLOAT32_BYTES
    return layer.kv_elements_per_token * form.element_bytes * (-(-tokens // step) * step) + state_bytes


def _chunk_bytes(model: model_pb2.Model, form: Form, context_tokens: int) -> int:
    """Activations of one prefill chunk at their widest: through the MLP, or in the scores of attention."""
    numbers = 2 * model.hidden_size + 2 * model.intermediate_size
    if not form.fused_attention:
        # The scores, and what becomes of them when they are made to add up to one.
        numbers += 2 * model.attention_heads * context_tokens
    return PREFILL_CHUNK_TOKENS * numbers * form.element_bytes


def _freed_bytes(model: model_pb2.Model, chunk_bytes: int, kv: Sequence[int], context_tokens: int) -> int:
    """What is kept of freed buffers: a chunk's activations, and every cache as it was at each step of its growth."""
    steps = -(-context_tokens // max(1, model.kv_allocation_step_tokens))
    outgrown = sum(kv) * (steps - 1) // 2 if model.kv_allocation_step_tokens else 0
    return min(FREED_BYTES_KEPT_MAX, chunk_bytes + outgrown)


def _u64(count: int) -> int:
    """`count`, or the largest number a message can carry: only absurd requests get there."""
    return min(count, UINT64_MAX)
