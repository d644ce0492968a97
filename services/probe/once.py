"""One reading for a person: raw values, conclusions and reasons, the way one compares them with other tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from google.protobuf import json_format

from services.clock import Clock
from services.probe.estimator import Override, estimate
from services.probe.formulas import formulas, source_words
from services.probe.machine import Machine
from services.probe.memory_sample import memory_sample
from services.probe.pressure import judge
from ullage.v1 import node_pb2

_NONE_WHERE_ABSENT: Final = frozenset({"cgroup_limit_bytes", "cgroup_used_bytes", "arc_bytes", "own_bytes"})
"""What most machines have not got."""


def read_once(machine: Machine, override: Override | None, clock: Clock) -> node_pb2.MemorySample:
    """A sample without a history: stalls are the kernel's average over 10 s, and no hold applies."""
    reading = machine.read()
    verdict = judge(None, reading, clock.monotonic())
    return memory_sample(reading, verdict, estimate(reading, verdict.level, override), clock.now_ns())


def as_json(sample: node_pb2.MemorySample) -> str:
    """The sample as protobuf's JSON, with how each figure was reached as `formulas`; what is unknown is not in it."""
    written = json_format.MessageToDict(sample, preserving_proto_field_name=True)
    known = {name: words for name, words in formulas(sample).items() if name in written}
    return json.dumps({**written, "formulas": known}, indent=2, ensure_ascii=False)


def as_text(sample: node_pb2.MemorySample) -> str:
    """The sample as lines of a name, a value and how it was reached; what is unknown says so."""
    return "\n".join(f"{name:<24}{value:<14}{words}".rstrip() for name, value, words in _lines(sample))


def _lines(sample: node_pb2.MemorySample) -> Iterator[tuple[str, str, str]]:
    source = node_pb2.MemorySource.Name(sample.source).removeprefix("MEMORY_SOURCE_").lower()
    yield "source", source, source_words(sample.source)
    known = {field.name: value for field, value in sample.ListFields()}
    words = formulas(sample)
    for field in node_pb2.MemorySample.DESCRIPTOR.fields:
        value, how = known.get(field.name), words.get(field.name, "")
        # What another system would say is not missing here.
        if value is None and not how:
            continue
        missing = "none" if field.name in _NONE_WHERE_ABSENT else "unknown"
        if field.name.endswith("_bytes"):
            yield _spoken(field.name, "_bytes"), missing if value is None else f"{value / 2**30:.2f} GiB", how
        elif field.name.endswith("_pct"):
            yield _spoken(field.name, "_pct"), "unknown" if value is None else f"{value:.1f} %", how
    yield from _used(sample)
    yield "pressure level", node_pb2.PressureLevel.Name(sample.pressure_level).removeprefix("PRESSURE_LEVEL_"), ""
    for reason in sample.pressure_reasons:
        yield "  because", f"{reason.detail} ({reason.signal})", ""
    for flag in sample.flags:
        yield "flag", node_pb2.MemoryFlag.Name(flag).removeprefix("MEMORY_FLAG_").lower().replace("_", " "), ""


def _used(sample: node_pb2.MemorySample) -> Iterator[tuple[str, str, str]]:
    """What other tools call used, where all its parts are known."""
    if sample.HasField("anonymous_bytes") and sample.HasField("wired_bytes") and sample.HasField("compressed_bytes"):
        used = sample.anonymous_bytes - sample.purgeable_bytes + sample.wired_bytes + sample.compressed_bytes
        yield "used", f"{used / 2**30:.2f} GiB", "as Activity Monitor: anonymous - purgeable + wired + compressed"
    elif sample.HasField("ram_total_bytes") and sample.HasField("ram_available_bytes"):
        used = sample.ram_total_bytes - sample.ram_available_bytes
        yield "used", f"{used / 2**30:.2f} GiB", "as free(1): total - available; htop leaves more of the cache out"


def _spoken(name: str, unit: str) -> str:
    return name.removesuffix(unit).replace("_", " ")
