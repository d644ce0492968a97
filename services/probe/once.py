"""One reading for a person: raw values, conclusions and reasons, the way one compares them with other tools."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf import json_format

from services.clock import Clock
from services.probe.estimator import Override, estimate
from services.probe.machine import Machine
from services.probe.memory_sample import memory_sample
from services.probe.pressure import judge
from ullage.v1 import node_pb2


def read_once(machine: Machine, override: Override | None, clock: Clock) -> node_pb2.MemorySample:
    """A sample without a history: stalls are the kernel's average over 10 s, and no hold applies."""
    reading = machine.read()
    verdict = judge(None, reading, clock.monotonic())
    return memory_sample(reading, verdict, estimate(reading, verdict.level, override), clock.now_ns())


def as_json(sample: node_pb2.MemorySample) -> str:
    """The sample as protobuf's JSON; what is unknown is not in it."""
    return json_format.MessageToJson(sample, preserving_proto_field_name=True)


def as_text(sample: node_pb2.MemorySample) -> str:
    """The sample as lines of a name and a value; what is unknown says so."""
    return "\n".join(f"{name:<24}{value}" for name, value in _lines(sample))


def _lines(sample: node_pb2.MemorySample) -> Iterator[tuple[str, str]]:
    yield "source", node_pb2.MemorySource.Name(sample.source).removeprefix("MEMORY_SOURCE_").lower()
    known = {field.name: value for field, value in sample.ListFields()}
    for field in node_pb2.MemorySample.DESCRIPTOR.fields:
        value = known.get(field.name)
        if field.name.endswith("_bytes"):
            yield _spoken(field.name, "_bytes"), "unknown" if value is None else f"{value / 2**30:.2f} GiB"
        elif field.name.endswith("_pct"):
            yield _spoken(field.name, "_pct"), "unknown" if value is None else f"{value:.1f} %"
    yield "pressure level", node_pb2.PressureLevel.Name(sample.pressure_level).removeprefix("PRESSURE_LEVEL_")
    for reason in sample.pressure_reasons:
        yield "  because", f"{reason.detail} ({reason.signal})"
    for flag in sample.flags:
        yield "flag", node_pb2.MemoryFlag.Name(flag).removeprefix("MEMORY_FLAG_").lower().replace("_", " ")


def _spoken(name: str, unit: str) -> str:
    return name.removesuffix(unit).replace("_", " ")
