"""A log that was recorded once replays for ever, and its decisions come out as they were recorded."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from services.cli.__main__ import run

LOGS: Final = Path(__file__).parents[1] / "recorded" / "logs"
LOG: Final = LOGS / "three_nodes.db"
HEAD: Final = 197
STATE_HASH: Final = "ee184f9d483be4a56d59c3325ffb9a532d00f66db4812ac75717a6882607d744"
DECIDED_AT: Final = 68
WHATIFS: Final = {
    "as_it_was": "",
    "without_a_node": "--without node-2",
    "long_context": "--context 8192",
    "on_one_node": "--context 8192 --without node-2 --without node-3",
}

BEFORE_RULES: Final = LOGS / "before_rules.db"
"""Recorded by a release whose decisions did not say by which rules they were made."""

START_SECONDS_MAX: Final = 180.0

Ullage: TypeAlias = Callable[..., str]


@contextmanager
def reading(log: Path, folder: Path) -> Iterator[str]:
    """The address of a master that reads `log`, for many commands: with --log each would start one."""
    ready = folder / "ready"
    options = ["--read-only", "--log", str(log), "--listen", "127.0.0.1:0", "--ready-file", str(ready)]
    with subprocess.Popen([sys.executable, "-m", "services.master", *options], stderr=subprocess.DEVNULL) as master:
        try:
            deadline = time.monotonic() + START_SECONDS_MAX
            while not ready.exists():
                assert master.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield ready.read_text()
        finally:
            master.terminate()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with reading(LOG, tmp_path_factory.mktemp("reader")) as address:
        yield address


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ullage:
    """What a command prints, which ends well."""
    monkeypatch.setenv("COLUMNS", "160")

    def command(*arguments: str) -> str:
        assert run(arguments) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return command


def reviewed(name: str) -> str:
    return (LOGS / f"three_nodes.{name}.txt").read_text()


def test_the_state_is_what_it_was(said: Ullage) -> None:
    answer = json.loads(said("state", "--log", str(LOG), "--json"))
    assert answer["head_sequence"] == str(HEAD)
    assert answer["state_hash"] == STATE_HASH
    assert answer["state"]["unapplied_events"] == "0"


def test_the_decision_is_explained_as_it_was_recorded(said: Ullage, address: str) -> None:
    # Made again by the same rules it is the same, or the command ends with 1. Others say so, and are to be reviewed.
    assert said("why", "--master", address, "smollm2") == reviewed("why")


@pytest.mark.parametrize("name", WHATIFS)
def test_another_decision_is_what_was_reviewed(said: Ullage, address: str, name: str) -> None:
    options = ["--master", address, "--at", str(DECIDED_AT), *shlex.split(WHATIFS[name])]
    assert said("whatif", *options, "smollm2-135m") == reviewed(f"whatif_{name}")


def test_nothing_in_it_is_damaged(said: Ullage) -> None:
    assert said("log", "verify", "--log", str(LOG)).endswith(f"0 compacted ranges were read, up to sequence {HEAD}\n")


def test_an_exported_log_is_imported_with_its_sequences_and_its_state(
    said: Ullage, address: str, tmp_path: Path
) -> None:
    said("log", "export", "--master", address, str(tmp_path / "events.bin"))
    imported = said("log", "import", str(tmp_path / "events.bin"), "--log", str(tmp_path / "imported.db"), "--json")
    assert json.loads(imported) == {"log": str(tmp_path / "imported.db"), "head_sequence": HEAD}
    answer = json.loads(said("state", "--log", str(tmp_path / "imported.db"), "--json"))
    assert answer["state_hash"] == STATE_HASH


def test_a_replay_is_a_state_a_line_for_programs(said: Ullage, address: str) -> None:
    lines = said("replay", "--master", address, "--speed", "1e9", "--json").splitlines()
    assert [int(json.loads(line)["sequence"]) for line in lines] == [1, HEAD]


def test_a_backup_says_where_it_is_for_programs(said: Ullage, address: str, tmp_path: Path) -> None:
    path = tmp_path / "backup.db"
    body = json.loads(said("log", "backup", "--master", address, str(path), "--json"))
    assert body == {"file": str(path), "bytes": path.stat().st_size}


def test_what_changed_is_told_as_facts_and_as_state(said: Ullage, address: str) -> None:
    told = said("diff", "--master", address, str(DECIDED_AT), str(HEAD))
    assert "instance_placed" in told
    assert "memory_sampled" not in told
    assert "instance smollm2-135m-673bc9: new, RELEASED" in told


def test_the_past_is_played_to_its_end(said: Ullage, address: str) -> None:
    assert f"sequence {HEAD}" in said("replay", "--master", address, "--speed", "10000")


def test_a_decision_from_before_rules_were_numbered_is_shown_beside_todays(said: Ullage) -> None:
    told = said("why", "--log", str(BEFORE_RULES), "smollm2")
    assert "smollm2-135m-f7ebab is smollm2-135m, asked for with nothing said beside" in told
    assert "decided by the allocator's rules of before they were numbered; by rules " in told
