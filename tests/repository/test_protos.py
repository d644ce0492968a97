"""The published protos: generated code is fresh, style is buf's, and nothing published is broken."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
BUF = Path(sysconfig.get_path("scripts")) / "buf"


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a command printed, both streams; fails the test when it exits with anything but 0."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def generated(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.glob("ullage/**/*_pb2*.py*"))}


def test_the_generated_code_is_what_the_protos_generate(tmp_path: Path) -> None:
    run(sys.executable, PROTOS / "generate.py", "--out", tmp_path)

    fresh, committed = generated(tmp_path), generated(PROTOS)

    assert list(fresh) == list(committed), "run `make protos`"
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert stale == [], "run `make protos`"


def test_the_protos_keep_bufs_standard_style() -> None:
    run(BUF, "lint", cwd=PROTOS)


def test_nothing_released_is_broken() -> None:
    run(BUF, "breaking", ".", "--against", "released.binpb", cwd=PROTOS)


def test_the_check_for_breaking_changes_can_fail(tmp_path: Path) -> None:
    protos = tmp_path / "protos"
    for source in (*PROTOS.glob("ullage/v1/*.proto"), PROTOS / "buf.yaml"):
        copy = protos / source.relative_to(PROTOS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(source.read_text().replace("optional double pressure_pct = 25;", ""))

    with pytest.raises(AssertionError, match="pressure_pct"):
        run(BUF, "breaking", ".", "--against", PROTOS / "released.binpb", cwd=protos)


def test_what_is_stored_does_not_depend_on_what_is_asked() -> None:
    values = {"ullage/v1/node.proto", "ullage/v1/model.proto"}
    for name in ("event.proto", "node.proto", "model.proto"):
        imports = {
            line.split('"')[1]
            for line in (PROTOS / "ullage/v1" / name).read_text().splitlines()
            if line.startswith('import "ullage/')
        }
        assert imports <= values, f"{name} is stored, and may import only {sorted(values)}"
