"""`ullage master`, `probe`, `runner` and `doctor`: the services themselves, with their own options."""

from __future__ import annotations

import os
import sys
from typing import Any, Final, NoReturn

import typer

PASS_THROUGH: Final[dict[str, Any]] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    # --help is the service's own.
    "add_help_option": False,
}


def master(ctx: typer.Context) -> None:
    """Run the master: the log, the state, the allocator. Its options: `ullage master --help`."""
    _become("master", ctx.args)


def probe(ctx: typer.Context) -> None:
    """Run this machine's probe, which reads its memory. Its options: `ullage probe --help`."""
    _become("probe", ctx.args)


def doctor(ctx: typer.Context) -> None:
    """Say what this machine's probe cannot read, why, and what to do. Exits with 1 where that keeps work away."""
    _become("probe", ["--doctor", *ctx.args])


def runner(ctx: typer.Context) -> None:
    """Run this machine's runner, which holds shards. Its options: `ullage runner --help`."""
    _become("runner", ctx.args)


def _become(name: str, arguments: list[str]) -> NoReturn:
    """Replace this process by the service, so that signals and the exit code are its own."""
    os.execv(sys.executable, [sys.executable, "-m", f"services.{name}", *arguments])  # noqa: S606 - no shell wanted
