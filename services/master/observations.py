"""What a probe may say: checked before anything of it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import Final
from zlib import crc32

from google.protobuf.message import DecodeError

from services import log_format
from services.master import errors
from services.master.batch import NOTHING, Batch
from services.master.soundness import is_time, unsound
from ullage.v1 import event_pb2, node_pb2, telemetry_service_pb2

BATCH_OBSERVATIONS_MAX: Final = 4096
"""Facts in one message: as many as the log takes in one transaction."""

BATCH_BYTES_MAX: Final = 4 << 20
"""Bytes in one message: several wait for the disk at once, from every node."""

_MEMORY_SAMPLED: Final = log_format.KIND_NUMBERS["memory_sampled"]

_CLAMP: Final = "clamp the reading and flag it MEMORY_FLAG_CLAMPED, or leave out what was not measured"


def checked(
    node_id: str, observations: Sequence[telemetry_service_pb2.UnopenedObservation], last_sequence: int
) -> Batch:
    """What `node_id`'s probe said.

    `last_sequence` is the source_sequence of the last observation this stream brought before, 0 for none. What
    follows may leave some out, since a probe gives up facts when its buffer is full, but not go back. Raises
    InvalidRequest, naming what to fix, unless all of it may be stored.
    """
    if not observations:
        return NOTHING
    if len(observations) > BATCH_OBSERVATIONS_MAX:
        raise errors.InvalidRequest(
            f"a message holds {len(observations)} observations: send at most {BATCH_OBSERVATIONS_MAX} in one"
        )
    sequences, payloads = zip(*[(said.source_sequence, said.fact) for said in observations], strict=True)
    if (size := sum(map(len, payloads))) > BATCH_BYTES_MAX:
        raise errors.InvalidRequest(f"a message holds {size} bytes of facts: send at most {BATCH_BYTES_MAX} in one")
    _refuse_disorder(last_sequence, sequences)
    facts, crcs = _opened(sequences, payloads), list(map(crc32, payloads))
    if _plain_samples(node_id, facts):
        return Batch(sequences, [_MEMORY_SAMPLED] * len(facts), payloads, crcs, facts, sampled_node_id=node_id)
    for sequence, fact in zip(sequences, facts, strict=True):
        if wrong := _wrong(node_id, fact):
            raise errors.InvalidRequest(f"observation {sequence}: {wrong}")
    return Batch(sequences, list(map(log_format.kind, facts)), payloads, crcs, facts)


def _refuse_disorder(last_sequence: int, sequences: Sequence[int]) -> None:
    for before, after in pairwise((last_sequence, *sequences)):
        if after <= before:
            raise errors.InvalidRequest(
                f"source_sequence {after} follows {before}: number what a boot says 1, 2, 3 ... and send it in order"
            )


def _opened(sequences: Sequence[int], payloads: Sequence[bytes]) -> Sequence[event_pb2.Fact]:
    """The facts in these bytes. Raises InvalidRequest, naming the first that holds none."""
    try:
        return log_format.opened(payloads)
    except DecodeError as error:
        for sequence, payload in zip(sequences, payloads, strict=True):
            try:
                event_pb2.Fact.FromString(payload)
            except DecodeError:
                raise errors.InvalidRequest(f"observation {sequence}: its bytes are no fact: {error}") from error
        raise


def _plain_samples(node_id: str, facts: Sequence[event_pb2.Fact]) -> bool:
    """Whether all are samples of the node's memory with nothing wrong, as nearly all are: asked with the fewest steps.

    False says nothing: a whole that is absent, and so reads as 0, looks smaller here than its parts.
    """
    for fact in facts:
        sampled = fact.memory_sampled
        # One that is about this node is there, so it is what the fact is.
        if sampled.node_id != node_id:
            return False
        sample = sampled.sample
        total = sample.ram_total_bytes
        if not (
            sample.ram_available_bytes <= total >= sample.ram_free_bytes
            and sample.strict_available_bytes <= total >= sample.balanced_available_bytes
            and sample.ceiling_available_bytes <= total
            and sample.swap_available_bytes <= sample.swap_total_bytes
            and isfinite(sample.pressure_pct + sample.stall_some_pct + sample.stall_full_pct)
            and is_time(sample.taken_at)
        ):
            return False
    return True


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
        case None if not fact.ByteSize():
            return "it holds no fact"
        case None:
            return "its kind is unknown to this master: it is older than the probe; update the master first"
        case kind:
            return f"a probe may not report {kind}"
    if about != node_id:
        return f"it is about node {about!r}, in what node {node_id!r} says"
    return wrong or unsound(fact)


def _wrong_memory(sample: node_pb2.MemorySample) -> str:
    """What is wrong with a sample. An absent figure reads as 0, which is never more than a whole."""
    most = max(
        sample.ram_available_bytes,
        sample.ram_free_bytes,
        sample.strict_available_bytes,
        sample.balanced_available_bytes,
        sample.ceiling_available_bytes,
    )
    if most > sample.ram_total_bytes and sample.HasField("ram_total_bytes"):
        return f"{most} bytes are available of {sample.ram_total_bytes} in all; {_CLAMP}"
    swap = sample.swap_total_bytes
    if sample.swap_available_bytes > swap and sample.HasField("swap_total_bytes"):
        return f"{sample.swap_available_bytes} bytes of swap are available of {swap} in all; {_CLAMP}"
    return ""
