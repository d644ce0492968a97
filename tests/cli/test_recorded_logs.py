"""A log that was recorded once replays for ever, and its decisions come out as they were recorded."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

LOGS: Final = Path(__file__).parents[1] / "recorded" / "logs"
LOG: Final = LOGS / "three_nodes.db"
STATE_HASH: Final = "8b7d99d3e4c05ca449647ee3ac2d7828d57654ef12be5ed9c3b95557b66a9221"
WHATIFS: Final = {
    "as_it_was": "",
    "without_a_node": "--without node-2",
    "long_context": "--context 8192",
}


def ullage(*arguments: str, check: bool = True) -> str:
    said = subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=check,
    )
    return said.stdout


def reviewed(name: str) -> str:
    return (LOGS / f"three_nodes.{name}.txt").read_text()


def test_the_state_is_what_it_was() -> None:
    answer = json.loads(ullage("state", "--log", str(LOG), "--json"))
    assert answer["head_sequence"] == "515"
    assert answer["state_hash"] == STATE_HASH
    assert answer["state"]["unapplied_events"] == "0"


def test_the_decision_is_explained_as_it_was_recorded() -> None:
    # The allocator may decide otherwise by now, and then says so with its exit code; what was decided stays.
    assert ullage("why", "--log", str(LOG), "smollm2", check=False) == reviewed("why")


@pytest.mark.parametrize("name", WHATIFS)
def test_another_decision_is_what_was_reviewed(name: str) -> None:
    said = ullage("whatif", "--log", str(LOG), "--at", "172", *shlex.split(WHATIFS[name]), "smollm2-135m")
    assert said == reviewed(f"whatif_{name}")


def test_nothing_in_it_is_damaged() -> None:
    assert ullage("log", "verify", "--log", str(LOG)) == (
        "515 events, 408 commits and 0 compacted ranges were read, up to sequence 515\n"
    )


def test_an_exported_log_is_imported_with_its_sequences_and_its_state(tmp_path: Path) -> None:
    ullage("log", "export", "--log", str(LOG), str(tmp_path / "events.bin"))
    ullage("log", "import", str(tmp_path / "events.bin"), "--log", str(tmp_path / "imported.db"))
    answer = json.loads(ullage("state", "--log", str(tmp_path / "imported.db"), "--json"))
    assert answer["state_hash"] == STATE_HASH


def test_what_changed_is_told_as_facts_and_as_state() -> None:
    said = ullage("diff", "--log", str(LOG), "172", "360")
    assert "instance_placed" in said
    assert "memory_sampled" not in said
    assert "instance smollm2-135m-f7ebab: new, RUNNING" in said


def test_the_past_is_played_to_its_end() -> None:
    said = ullage("replay", "--log", str(LOG), "--speed", "10000")
    assert "sequence 515" in said
