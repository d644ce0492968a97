"""Whether a GPU's memory is its own or the machine's, and what of its own is free.

Rules this module lives by:
- A GPU is one of the two, and its figures are of one source. Unified memory is told by the MemorySample alone.
- A driver that does not say how much memory there is has none of its own: the boards that share theirs answer so.
- What is free never exceeds the total; figures that contradict each other are unknown.
"""

from __future__ import annotations

from ullage.v1 import node_pb2

_BYTES_MAX = 2**63


def gpu(name: str, total_bytes: int | None, available_bytes: int | None) -> node_pb2.Gpu:
    """A GPU with memory of its own of so many bytes, or with the machine's where `total_bytes` is None or 0."""
    if not total_bytes:
        return node_pb2.Gpu(name=name, unified=True)
    if not 0 < total_bytes < _BYTES_MAX:
        return node_pb2.Gpu(name=name)
    if available_bytes is None or not 0 <= available_bytes <= total_bytes:
        available_bytes = None
    return node_pb2.Gpu(name=name, memory_total_bytes=total_bytes, memory_available_bytes=available_bytes)
