"""As much of a refusal as the status of a call can carry.

A status travels in trailing headers, and clients refuse more than some KiB of them: gRPC's own from 8 KiB on, at
first now and then, so that a large cluster's refusals would be lost at random. The log and PreviewPlacement have
the whole of it.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final
from urllib.parse import quote

from ullage.v1 import model_pb2

STATUS_BYTES_MAX: Final = 7 * 1024
"""Below 8 KiB by what else is in the trailers."""

_UNQUOTED: Final = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def excerpt(refusal: model_pb2.Refusal) -> model_pb2.Refusal:
    """`refusal` itself where it can be carried, else with as many of its nodes as can be."""
    nodes = len(refusal.nodes)
    left_out = bisect_left(range(nodes), True, key=lambda count: _fits(_without(refusal, nodes - count)))  # noqa: FBT003 - the first yes
    return _without(refusal, nodes - left_out)


def _without(refusal: model_pb2.Refusal, kept: int) -> model_pb2.Refusal:
    """The refusal with its first `kept` nodes, in its message as in its list."""
    left_out = len(refusal.nodes) - kept
    if not left_out:
        return refusal
    headline, *lines = refusal.message.split("\n")
    rest = f"  and {left_out} more: `ullage place --dry-run` shows every node"
    part = model_pb2.Refusal()
    part.CopyFrom(refusal)
    part.message = "\n".join([headline, *lines[:kept], rest, *lines[len(refusal.nodes) :]])
    del part.nodes[kept:]
    return part


def _fits(refusal: model_pb2.Refusal) -> bool:
    """Its message as a header, and both once more in the details, which may be sent in base 64."""
    message = len(quote(refusal.message, safe=_UNQUOTED))
    details = len(refusal.message.encode()) + refusal.ByteSize()
    return message + details * 4 // 3 <= STATUS_BYTES_MAX
