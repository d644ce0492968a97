"""The log's stored form: what a row holds, how it is checked, and how old forms are told from newer ones.

A log is a SQLite file. Each row of `events` is one fact: its place, when the master stored it, its kind
(the field number of the fact in event.proto), who said it, and the serialised Fact itself with a crc32
over exactly those bytes. Nothing is ever re-serialised: what was stored is what is read and checked.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from google.protobuf import timestamp_pb2
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

_KINDS: Final[dict[str | None, int]] = dict([*KIND_NUMBERS.items(), (None, UNKNOWN_KIND)])


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

ROW_CELLS: Final = len(Row._fields)
"""Where rows are one sequence, cell after cell, as many make one: it is cheaper than a tuple for each."""


def kind(stored: event_pb2.Fact) -> int:
    """The number of a fact's kind."""
    return _KINDS[stored.WhichOneof("fact")]


def stored_row(
    sequence: int, recorded_at_ns: int, source_number: int, source_sequence: int, stored: event_pb2.Fact
) -> StoredRow:
    """The row that stores a fact."""
    payload = stored.SerializeToString()
    return sequence, recorded_at_ns, kind(stored), source_number, source_sequence, zlib.crc32(payload), payload


def fact(sequence: int, crc: int, payload: bytes) -> event_pb2.Fact:
    """The fact a row stores. Raises CorruptEventError when its bytes are not those that were stored."""
    if zlib.crc32(payload) != crc:
        raise CorruptEventError(sequence, "its bytes do not match its checksum")
    try:
        return event_pb2.Fact.FromString(payload)
    except DecodeError as error:
        raise CorruptEventError(sequence, f"its bytes are no fact: {error}") from error


def recorded(
    sequence: int, recorded_at_ns: int, source: str, source_sequence: int, stored: event_pb2.Fact | None = None
) -> event_pb2.RecordedEvent:
    """A fact in its place in the log; without one, the place."""
    seconds, nanoseconds = divmod(recorded_at_ns, 1_000_000_000)
    return event_pb2.RecordedEvent(
        sequence=sequence,
        recorded_at=timestamp_pb2.Timestamp(seconds=seconds, nanos=nanoseconds),
        source=source,
        source_sequence=source_sequence,
        fact=stored,
    )


def event(row: Row) -> event_pb2.RecordedEvent:
    """The event a row stores. Raises CorruptEventError when its bytes are not those that were stored."""
    stored = fact(row.sequence, row.crc, row.payload)
    return recorded(row.sequence, row.recorded_at_ns, row.source, row.source_sequence, stored)


def wire(row: Row) -> bytes:
    """The serialised RecordedEvent of a row, around its payload as it is; the payload is not looked at."""
    header = recorded(row.sequence, row.recorded_at_ns, row.source, row.source_sequence).SerializeToString()
    return header + _EVENT_FACT_TAG + varint(len(row.payload)) + row.payload


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    written, rest = bytearray(), number
    while rest > 0x7F:
        written.append(rest & 0x7F | 0x80)
        rest >>= 7
    written.append(rest)
    return bytes(written)


def tag(field_number: int) -> bytes:
    """What stands before a field of bytes, and before its length."""
    return varint(field_number << 3 | 2)


_EVENT_FACT_TAG: Final = tag(event_pb2.RecordedEvent.FACT_FIELD_NUMBER)


def check(sequences: Sequence[int], crcs: Sequence[int], payloads: Sequence[bytes]) -> None:
    """Raise CorruptEventError, naming the first, when the bytes of a row are not those that were stored."""
    if list(map(zlib.crc32, payloads)) == list(crcs):
        return
    for sequence, crc, payload in zip(sequences, crcs, payloads, strict=True):
        if zlib.crc32(payload) != crc:
            raise CorruptEventError(sequence, "its bytes do not match its checksum")


def facts(sequences: Sequence[int], payloads: Sequence[bytes]) -> Iterator[event_pb2.Fact]:
    """The facts in these rows, which were checked. Raises CorruptEventError, naming the first whose bytes are none."""
    try:
        yield from parsed(payloads)
    except DecodeError:
        for sequence, payload in zip(sequences, payloads, strict=True):
            fact(sequence, zlib.crc32(payload), payload)


def parsed(payloads: Sequence[bytes]) -> Iterator[event_pb2.Fact]:
    """The facts in these bytes, some read together, which takes a third of the time. Raises DecodeError."""
    for start in range(0, len(payloads), _PARSED_TOGETHER):
        yield from event_pb2.Facts.FromString(repeated(payloads[start : start + _PARSED_TOGETHER])).facts


def opened(payloads: Sequence[bytes]) -> Sequence[event_pb2.Fact]:
    """The same, to be kept: of those read together, each is an object only while somebody holds it.

    Thousands of objects that nobody looks at would make each look at another dearer. Raises DecodeError.
    """
    if len(payloads) > _PARSED_TOGETHER:
        return list(parsed(payloads))
    return event_pb2.Facts.FromString(repeated(payloads)).facts


def repeated(messages: Sequence[bytes]) -> bytes:
    """Serialised messages as the repeated field 1 of another: the facts of Facts, the events of FollowResponse."""
    framed = [b""] * (2 * len(messages))
    framed[0::2] = map(_FRAMES.__getitem__, map(len, messages))
    framed[1::2] = messages
    return b"".join(framed)


class _Frames(dict[int, bytes]):
    """What stands before a message in the field 1 of another, by its length."""

    def __missing__(self, length: int) -> bytes:
        return tag(1) + varint(length)


_FRAMES: Final = _Frames()
_FRAMES.update({length: _FRAMES[length] for length in range(1024)})  # The lengths of nearly all facts.
_PARSED_TOGETHER: Final = 64
"""They share their memory, all of it held by whoever holds one: few enough, since a state holds one of each node."""


def chain_hash(before: bytes, cells: Sequence[Any]) -> bytes:
    """The hash of a commit: over the commit before it, then its rows' numbers as 64 bits each, then their payloads.

    `cells` are its rows, one after the other, as one sequence.
    """
    numbers = list(cells)
    del numbers[ROW_CELLS - 1 :: ROW_CELLS]
    packed = struct.pack(f"<{len(numbers)}q", *numbers)
    return hashlib.sha256(b"".join((before, packed, *cells[ROW_CELLS - 1 :: ROW_CELLS]))).digest()


def seal(commit: bytes, rows: Iterable[StoredRow]) -> bytes:
    """The hash of what is left of a compacted range: over the hash of the commit it ends with, then each row."""
    hashed = hashlib.sha256(commit)
    for row in rows:
        hashed.update(struct.pack("<6q", *row[:6]))
        hashed.update(row[6])
    return hashed.digest()
