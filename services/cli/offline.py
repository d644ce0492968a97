"""A log file read without its master: a read-only master on a unix socket is started, asked, and stopped.

There is one way to read a log, so a command does the same with a file as with a running master.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer

from services.cli.connection import Master, master_at
from services.cli.failure import CommandError

READY_SECONDS_MAX: Final = 120.0
"""A log of some million events is replayed first."""

GRACE_SECONDS: Final = 5.0
POLL_SECONDS: Final = 0.02

LogOption = Annotated[
    Path | None,
    typer.Option("--log", metavar="FILE", exists=True, dir_okay=False, help="Read this log file; no master is needed."),
]


@contextmanager
def master_or_log(address: str, log: Path | None) -> Iterator[Master]:
    """The master at `address`, or one that reads `log`."""
    if log is None:
        with master_at(address) as master:
            yield master
        return
    # Unix socket paths are short: not below a long temporary directory of ours.
    with (
        tempfile.TemporaryDirectory(prefix="ullage-") as folder,
        _reading(log, Path(folder)) as socket,
        master_at(socket) as master,
    ):
        yield master


@contextmanager
def _reading(log: Path, folder: Path) -> Iterator[str]:
    ready_file = folder / "ready"
    socket = f"unix:{folder / 'master.sock'}"
    options = ["--read-only", "--log", str(log), "--listen", socket, "--ready-file", str(ready_file)]
    command = [sys.executable, "-m", "services.master", *options]
    with (folder / "stderr").open("w+b") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            _wait_until_ready(process, ready_file, folder / "stderr")
            yield socket
        finally:
            process.terminate()
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path, stderr: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS_MAX
    while not ready_file.exists():
        if process.poll() is not None:
            said = stderr.read_text(errors="replace").strip()
            raise CommandError(said or f"the log cannot be read: its reader ended with exit code {process.returncode}")
        if time.monotonic() > deadline:
            raise CommandError(f"the log was not replayed within {READY_SECONDS_MAX:.0f} s")
        time.sleep(POLL_SECONDS)
