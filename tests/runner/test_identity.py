"""The node's id, on its disk."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.runner.identity import IdentityError, node_id


def test_the_id_is_made_once_and_kept(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    made = node_id(state_dir)

    assert re.fullmatch("[0-9a-f]{32}", made)
    assert (state_dir / "node_id").read_text() == f"{made}\n"
    assert node_id(state_dir) == made
    assert [path.name for path in state_dir.iterdir()] == ["node_id"]


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(lambda _: node_id(tmp_path), range(64)))

    assert len(made) == 1


@pytest.mark.parametrize("garbled", ["", "me\n", "0" * 31, "G" * 32])
def test_an_id_that_is_none_is_refused_and_left_alone(tmp_path: Path, garbled: str) -> None:
    (tmp_path / "node_id").write_text(garbled)

    with pytest.raises(IdentityError, match="delete it to join as a new node"):
        node_id(tmp_path)
    assert (tmp_path / "node_id").read_text() == garbled


def test_a_state_dir_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(IdentityError, match="choose another --state-dir"):
        node_id(tmp_path / "file" / "state")
