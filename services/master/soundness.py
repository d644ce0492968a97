"""Whether a message says only what can be shown and reckoned with, whoever said it.

Rules this module lives by:
- A time out of its range is in nobody's JSON, and takes with it every answer it would stand in.
- A number that is none (NaN) is neither more nor less than any other, and every sum it goes into is none either.
  What was not measured is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

FIRST_SECOND: Final = -62_135_596_800
LAST_SECOND: Final = 253_402_300_799
"""0001-01-01T00:00:00Z to 9999-12-31T23:59:59Z, from timestamp.proto."""

LONGEST_SECONDS: Final = 315_576_000_000
"""Ten thousand years, from duration.proto."""

NANOS_MAX: Final = 999_999_999

_FLOATS: Final = frozenset({FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT})


def is_time(said: Timestamp) -> bool:
    """Whether it is a moment at all."""
    return FIRST_SECOND <= said.seconds <= LAST_SECOND and 0 <= said.nanos <= NANOS_MAX


def is_length_of_time(said: Duration) -> bool:
    """Whether it is a length of time: none of ours is less than nothing."""
    return 0 <= said.seconds <= LONGEST_SECONDS and 0 <= said.nanos <= NANOS_MAX


def unsound(message: Message) -> str:
    """What is wrong with the first thing that is, and where: "sample.taken_at is no moment ..."; else empty."""
    return next(_wrong(message, ""), "")


def _wrong(message: Message, path: str) -> Iterator[str]:
    if isinstance(message, Timestamp) and not is_time(message):
        yield f"{path} is no moment from the year 1 to 9999"
    if isinstance(message, Duration) and not is_length_of_time(message):
        yield f"{path} is no length of time from 0 to 10,000 years"
    for field, value in message.ListFields():
        at = f"{path}.{field.name}" if path else field.name
        values = value if field.is_repeated else (value,)
        if field.message_type is not None:
            for each in values:
                yield from _wrong(each, at)
        elif field.cpp_type in _FLOATS and not all(map(isfinite, values)):
            yield f"{at} is no number: leave out what was not measured"
