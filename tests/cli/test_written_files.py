"""What `ullage log` writes is whole or not there; and nobody is told that a reader had enough."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.failure import CommandError, ExitCode
from services.cli.log import _written


def test_a_file_is_there_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "copy.db"
    with _written(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert list(tmp_path.iterdir()) == [path]


def test_of_what_was_not_finished_nothing_stays(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), _written(tmp_path / "copy.db") as file:
        file.write(bytes(1 // 0))
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "copy.db"
    path.write_text("precious")
    with pytest.raises(CommandError, match="is there already") as refused, _written(path):
        pass
    assert refused.value.exit_code == ExitCode.USAGE
    assert path.read_text() == "precious"


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "copy.db"
    with pytest.raises(CommandError, match=r"copy\.db cannot be written: No such file or directory"), _written(path):
        pass


def test_a_reader_that_has_enough_ends_a_command_quietly() -> None:
    command = [sys.executable, "-m", "services.cli", "version"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
