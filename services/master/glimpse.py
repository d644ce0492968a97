"""What a stored fact is a sample of, told from how its bytes begin: most samples of a long log need not be read.

Rules this module lives by:
- What is told is certain, or nothing is: the bytes hold one sample of the node, whole, and not a byte more. Written
  in another way, though it means the same, it is read like any fact.
- The bytes are those that were stored: whoever asks has checked them. No column that no checksum covers is asked.
- A sample's own fields are not looked at. What no release could read was never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, TypeAlias

from services import log_format
from ullage.v1 import event_pb2

Sampled: TypeAlias = tuple[int, str]
"""The kind of a sample, and the node that took it."""

_NODE_ID_TAG: Final = log_format.tag(event_pb2.MemorySampled.NODE_ID_FIELD_NUMBER)


def glimpsed(payloads: Sequence[bytes]) -> list[Sampled | None]:
    """Of each fact what it is a sample of; None where it is none, or that is not certain without reading it."""
    # All before the sample's own bytes, and at most two of these, if it is a sample of less than 16 KiB: the length of
    # the node's id stands behind that of the fact, which is one byte or two.
    heads = [
        payload[: 8 + payload[3 if payload[1] < 0x80 else 4]] if len(payload) > 4 else payload for payload in payloads
    ]
    return list(map(_sampled, heads, map(len, payloads)))


@lru_cache(maxsize=4096)  # A thousand nodes' samples begin in fewer ways.
def _sampled(head: bytes, length: int) -> Sampled | None:
    """What so many bytes that begin like this are a sample of."""
    for kind in (event_pb2.Fact.MEMORY_SAMPLED_FIELD_NUMBER, event_pb2.Fact.SYSTEM_SAMPLED_FIELD_NUMBER):
        before = _alone(kind, length)
        if before is None:
            continue
        begin = len(before + _NODE_ID_TAG) + 1
        end = begin + int.from_bytes(head[begin - 1 : begin], "big")
        node_id, sample = head[begin:end], _alone(event_pb2.MemorySampled.SAMPLE_FIELD_NUMBER, length - end)
        if sample is None or not node_id.isascii():
            continue
        if head.startswith(before + _NODE_ID_TAG + log_format.varint(len(node_id)) + node_id + sample):
            return kind, node_id.decode()
    return None


def _alone(field_number: int, length: int) -> bytes | None:
    """What stands before a message that takes, in this field, so many bytes in all; None where none takes so many."""
    tag = log_format.tag(field_number)
    for inner in range(max(0, length - len(tag) - 3), length - len(tag)):
        before = tag + log_format.varint(inner)
        if len(before) + inner == length:
            return before
    return None
