"""A decision in words and numbers: what was asked, what every node could give, what else there was."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.table import Table

from services.cli import names, tables
from services.cli.output import bytes_text, console, known_bytes_text, level_text
from ullage.v1 import model_pb2, node_pb2

_ASKED_PREFIXES: Final = ("ADMISSION_", "OBJECTIVE_", "PARALLELISM_")


def asked(spec: model_pb2.PlacementSpec) -> str:
    """What a request says beside the model: only what it says."""
    parts = []
    for field, value in spec.ListFields():
        if field.name in {"model_id", "request_id", "requested_by"}:
            continue
        text = field.enum_type.values_by_number[value].name if field.enum_type is not None else str(value)
        for prefix in _ASKED_PREFIXES:
            text = text.removeprefix(prefix)
        parts.append(f"{field.name.replace('_', ' ')} {text}")
    return ", ".join(parts) or "nothing said beside"


def budgets(nodes: Iterable[model_pb2.NodeBudget]) -> Table:
    """Every node as the allocator saw it."""
    sizes = ("TOTAL", "AVAILABLE", "PROMISED", "OVERHEAD", "DEVICE LIMIT", "BUDGET")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NODE", "LEVEL", "FACTOR", *sizes, "LAYERS MAX", "LAYERS"):
        table.add_column(column, justify="left" if column in {"NODE", "LEVEL"} else "right", overflow="fold")
    for node in nodes:
        table.add_row(
            _name(node),
            level_text(node.pressure_level),
            f"{node.pressure_factor:g}",
            known_bytes_text(node, "ram_total_bytes"),
            known_bytes_text(node, "available_bytes"),
            bytes_text(node.promised_bytes),
            bytes_text(node.overhead_bytes),
            known_bytes_text(node, "device_limit_bytes"),
            known_bytes_text(node, "budget_bytes"),
            str(node.layers_max),
            str(node.layers),
        )
    return table


def show_reasons(decided: model_pb2.Placement) -> None:
    """Print what a placement rests on: the nodes' numbers, who was left out, and what else there was."""
    out = console()
    out.print(budgets(decided.nodes))
    for line in tables.left_out(decided):
        out.print(line, markup=False, soft_wrap=True)
    if decided.explanation:
        out.print(f"\n{decided.explanation}", markup=False, soft_wrap=True)
    by_id = {node.node_id: _name(node) for node in decided.nodes}
    for other in decided.alternatives:
        way = ", ".join(
            f"{by_id.get(shard.node_id, shard.node_id)} {tables.layers_text(shard)}" for shard in other.shards
        )
        out.print(f"it could have gone to {way}: {other.reason}", markup=False, soft_wrap=True)
    if decided.HasField("forced_past"):
        out.print(f"forced past: {decided.forced_past.message}", style="yellow", markup=False, soft_wrap=True)


def show_refusal(refusal: model_pb2.Refusal) -> None:
    """Print a refusal with its proof."""
    out = console()
    out.print(refusal.message, markup=False, soft_wrap=True)
    if refusal.nodes:
        out.print()
        out.print(budgets(refusal.nodes))


def _name(node: model_pb2.NodeBudget) -> str:
    return names.node_name(node_pb2.NodeIdentity(node_id=node.node_id, friendly_name=node.friendly_name))
