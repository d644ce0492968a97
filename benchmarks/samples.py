"""Facts as probes send them, for whoever measures what becomes of them."""

from __future__ import annotations

from typing import Final

from ullage.v1 import event_pb2, node_pb2

NODES: Final = 100


def memory_fact(number: int, node_id: str | None = None) -> event_pb2.Fact:
    """A memory sample of `node_id`, or of one of NODES nodes in turn."""
    sample = node_pb2.MemorySample(
        ram_total_bytes=32 << 30,
        ram_available_bytes=(20 << 30) + number % 4096,
        swap_total_bytes=0,
        swap_available_bytes=0,
        strict_available_bytes=18 << 30,
        balanced_available_bytes=19 << 30,
        ceiling_available_bytes=20 << 30,
        pressure_level=node_pb2.PRESSURE_LEVEL_NORMAL,
        pressure_pct=3.5,
        source=node_pb2.MEMORY_SOURCE_PROCFS,
    )
    sample.taken_at.FromNanoseconds(1_790_000_000_000_000_000 + number)
    about = f"{number % NODES:032x}" if node_id is None else node_id
    return event_pb2.Fact(memory_sampled=event_pb2.MemorySampled(node_id=about, sample=sample))
