"""The MemorySample a probe sends: a reading, what was concluded from it, and how.

Inside a cgroup with a limit, total and available are those of the limit, since that is all the node has; the
limit and what is used of it stand beside them. Whoever subtracts one from the other is then right everywhere.
"""

from __future__ import annotations

from typing import Final

from services.probe.estimator import Estimate
from services.probe.pressure import Verdict
from services.probe.reading import Pages, Reading, bounded
from ullage.v1 import node_pb2

_NO_PAGES: Final = Pages()


def memory_sample(reading: Reading, verdict: Verdict, estimate: Estimate, taken_at_ns: int) -> node_pb2.MemorySample:
    """All that is known of the memory at `taken_at_ns`, nanoseconds since 1970."""
    pages = reading.darwin.pages if reading.darwin is not None else _NO_PAGES
    sample = node_pb2.MemorySample(
        ram_total_bytes=reading.total_bytes,
        ram_available_bytes=reading.available_bytes,
        swap_total_bytes=reading.swap_total_bytes,
        swap_available_bytes=reading.swap_available_bytes,
        # The machine may have more free than the limit lets this node have.
        ram_free_bytes=bounded(reading.ram_free_bytes, reading.cgroup_limit_bytes),
        wired_bytes=reading.wired_bytes,
        compressed_bytes=pages.compressor_bytes,
        purgeable_bytes=pages.purgeable_bytes,
        file_backed_bytes=reading.file_backed_bytes,
        cgroup_limit_bytes=reading.cgroup_limit_bytes,
        cgroup_used_bytes=reading.cgroup_used_bytes,
        own_bytes=reading.own_bytes,
        arc_bytes=reading.arc_bytes,
        huge_pages_bytes=reading.huge_pages_bytes,
        commit_limit_bytes=reading.commit_limit_bytes,
        commit_available_bytes=reading.commit_available_bytes,
        anonymous_bytes=pages.anonymous_bytes,
        device_limit_bytes=reading.device_limit_bytes,
        stall_some_pct=verdict.stalls.some_pct,
        stall_full_pct=verdict.stalls.full_pct,
        strict_available_bytes=estimate.strict_bytes,
        balanced_available_bytes=estimate.balanced_bytes,
        ceiling_available_bytes=estimate.ceiling_bytes,
        pressure_level=verdict.level,
        pressure_pct=verdict.pressure_pct,
        source=reading.source,
    )
    taken_at = sample.taken_at
    taken_at.seconds, taken_at.nanos = divmod(taken_at_ns, 1_000_000_000)
    # Most samples have none of either.
    for reason in verdict.reasons:
        sample.pressure_reasons.add(level=reason.level, signal=reason.signal, detail=reason.detail)
    if flags := [*estimate.flags, *_reading_flags(reading)]:
        sample.flags.extend(flags)
    return sample


def _reading_flags(reading: Reading) -> list[node_pb2.MemoryFlag.ValueType]:
    flags = []
    if reading.host_stall is None and reading.cgroup_stall is None and reading.darwin is None:
        flags.append(node_pb2.MEMORY_FLAG_PSI_MISSING)
    if reading.clamped:
        flags.append(node_pb2.MEMORY_FLAG_CLAMPED)
    if reading.cgroup_limit_bytes is not None:
        flags.append(node_pb2.MEMORY_FLAG_CGROUP_LIMITED)
    if reading.device_limit_assumed:
        flags.append(node_pb2.MEMORY_FLAG_DEVICE_LIMIT_ASSUMED)
    # What psutil calls available means something else on every system.
    if reading.coarse or reading.source == node_pb2.MEMORY_SOURCE_PSUTIL:
        flags.append(node_pb2.MEMORY_FLAG_ESTIMATED)
    return flags
