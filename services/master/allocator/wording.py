"""Decisions in words: bytes, nodes, budgets and exclusions as people read them everywhere."""

from __future__ import annotations

from typing import Final

from services import exclusions
from services.master.allocator.budget import Budget
from services.master.allocator.naming import counted
from ullage.v1 import model_pb2, node_pb2

_GIB: Final = 1024**3
_MIB: Final = 1024**2


def size(count: int) -> str:
    """Bytes in GiB with two decimals, one from 10 GiB on; in MiB or bytes where that would read 0.0."""
    if count >= 10 * _GIB:
        return f"{count / _GIB:.1f} GiB"
    if count >= _GIB // 10:
        return f"{count / _GIB:.2f} GiB"
    if count >= _MIB // 10:
        return f"{count / _MIB:.1f} MiB"
    return counted(count, "byte") if count else "0"


def size_at_least(count: int) -> str:
    """Bytes in words that say no less: whoever frees what is said, and no byte more, has freed enough."""
    if count >= _GIB // 10:
        return f"{-(-count * 100 // _GIB) / 100:.2f} GiB"
    if count >= _MIB // 10:
        return f"{-(-count * 10 // _MIB) / 10:.1f} MiB"
    return size(count)


def exclusion(reason: model_pb2.Exclusion.ValueType | None) -> str:
    """Why a node was left out."""
    return "it may be used" if reason is None else exclusions.words(reason)


def level(budget: Budget) -> str:
    """A node's level with the factor it brings."""
    name = node_pb2.PressureLevel.Name(budget.level).removeprefix("PRESSURE_LEVEL_")
    return f"{name} x{budget.tenths / 10:g}"


def node_line(budget: Budget, layers: int) -> str:
    """One node's numbers in a line: what it has, what is taken from it, and how many of `layers` it could hold."""
    head = f"{budget.name}: {level(budget)}"
    if budget.available_bytes is None or budget.budget_bytes is None:
        return f"{head}, available unknown; left out: {exclusion(budget.exclusion)}"
    sums = (
        f"{size(budget.available_bytes)} available - {size(budget.promised_bytes)} promised"
        f" - {size(budget.overhead_bytes)} overhead{_limit(budget)} = {size(budget.budget_bytes)}"
    )
    if budget.exclusion is None:
        return f"{head}, {sums}: {budget.layers_max} of {counted(layers, 'layer')}"
    return f"{head}, {sums}; left out: {exclusion(budget.exclusion)}"


def _limit(budget: Budget) -> str:
    """What of the device holds below what is available, if anything does."""
    if budget.device_room_bytes is None or budget.budget_bytes != budget.device_room_bytes:
        return ""
    if budget.device_free_bytes == budget.device_room_bytes:
        return f", its card has {size(budget.device_free_bytes)} free"
    return f", the device's limit of {size(budget.device_limit_bytes or 0)} holds"
