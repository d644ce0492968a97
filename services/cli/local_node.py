"""What makes this machine a node: a probe and a runner that share one state directory, and so one node_id."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from services.cli.processes import Service

MemoryOption = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help='What a node may give: "450MiB", "8GiB", or a share, "50%".'),
]
VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="Show every log line, not warnings alone.")]
ModelsDirOption = Annotated[
    Path | None,
    typer.Option("--models-dir", envvar="ULLAGE_MODELS_DIR", help="Where models lie, one folder for each."),
]

OVERRIDE_VARIABLE: Final = "OVERRIDE_MEMORY"
"""What a probe takes for --memory where that is not given, in GiB."""

ANY_PORT: Final = "127.0.0.1:0"

READING_SECONDS_MAX: Final = 60.0
"""A probe reads in a moment, once Python has started."""


@dataclass(frozen=True)
class LocalNode:
    """How one node on this machine is started; what is None is left to the services' own defaults."""

    master: str
    label: str = ""
    name: str | None = None
    state_dir: Path | None = None
    models_dir: Path | None = None
    memory: str | None = None
    threads: int | None = None
    probe_listen: str = ANY_PORT
    runner_listen: str = ANY_PORT
    advertise: str | None = None
    insecure: bool = False

    def services(self) -> list[Service]:
        """The probe, then the runner."""
        label = f"{self.label} " if self.label else ""
        probe = self._arguments(self.probe_listen, ("--name", self.name), ("--memory", self.memory))
        runner = self._arguments(
            self.runner_listen,
            ("--advertise", self.advertise),
            ("--models-dir", self.models_dir),
            ("--threads", self.threads),
        )
        return [Service(f"{label}probe", "probe", probe), Service(f"{label}runner", "runner", runner)]

    def _arguments(self, listen: str, *own: tuple[str, object | None]) -> tuple[str, ...]:
        options = (("--master", self.master), ("--listen", listen), ("--state-dir", self.state_dir), *own)
        given = [part for name, value in options if value is not None for part in (name, str(value))]
        return (*given, "--insecure") if self.insecure else tuple(given)


async def equal_part(nodes: int) -> str:
    """What each of so many nodes on this machine may give, as `--memory` takes it, so that they give no byte twice.

    Each would measure the whole machine, and know nothing of what the others were promised. It is a part of what is
    available now, or of all there is where that is unknown or, for the moment, nothing.
    """
    command = [sys.executable, "-m", "services.probe", "--once", "--json"]
    probe = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(READING_SECONDS_MAX):
            said, _ = await probe.communicate()
    except TimeoutError:
        probe.kill()
        await probe.communicate()
        said = b""
    available_bytes = int(json.loads(said or b"{}").get("balanced_available_bytes", 0))
    return str(available_bytes // nodes) if available_bytes else f"{100 // nodes}%"
