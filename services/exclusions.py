"""Why a node gets no layers, in words: the same wherever it is said."""

from __future__ import annotations

from typing import Final

from ullage.v1 import model_pb2

_WORDS: Final[dict[model_pb2.Exclusion.ValueType, str]] = {
    model_pb2.EXCLUSION_CRITICAL: "its memory pressure is CRITICAL",
    model_pb2.EXCLUSION_UNKNOWN_LEVEL: "its pressure level is unknown",
    model_pb2.EXCLUSION_NO_MEMORY_READING: "no memory reading",
    model_pb2.EXCLUSION_STALE: "silent, its probe or its runner has not been heard of late",
    model_pb2.EXCLUSION_NO_RUNNER: "no runner has announced itself there",
    model_pb2.EXCLUSION_REQUESTED: "the request excludes it",
    model_pb2.EXCLUSION_MODEL_ABSENT: "the model is not on its disk, run `ullage models add` there",
    model_pb2.EXCLUSION_UNREACHABLE: "the other nodes do not reach it",
    model_pb2.EXCLUSION_TOO_SMALL: "too small for even one layer",
}


def words(reason: model_pb2.Exclusion.ValueType) -> str:
    """What stands after "left out: "."""
    return _WORDS.get(reason, "for a reason that this release does not know")
