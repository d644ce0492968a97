"""What a probe may say: checked before anything of it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from services.master import errors
from ullage.v1 import event_pb2, node_pb2, telemetry_service_pb2

BATCH_OBSERVATIONS_MAX: Final = 4096
"""Facts in one message: as many as the log takes in one transaction."""

_CLAMP: Final = "clamp the reading and flag it MEMORY_FLAG_CLAMPED, or leave out what was not measured"


def checked(
    node_id: str, observations: Sequence[telemetry_service_pb2.Observation], last_sequence: int
) -> list[tuple[int, event_pb2.Fact]]:
    """What `node_id`'s probe said, each fact with its source_sequence.

    `last_sequence` is the source_sequence of the last observation this stream brought before, 0 for none. What
    follows may leave some out, since a probe gives up facts when its buffer is full, but not go back. Raises
    InvalidRequest, naming what to fix, unless all of it may be stored.
    """
    if len(observations) > BATCH_OBSERVATIONS_MAX:
        raise errors.InvalidRequest(
            f"a message holds {len(observations)} observations: send at most {BATCH_OBSERVATIONS_MAX} in one"
        )
    facts = []
    for said in observations:
        sequence, fact = said.source_sequence, said.fact
        if sequence <= last_sequence:
            raise errors.InvalidRequest(
                f"source_sequence {sequence} follows {last_sequence}: "
                "number what a boot says 1, 2, 3 ... and send it in order"
            )
        last_sequence = sequence
        if wrong := _wrong(node_id, fact):
            raise errors.InvalidRequest(f"observation {sequence}: {wrong}")
        facts.append((sequence, fact))
    return facts


def _wrong(node_id: str, fact: event_pb2.Fact) -> str:
    """What is wrong with one fact, empty when nothing is."""
    match fact.WhichOneof("fact"):
        case "memory_sampled":
            about, wrong = fact.memory_sampled.node_id, _wrong_memory(fact.memory_sampled.sample)
        case "system_sampled":
            about, wrong = fact.system_sampled.node_id, _wrong_memory(fact.system_sampled.sample.memory)
        case "node_announced":
            about, wrong = fact.node_announced.identity.node_id, ""
        case "link_measured":
            about, wrong = fact.link_measured.link.from_node_id, ""
        case None:
            return "its kind is unknown to this master: it is older than the probe; update the master first"
        case kind:
            return f"a probe may not report {kind}"
    return wrong if about == node_id else f"it is about node {about!r}, in what node {node_id!r} says"


def _wrong_memory(sample: node_pb2.MemorySample) -> str:
    """What is wrong with a sample. An absent figure reads as 0, which is never more than a whole."""
    ram, swap = sample.ram_total_bytes, sample.swap_total_bytes
    most = max(
        sample.ram_available_bytes,
        sample.ram_free_bytes,
        sample.strict_available_bytes,
        sample.balanced_available_bytes,
        sample.ceiling_available_bytes,
    )
    if most > ram and sample.HasField("ram_total_bytes"):
        return f"{most} bytes are available of {ram} in all; {_CLAMP}"
    if sample.swap_available_bytes > swap and sample.HasField("swap_total_bytes"):
        return f"{sample.swap_available_bytes} bytes of swap are available of {swap} in all; {_CLAMP}"
    return ""
