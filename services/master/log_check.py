"""Reads all of a log and says what in it is not what was stored: `python -m services.master.log_check FILE`.

What is checked, from the bytes up: SQLite's own structure, the tables and their triggers, each row against its crc,
each commit above the mark against the chain of hashes, each compacted range against its seal, what every source had
said, the checkpoints against the events they stand for, and the end of the log against what was acknowledged.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from google.protobuf.message import DecodeError
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from services import log_format
from services.master import log_file
from services.master.checkpoint import RELEASE, restored
from services.master.keeper import sealed, seals, standing
from services.master.log_head import read_head
from services.master.log_reader import LogReader
from services.master.replay import fold
from services.master.state import State
from services.master.view import state_hash


@dataclass
class Report:
    """What was read, and what is wrong with it."""

    findings: list[str] = field(default_factory=list)
    head_sequence: int = 0
    events: int = 0
    commits: int = 0
    ranges: int = 0


def check_file(path: Path) -> Report:
    """A report on the log at `path`, which is not written to. Raises LogFileError when it is none."""
    try:
        with log_file.read_only_engine(path) as engine:
            log_file.check_readable(path, engine)
            return check(engine, path)
    except DBAPIError as error:
        return Report([f"SQLite cannot read {path.name}: {error.orig}"])


def check(engine: Engine, path: Path) -> Report:
    """A report on the log that `engine` reads, at `path`; it may grow meanwhile."""
    report = Report()
    steps: tuple[Callable[[Engine, LogReader, Report], Iterator[str]], ...] = (
        _structure,
        _rows,
        _chain,
        _ranges,
        _sources,
        _checkpoints,
    )
    try:
        reader = LogReader(engine)
        # The end first: what is acknowledged later is not looked for.
        acknowledged = read_head(path)
        report.head_sequence = reader.head()
        for step in steps:
            try:
                report.findings += step(engine, reader, report)
            except (DBAPIError, log_format.CorruptEventError, ValueError) as error:
                said = error.orig if isinstance(error, DBAPIError) else error
                report.findings.append(f"{step.__name__.strip('_')}: {said}")
    except DBAPIError as error:
        report.findings.append(f"SQLite cannot read it: {error.orig}")
    else:
        if acknowledged is not None and report.head_sequence < acknowledged.sequence:
            report.findings.append(
                f"it ends at sequence {report.head_sequence}, but {acknowledged.sequence} was acknowledged: "
                "its -wal is missing or damaged, or it is an older copy"
            )
    return report


def _structure(engine: Engine, _: LogReader, __: Report) -> Iterator[str]:
    with engine.connect() as connection:
        for (said,) in connection.exec_driver_sql("PRAGMA integrity_check(10)"):
            if said != "ok":
                yield f"SQLite: {said}"
        found = _schema(engine)
    expected = log_file.expected_schema()
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            yield f"schema: {name} is not as the migrations make it"


def _schema(engine: Engine) -> dict[str, str]:
    with engine.connect() as connection:
        rows = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        return {name: sql for name, sql in rows}  # noqa: C416 - mypy knows these to be pairs


def _rows(_: Engine, reader: LogReader, report: Report) -> Iterator[str]:
    """Each row by itself, and that none is missing above the mark."""
    mark, expected = reader.mark(), 1
    for row in reader.stored_rows(1, report.head_sequence):
        sequence, _at, kind, _source, _source_sequence, crc, payload = row
        if sequence != expected and sequence > mark + 1:
            yield f"event {max(expected, mark + 1)} is missing"
        expected = sequence + 1
        report.events += 1
        if zlib.crc32(payload) != crc:
            yield f"event {sequence}: its bytes do not match its checksum"
            continue
        try:
            stored = log_format.fact(sequence, crc, payload)
        except log_format.CorruptEventError as error:
            yield str(error)
            continue
        name = stored.WhichOneof("fact")
        known = log_format.UNKNOWN_KIND if name is None else log_format.KIND_NUMBERS[name]
        if kind not in {known, log_format.UNKNOWN_KIND}:
            yield f"event {sequence}: its kind is {known}, and {kind} is written beside it"


def _chain(_: Engine, reader: LogReader, report: Report) -> Iterator[str]:
    """Each commit above the mark: made again from the one before."""
    mark = reader.mark()
    before = reader.commit_hash(mark) if mark else b""
    if before is None:
        yield f"the hash of the commit that ends at {mark} is missing"
        return
    rows = reader.stored_rows(mark + 1, report.head_sequence)
    row = next(rows, None)
    for end, digest in takewhile(lambda commit: commit[0] <= report.head_sequence, reader.commits(mark)):
        together: list[int | bytes] = []
        while row is not None and row[0] <= end:
            together += row
            row = next(rows, None)
        if log_format.chain_hash(before, together) != digest:
            yield f"commit up to {end}: it does not match its hash"
        before = digest
        report.commits += 1
    if row is not None:
        yield f"event {row[0]} and what follows belongs to no commit"


def _ranges(_: Engine, reader: LogReader, report: Report) -> Iterator[str]:
    """Each compacted range that is finished: what is left of it is what was sealed."""
    known = seals(reader)
    for range_ in standing(reader):
        seal = known.get(range_)
        if seal is not None:
            report.ranges += 1
            if sealed(reader, range_) != seal:
                yield f"events {range_.first} to {range_.last}: what is left does not match its seal"


def _sources(_: Engine, reader: LogReader, report: Report) -> Iterator[str]:
    """What every source had said: as the last checkpoint has it, and the events since."""
    made = reader.checkpoint(report.head_sequence)
    said = {} if made is None else {mark.source: mark.source_sequence for mark in made.sources}
    for source, sequence in reader.said(0 if made is None else made.sequence, report.head_sequence).items():
        said[source] = max(said.get(source, 0), sequence)
    for source, sequence in reader.sources().items():
        if sequence < said.get(source, 0) or (reader.head() == report.head_sequence and sequence != said.get(source)):
            yield f"source {source}: it said up to {said.get(source, 0)}, and {sequence} is written beside it"


def _checkpoints(_: Engine, reader: LogReader, report: Report) -> Iterator[str]:
    """Each checkpoint: whole, and of the state that the events before it make."""
    whole = {made.sequence: made for made in reader.checkpoints(report.head_sequence)}
    state, mark = State(), reader.mark()
    for sequence in sorted(reader.checkpoint_sequences()):
        made = whole.get(sequence)
        if made is None:
            if sequence > report.head_sequence:
                yield f"checkpoint at {sequence}: the log ends at {report.head_sequence}"
            else:
                yield f"checkpoint at {sequence}: its bytes do not match its checksum"
            continue
        if sequence < mark:
            continue  # Samples that it was made of have gone since.
        for _reached in fold(reader, state, sequence):
            pass
        if made.ullage_version == RELEASE and state_hash(restored(made)) != state_hash(state):
            yield f"checkpoint at {sequence}: it is not the state that the events make"


def main(arguments: list[str]) -> int:
    """Print a report as JSON on one line; 0 when nothing is wrong, 1 when something is, 2 for no log at all."""
    try:
        report = check_file(Path(arguments[0]))
    except (log_file.LogFileError, DecodeError) as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(report.__dict__))
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
