"""A log is read without its master, and reading it changes nothing."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, eventually, ullage
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.model

WAL_HEADER_BYTES = 32
"""Written anew when a WAL begins again after a checkpoint."""


@pytest.fixture
def copied(shared: Cluster, tmp_path: Path) -> Path:
    """A copy of the shared cluster's log, taken while it runs: the database and what is still in its WAL."""
    eventually("the log is copied between two checkpoints", lambda: _copied_whole(shared.log_path, tmp_path))
    return tmp_path / "events.db"


def _copied_whole(log: Path, folder: Path) -> bool:
    """Whether nothing went from the WAL into the database meanwhile; what was only added to the WAL may be there."""
    wal = log.with_name(f"{log.name}-wal")
    for source in (log, wal):
        shutil.copyfile(source, folder / source.name)
    return all(
        _beginning(source, size_bytes) == _beginning(folder / source.name, size_bytes)
        for source, size_bytes in ((log, None), (wal, WAL_HEADER_BYTES))
    )


def _beginning(path: Path, size_bytes: int | None) -> bytes:
    return path.read_bytes()[:size_bytes]


def test_a_copied_log_shows_the_state_of_any_moment_without_a_master(shared: Cluster, copied: Path) -> None:
    head = int(json.loads(ullage("state", "--log", str(copied), "--json").stdout)["head_sequence"])
    for sequence in (1, head // 2, head):
        offline = json.loads(ullage("state", "--log", str(copied), "--at", str(sequence), "--json").stdout)
        running = shared.ask("state", "--at", str(sequence))
        assert offline["state"]["sequence"] == str(sequence)
        assert offline["state_hash"] == running["state_hash"]
        # Whether a node is heard is known to a running master alone.
        assert all("liveness" not in node for node in offline["state"]["nodes"])


def test_a_copied_log_lists_its_events(copied: Path) -> None:
    first = ullage("events", "--log", str(copied), "--from", "1", "--limit", "1").stdout
    assert first.split()[:1] == ["1"]
    assert "master_started" in first
    registered = ullage("events", "--log", str(copied), "--kind", "model_registered", "--json").stdout.splitlines()
    assert [json.loads(line)["fact"]["model_registered"]["model"]["model_id"] for line in registered] == [MODEL]


def test_reading_a_log_does_not_change_its_folder(copied: Path) -> None:
    def fingerprint() -> dict[str, str]:
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in copied.parent.iterdir()}

    before = fingerprint()
    ullage("state", "--log", str(copied), "--json")
    assert fingerprint() == before


def test_a_sequence_beyond_the_end_is_out_of_range_and_the_end_is_named(copied: Path) -> None:
    said = ullage("state", "--log", str(copied), "--at", "99999999", code=1)
    assert "99999999" in said.stderr


def test_a_file_that_is_no_log_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "not.db").write_text("hello")
    said = ullage("state", "--log", str(tmp_path / "not.db"), code=1)
    [line] = said.stderr.splitlines()
    assert "not.db" in line
    assert "Traceback" not in line
