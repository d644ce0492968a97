"""Whatever flag a message advises, or a page shows, is one that somebody can type."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from services.cli.__main__ import app as ullage
from services.master.__main__ import app as master
from services.probe.__main__ import app as probe
from services.runner.__main__ import app as runner

ROOT = Path(__file__).parents[2]
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")

OTHERS = {"--help", "--version"}
"""What typer gives every command by itself."""


def options(command: object) -> Iterator[str]:
    """Every flag of a command and of those below it."""
    for parameter in getattr(command, "params", ()):
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(command, "commands", {}).values():
        yield from options(below)


def own_arguments(tree: ast.AST) -> Iterator[str]:
    """The flags that a module's own argparse parser takes, or its command hands to another program."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and FLAG.fullmatch(node.value):
            yield node.value


def said(tree: ast.AST) -> Iterator[str]:
    """The flags within the texts of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from FLAG.findall(node.value)


@pytest.fixture(scope="module")
def known() -> set[str]:
    apps = (ullage, master, probe, runner)
    return OTHERS.union(*(options(typer.main.get_command(app)) for app in apps))


def commands(command: object, name: str = "ullage") -> Iterator[tuple[str, Any]]:
    """Every command there is to type, by what is typed for it."""
    below = getattr(command, "commands", {})
    if not below:
        yield name, command
    for word, one in below.items():
        yield from commands(one, f"{name} {word}")


@pytest.mark.parametrize(("name", "command"), [*commands(typer.main.get_command(ullage))])
def test_every_command_has_an_example_and_prints_json(name: str, command: Any) -> None:
    if "Its options:" in command.help or name == "ullage doctor":
        return  # Its own program's.
    assert re.search(rf"Examples?: `{name}\b", command.help)
    assert "--json" in set(options(command))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "services").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_message_names_flags_there_are(path: Path, known: set[str]) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert set(said(tree)) - known - set(own_arguments(tree)) == set()


@pytest.mark.parametrize("page", ["README.md", "PLATFORMS.md", "ARCHITECTURE.md"])
def test_a_page_names_flags_there_are(page: str, known: set[str]) -> None:
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    ours = [line for line in lines if "ullage" in line or "`--" in line]
    assert set(FLAG.findall("\n".join(ours))) - known == set()
