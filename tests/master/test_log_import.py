"""Exported events become a log, or nothing does, and the place where they end is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.proto import serialize_length_prefixed

from services import log_format
from services.master.event_log import ReadOnlyLog
from services.master.log_check import check_file
from services.master.log_import import ImportFailed, import_events
from tests.master.facts import memory_sampled, unknown_kind


def exported(path: Path, sequences: list[int]) -> bytes:
    """What is in a file of exported events with these sequences."""
    with path.open("wb") as file:
        for sequence in sequences:
            fact = unknown_kind() if sequence == 2 else memory_sampled("a", available=sequence)
            event = log_format.recorded(sequence, 1000 * sequence, "probe/a/1", sequence, fact)
            serialize_length_prefixed(event, file)  # type: ignore[arg-type]  # it takes any file
    return path.read_bytes()


def test_events_keep_their_places_times_and_bytes(tmp_path: Path) -> None:
    exported(tmp_path / "events.bin", [1, 2, 3])
    assert import_events(tmp_path / "events.bin", tmp_path / "log.db") == 3
    log = ReadOnlyLog(tmp_path / "log.db")
    rows = log.read(1, 3)
    log.close()
    assert [(row.sequence, row.recorded_at_ns, row.source_sequence) for row in rows] == [
        (1, 1000, 1),
        (2, 2000, 2),
        (3, 3000, 3),
    ]
    assert rows[1].payload == unknown_kind().SerializeToString()
    assert check_file(tmp_path / "log.db").findings == []


def test_where_events_are_missing_the_log_says_so(tmp_path: Path) -> None:
    exported(tmp_path / "events.bin", [1, 5, 6])
    assert import_events(tmp_path / "events.bin", tmp_path / "log.db") == 6
    log = ReadOnlyLog(tmp_path / "log.db")
    assert log.mark() == 5
    log.close()
    assert check_file(tmp_path / "log.db").findings == []


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda content: content[:-3], "what follows event 2 is no whole event"),
        (lambda content: content + b"\x7f\x01", "what follows event 3 is no whole event"),
        (lambda content: b"\xff" * 20 + content, "what it begins with is no whole event"),
        (lambda content: content + content, "event 1 follows event 3"),
        (lambda _: b'{"sequence": "1", "fact": {}}\n', "it is JSON, in which not all of an event is: export it"),
    ],
)
def test_events_that_were_cut_short_or_spoilt_make_no_log(spoil, reason: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]  # a lambda has no types
    source = tmp_path / "events.bin"
    source.write_bytes(spoil(exported(source, [1, 2, 3])))
    with pytest.raises(ImportFailed, match=f"events.bin cannot be imported: {reason}"):
        import_events(source, tmp_path / "log.db")
    assert list(tmp_path.iterdir()) == [source]


def test_a_log_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    exported(tmp_path / "events.bin", [1])
    (tmp_path / "log.db").write_text("precious")
    with pytest.raises(ImportFailed, match="is there already: name a file that is not"):
        import_events(tmp_path / "events.bin", tmp_path / "log.db")
    assert (tmp_path / "log.db").read_text() == "precious"
