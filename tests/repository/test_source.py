"""What holds for the source as a whole: the rules of ARCHITECTURE.md that a script can read off it."""

from __future__ import annotations

import ast
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FUNCTION_LINES_MAX = 70
NAMES_NOBODY_OWNS = {"common", "utils", "util", "helpers", "misc", "shared"}


def tracked(pattern: str = "") -> list[Path]:
    """The files git knows, those about to be added included."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    return [ROOT / name for name in listed if name and re.search(pattern, name) and (ROOT / name).is_file()]


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function's name, and its lines without the docstring."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            if ast.get_docstring(node) is not None and len(node.body) > 1:
                first = node.body[1]
            yield node.name, (node.end_lineno or first.lineno) - first.lineno + 1


def test_the_import_rules_are_kept() -> None:
    done = subprocess.run(
        [str(Path(sysconfig.get_path("scripts")) / "lint-imports")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_function_is_longer_than_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{name} has {lines} lines"
        for path in tracked(r"^(services|benchmarks|examples|migrations)/.*\.py$|^protos/generate\.py$")
        for name, lines in functions(path)
        if lines > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in tracked(r"^(services|benchmarks|examples)/.*\.py$")
        if ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_no_file_has_a_name_that_nobody_owns() -> None:
    assert [str(path) for path in tracked(r"\.py$") if path.stem in NAMES_NOBODY_OWNS] == []


def test_no_file_names_a_registrys_host() -> None:
    hosts = re.compile(r"\b(pyp[i]|pythonhoste[d]|npmj[s]|debia[n])\.(org|com)\b")
    naming = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if path.suffix not in {".png", ".binpb", ".db"} and hosts.search(path.read_text(errors="replace"))
    ]
    assert naming == []


def test_the_grpc_packages_are_locked_to_one_minor_version() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    versions = dict(re.findall(r"^(grpcio[a-z-]*|protobuf)==(\S+)", lock, flags=re.MULTILINE))

    assert {".".join(versions[name].split(".")[:2]) for name in versions if name.startswith("grpcio")} == {"1.85"}
    assert versions["protobuf"].split(".")[0] == "7"
    assert "://" not in lock, "a lock with hashes needs no download addresses"
