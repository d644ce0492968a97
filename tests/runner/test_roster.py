"""What a runner leaves on the disk for the probe beside it."""

from __future__ import annotations

from pathlib import Path

from services.runner.roster import Roster


def names(state_dir: Path) -> list[str]:
    return sorted(path.name for path in (state_dir / "shards").iterdir())


def test_a_shards_process_is_named_while_it_runs(tmp_path: Path) -> None:
    roster = Roster(tmp_path)
    roster.clear()
    assert names(tmp_path) == []
    roster.enter(17)
    roster.enter(18)
    assert names(tmp_path) == ["17", "18"]
    roster.leave(17)
    roster.leave(17)
    assert names(tmp_path) == ["18"]


def test_what_a_killed_runner_left_behind_is_cleared_by_the_next(tmp_path: Path) -> None:
    Roster(tmp_path).clear()
    Roster(tmp_path).enter(17)
    Roster(tmp_path).clear()
    assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_keeps_no_runner_from_working(tmp_path: Path) -> None:
    (tmp_path / "shards").write_text("a file, where a folder should be")
    roster = Roster(tmp_path)
    roster.clear()
    roster.enter(17)
    roster.leave(17)
    assert (tmp_path / "shards").read_text() == "a file, where a folder should be"
