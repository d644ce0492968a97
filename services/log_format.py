"""The log's stored form: what a row holds, how it is checked, and how old forms are told from newer ones.

A log is a SQLite file. Each row of `events` is one fact: its place, when the master stored it, its kind
(the field number of the fact in event.proto), who said it, and the serialised Fact itself with a crc32
over exactly those bytes. Nothing is ever re-serialised: what was stored is what is read and checked.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

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

_COLUMNS: Final = struct.Struct("<6q")
"""What of a row is hashed before its payload: seq, recorded_at_ns, kind, source (its number), source_seq, crc."""

UNKNOWN_KIND: Final = 0
"""The kind of a fact this release does not know; the row keeps its bytes."""


class CorruptEventError(Exception):
    """A stored row does not hold what was stored: its bytes do not match its crc, or do not parse."""

    def __init__(self, sequence: int, detail: str) -> None:
        super().__init__(f"event {sequence} is corrupt: {detail}")
        self.sequence = sequence


class Row(NamedTuple):
    """One row of `events`, in the order of its columns, with the source's name in place of its number."""

    sequence: int
    recorded_at_ns: int
    kind: int
    source: str
    source_sequence: int
    crc: int
    payload: bytes


StoredRow: TypeAlias = tuple[int, int, int, int, int, int, bytes]
"""The same as it is in the table: with the source's number in place of its name."""


def kind(fact: event_pb2.Fact) -> int:
    """The kind column for `fact`: its field number, or UNKNOWN_KIND."""
    name = fact.WhichOneof("fact")
    return UNKNOWN_KIND if name is None else KIND_NUMBERS[name]


def fact(sequence: int, crc: int, payload: bytes) -> event_pb2.Fact:
    """The fact a row stores. Raises CorruptEventError when its bytes are not those that were stored."""
    if zlib.crc32(payload) != crc:
        raise CorruptEventError(sequence, "its bytes do not match its checksum")
    try:
        return event_pb2.Fact.FromString(payload)
    except DecodeError as error:
        raise CorruptEventError(sequence, f"its bytes are no fact: {error}") from error


def recorded(
    sequence: int, recorded_at_ns: int, source: str, source_sequence: int, stored: event_pb2.Fact
) -> event_pb2.RecordedEvent:
    """A fact in its place in the log."""
    event_ = event_pb2.RecordedEvent(sequence=sequence, source=source, source_sequence=source_sequence, fact=stored)
    event_.recorded_at.FromNanoseconds(recorded_at_ns)
    return event_


def event(row: Row) -> event_pb2.RecordedEvent:
    """The event a row stores. Raises CorruptEventError when its bytes are not those that were stored."""
    stored = fact(row.sequence, row.crc, row.payload)
    return recorded(row.sequence, row.recorded_at_ns, row.source, row.source_sequence, stored)


def chain_hash(before: bytes, rows: Sequence[StoredRow]) -> bytes:
    """The hash of a commit: over the commit before it, and every column and byte of its own rows."""
    return hashlib.sha256(before + b"".join([_COLUMNS.pack(*row[:6]) + row[6] for row in rows])).digest()
