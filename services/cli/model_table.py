"""Models as tables: all of them, and one with every part it is made of."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Final

from rich.table import Table

from services.cli.output import bytes_text
from ullage.v1 import model_pb2

KV_ELEMENT_BYTES: Final = {"float32": 4, "float16": 2}
"""What runners keep KV in: float32 on a CPU, the model's own half precision elsewhere."""


def _table(columns: dict[str, bool]) -> Table:
    """A table of these columns, those of value True flushed right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, right in columns.items():
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    return table


def models(listed: Iterable[model_pb2.Model]) -> Table:
    """One row for each model."""
    table = _table(
        {
            "MODEL": False,
            "TYPE": False,
            "LAYERS": True,
            "BYTES": True,
            "CONTEXT": True,
            "STORED AS": False,
            "SOURCE": False,
        }
    )
    for model in listed:
        table.add_row(
            model.model_id,
            model.model_type,
            str(len(model.layers)),
            bytes_text(stored_bytes(model)),
            str(model.context_tokens_max),
            model.quantization,
            model.source,
        )
    return table


def parts(model: model_pb2.Model) -> Table:
    """What each part weighs; layers that weigh the same share a row."""
    table = _table(
        {"PART": False, "COUNT": True, "BYTES EACH": True, "BYTES": True, "PARAMETERS": True, "AS FLOAT32": True}
    )
    for first, count, weight in _layer_runs(model):
        name = f"layer {first}" if count == 1 else f"layers {first}-{first + count - 1}"
        _add_part(table, name, count, weight)
    _add_part(table, "embedding", 1, model.embedding)
    _add_part(table, "norm (head is the embedding)" if model.tied_embedding else "norm, head", 1, model.head)
    return table


def _add_part(table: Table, name: str, count: int, weight: model_pb2.Weight) -> None:
    table.add_row(
        name,
        str(count),
        f"{weight.stored_bytes:,}",
        f"{count * weight.stored_bytes:,}",
        f"{count * weight.parameters:,}",
        bytes_text(count * weight.parameters * 4),
    )


def _layer_runs(model: model_pb2.Model) -> Iterable[tuple[int, int, model_pb2.Weight]]:
    """Runs of layers of one weight: the first, how many, and the weight of each."""
    first = 0
    for _, run in groupby(model.layers, key=lambda layer: (layer.weight.stored_bytes, layer.weight.parameters)):
        layers = list(run)
        yield first, len(layers), layers[0].weight
        first += len(layers)


def stored_bytes(model: model_pb2.Model) -> int:
    """All the model's weights as stored."""
    return (
        model.embedding.stored_bytes
        + model.head.stored_bytes
        + sum(layer.weight.stored_bytes for layer in model.layers)
    )


def kv_elements(model: model_pb2.Model, context_tokens: int) -> int:
    """Numbers kept of one sequence, over all layers: its states, and its KV cache by the step it is allocated in."""
    return sum(
        layer.kv_elements_per_token * _kept_tokens(model, layer, context_tokens) + layer.state_elements
        for layer in model.layers
    )


def _kept_tokens(model: model_pb2.Model, layer: model_pb2.Layer, context_tokens: int) -> int:
    step_tokens = max(1, model.kv_allocation_step_tokens)
    allocated_tokens = -(-context_tokens // step_tokens) * step_tokens
    return min(allocated_tokens, layer.kv_window_tokens) if layer.HasField("kv_window_tokens") else allocated_tokens


def kv_text(model: model_pb2.Model, context_tokens: int) -> str:
    """What a token, and a context of so many tokens, leave in the KV cache."""
    per_token = sum(layer.kv_elements_per_token for layer in model.layers)
    elements = kv_elements(model, context_tokens)
    sizes = ", ".join(
        f"{bytes_text(per_token * size)} as {name} ({bytes_text(elements * size)} for {context_tokens} tokens)"
        for name, size in KV_ELEMENT_BYTES.items()
    )
    return f"KV of a token: {per_token:,} numbers; {sizes}"
