"""The log's stored form: what a row holds, how it is checked, and how old forms are told from newer ones.

A log is a SQLite file. Each row of `events` is one fact: its place, when the master stored it, its kind
(the field number of the fact in event.proto), who said it, and the serialised Fact itself with a crc32
over exactly those bytes. Nothing is ever re-serialised: what was stored is what is read and checked.
"""

from __future__ import annotations

import zlib
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from ullage.v1 import event_pb2

APPLICATION_ID: Final = 0x556C6C67
"""SQLite's application_id of a log: "Ullg"."""

FORMAT_VERSION: Final = 1
"""SQLite's user_version of a log: raised when rows of this release cannot be read by an older one."""

KIND_NAMES: Final[dict[int, str]] = {
    field.number: field.name for field in event_pb2.Fact.DESCRIPTOR.oneofs_by_name["fact"].fields
}
KIND_NUMBERS: Final[dict[str, int]] = {name: number for number, name in KIND_NAMES.items()}

UNKNOWN_KIND: Final = 0
"""The kind of a fact this release does not know; the row keeps its bytes."""


class CorruptEventError(Exception):
    """A stored row does not hold what was stored: its bytes do not match its crc, or do not parse."""

    def __init__(self, sequence: int, detail: str) -> None:
        super().__init__(f"event {sequence} is corrupt: {detail}")
        self.sequence = sequence


class Row(NamedTuple):
    """One row of `events`, in the order of its columns."""

    sequence: int
    recorded_at_ns: int
    kind: int
    source: str
    source_sequence: int
    crc: int
    payload: bytes


def row(sequence: int, recorded_at_ns: int, source: str, source_sequence: int, fact: event_pb2.Fact) -> Row:
    """The row that stores `fact`."""
    payload = fact.SerializeToString()
    name = fact.WhichOneof("fact")
    kind = UNKNOWN_KIND if name is None else KIND_NUMBERS[name]
    return Row(sequence, recorded_at_ns, kind, source, source_sequence, zlib.crc32(payload), payload)


def event(stored: Row) -> event_pb2.RecordedEvent:
    """The event a row stores. Raises CorruptEventError when its bytes are not those that were stored."""
    if zlib.crc32(stored.payload) != stored.crc:
        raise CorruptEventError(stored.sequence, "its bytes do not match its checksum")
    recorded = event_pb2.RecordedEvent(
        sequence=stored.sequence, source=stored.source, source_sequence=stored.source_sequence
    )
    recorded.recorded_at.FromNanoseconds(stored.recorded_at_ns)
    try:
        recorded.fact.ParseFromString(stored.payload)
    except DecodeError as error:
        raise CorruptEventError(stored.sequence, f"its bytes are no fact: {error}") from error
    return recorded
