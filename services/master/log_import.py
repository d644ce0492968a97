"""Makes a log of exported events: `python -m services.master.log_import EVENTS LOG`.

The events are RecordedEvents, each behind its length, as `ullage log export` writes them. They keep their sequence,
their time and their source; the hashes are made anew. Where events are missing they were compacted away before, and
the new log says so.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError
from google.protobuf.proto import parse_length_prefixed

from services import log_format
from services.master import log_file
from services.master.event_log import insert
from services.master.log_lock import LogLock
from ullage.v1 import event_pb2

COMMIT_EVENTS: Final = 4096


class ImportFailed(Exception):
    """The events cannot become a log; the message says why."""


def import_events(source: Path, log: Path) -> int:
    """Make the log of the events in `source`; returns its last sequence. Raises ImportFailed, leaving no log."""
    if log.exists():
        raise ImportFailed(f"{log} is there already: name a file that is not")
    with log_file.kept_at(log):
        lock = LogLock(log)
    try:
        log_file.prepare(log)
        engine = log_file.writing_engine(log)
        with engine.connect() as connection, source.open("rb") as file:
            last = _Importer(log_file.driver(connection)).take(_events(file))
        engine.dispose()
    except (ImportFailed, OSError) as error:
        for suffix in ("", "-wal", "-shm", ".lock"):
            log.with_name(log.name + suffix).unlink(missing_ok=True)
        raise ImportFailed(f"{source.name} cannot be imported: {error}") from error
    finally:
        lock.release()
    return last


def _events(file: BufferedReader) -> Iterator[event_pb2.RecordedEvent]:
    last = 0
    # Looked at before it is read: a pipe does not go back.
    may_be_json = file.peek(1).startswith(b"{")
    try:
        while (event := parse_length_prefixed(event_pb2.RecordedEvent, file)) is not None:  # type: ignore[arg-type]  # it takes any file
            yield event
            last = event.sequence
    except (DecodeError, ValueError) as error:
        if may_be_json and not last:
            raise ImportFailed("it is JSON, in which not all of an event is: export it without --json") from error
        where = f"what follows event {last}" if last else "what it begins with"
        raise ImportFailed(f"{where} is no whole event; export it once more from where it came from") from error


class _Importer:
    def __init__(self, driver: sqlite3.Connection) -> None:
        self._driver = driver
        self._hash = b""
        self._sequence = 0
        self._sources: dict[str, tuple[int, int]] = {}
        """Number and last source_sequence of each source, by its name."""

    def take(self, events: Iterator[event_pb2.RecordedEvent]) -> int:
        cells: list[int | bytes] = []
        for event in events:
            if event.sequence <= self._sequence:
                raise ImportFailed(f"event {event.sequence} follows event {self._sequence}")
            gap = event.sequence != self._sequence + 1
            cells += self._row(event)
            self._sequence = event.sequence
            if gap or len(cells) == COMMIT_EVENTS * log_format.ROW_CELLS:
                self._commit(cells, compacted=gap)
                cells = []
        if cells:
            self._commit(cells, compacted=False)
        return self._sequence

    def _row(self, event: event_pb2.RecordedEvent) -> log_format.StoredRow:
        number, said = self._sources.get(event.source, (len(self._sources) + 1, 0))
        self._sources[event.source] = number, max(said, event.source_sequence)
        at_ns = event.recorded_at.ToNanoseconds()
        return log_format.stored_row(event.sequence, at_ns, number, event.source_sequence, event.fact)

    def _commit(self, cells: Sequence[int | bytes], *, compacted: bool) -> None:
        self._hash = log_format.chain_hash(self._hash, cells)
        run = self._driver.execute
        with self._driver:
            run("BEGIN IMMEDIATE")
            for name, (number, said) in self._sources.items():
                run(
                    "INSERT INTO sources (id, name, last_seq) VALUES (?, ?, ?) "
                    "ON CONFLICT (id) DO UPDATE SET last_seq = excluded.last_seq",
                    (number, name, said),
                )
            insert(self._driver, cells)
            run("INSERT INTO chain (seq, hash) VALUES (?, ?)", (self._sequence, self._hash))
            if compacted:
                run("INSERT INTO compacted (first_seq, last_seq) VALUES (1, ?)", (self._sequence,))


def main(arguments: list[str]) -> int:
    """Import, and print the last sequence; 1 when it cannot be."""
    try:
        print(import_events(Path(arguments[0]), Path(arguments[1])))
    except (ImportFailed, log_file.LogFileError) as error:
        print(f"ullage log import: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
