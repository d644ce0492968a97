"""The node's id on disk, and what else it says of itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.probe.identity import IdentityError, identity, node_id

MAKE = "import sys, pathlib; from services.probe.identity import node_id; print(node_id(pathlib.Path(sys.argv[1])))"


def test_a_node_keeps_its_id_and_changes_its_boot_id(tmp_path: Path) -> None:
    first = identity(tmp_path / "state", None, "0.1.0", tmp_path)
    second = identity(tmp_path / "state", None, "0.1.0", tmp_path)
    assert first.node_id == second.node_id
    assert first.boot_id != second.boot_id
    assert (tmp_path / "state/node_id").read_text() == f"{first.node_id}\n"
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["node_id"]


def test_an_id_that_somebody_else_made_is_taken(tmp_path: Path) -> None:
    (tmp_path / "node_id").write_text("0123456789abcdef0123456789abcdef\n")
    assert node_id(tmp_path) == "0123456789abcdef0123456789abcdef"


def test_processes_that_start_at_once_agree_on_one_id(tmp_path: Path) -> None:
    starts = [
        subprocess.Popen([sys.executable, "-c", MAKE, str(tmp_path / "state")], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert len({process.communicate(timeout=60)[0] for process in starts}) == 1


@pytest.mark.parametrize("text", ["", "short\n", "0123456789ABCDEF0123456789ABCDEF\n", "0" * 33, "\xff" * 32])
def test_a_garbled_id_is_said_and_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "node_id").write_text(text)
    with pytest.raises(IdentityError, match=r"holds no node id .* delete it to make this a new node"):
        node_id(tmp_path)
    assert (tmp_path / "node_id").read_text() == text


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="choose another with --state-dir"):
        node_id(tmp_path / "file")


def test_the_machine_is_described_by_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/product_name").write_text("PowerEdge R740\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel\t\t: 1\nmodel name\t: AMD EPYC 7763\n")
    me = identity(tmp_path / "state", "anna", "0.1.0", tmp_path)
    assert (me.friendly_name, me.model, me.chip) == ("anna", "PowerEdge R740", "AMD EPYC 7763")


def test_what_the_machine_does_not_say_is_absent(tmp_path: Path) -> None:
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/product_name").write_text("To Be Filled By O.E.M.\n")
    me = identity(tmp_path / "state", None, "0.1.0", tmp_path)
    assert not me.HasField("model")
    assert me.friendly_name == os.uname().nodename
