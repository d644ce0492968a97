"""What cannot be shown to anybody, or reckoned with, is refused before it is stored."""

from __future__ import annotations

from math import inf, nan

import pytest
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from services.master import errors
from services.master.observations import checked
from services.master.soundness import unsound
from tests.master.facts import memory_sampled
from ullage.v1 import event_pb2, node_pb2, telemetry_service_pb2


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (node_pb2.MemorySample(), ""),
        (node_pb2.MemorySample(taken_at=Timestamp(seconds=253_402_300_799, nanos=999_999_999)), ""),
        (node_pb2.MemorySample(taken_at=Timestamp(seconds=-62_135_596_800)), ""),
        (node_pb2.Link(latency=Duration(seconds=315_576_000_000)), ""),
        (
            node_pb2.MemorySample(taken_at=Timestamp(seconds=253_402_300_800)),
            "taken_at is no moment from the year 1 to 9999",
        ),
        (
            node_pb2.SystemSample(memory=node_pb2.MemorySample(taken_at=Timestamp(nanos=-1))),
            "memory.taken_at is no moment from the year 1 to 9999",
        ),
        (
            node_pb2.Link(latency=Duration(seconds=-1)),
            "latency is no length of time from 0 to 10,000 years",
        ),
        (
            node_pb2.SystemSample(gpus=[node_pb2.Gpu(usage_pct=1.0), node_pb2.Gpu(usage_pct=nan)]),
            "gpus.usage_pct is no number: leave out what was not measured",
        ),
        (
            node_pb2.RunnerProfile(flops_per_second=-inf),
            "flops_per_second is no number: leave out what was not measured",
        ),
    ],
)
def test_the_first_thing_that_is_wrong_is_named_with_where_it_is(message: Message, wrong: str) -> None:
    assert unsound(message) == wrong
    if "moment" in wrong:
        with pytest.raises(json_format.SerializeToJsonError):
            json_format.MessageToJson(message)
    else:
        json_format.MessageToJson(message)


def observed(fact: event_pb2.Fact) -> telemetry_service_pb2.UnopenedObservation:
    return telemetry_service_pb2.UnopenedObservation(source_sequence=1, fact=fact.SerializeToString())


@pytest.mark.parametrize("field", ["pressure_pct", "stall_some_pct", "stall_full_pct"])
@pytest.mark.parametrize("figure", [nan, inf, -inf])
def test_a_sample_of_memory_with_a_figure_that_is_none_is_refused(field: str, figure: float) -> None:
    fact = memory_sampled("a")
    setattr(fact.memory_sampled.sample, field, figure)
    with pytest.raises(errors.InvalidRequest, match=rf"observation 1: memory_sampled\.sample\.{field} is no number"):
        checked("a", [observed(fact)], 0)


@pytest.mark.parametrize(
    "taken_at", [Timestamp(seconds=2**62), Timestamp(seconds=-(2**63)), Timestamp(nanos=2**31 - 1)]
)
def test_a_sample_of_memory_of_no_time_is_refused(taken_at: Timestamp) -> None:
    fact = memory_sampled("a")
    fact.memory_sampled.sample.taken_at.CopyFrom(taken_at)
    with pytest.raises(errors.InvalidRequest, match=r"memory_sampled\.sample\.taken_at is no moment"):
        checked("a", [observed(fact)], 0)
