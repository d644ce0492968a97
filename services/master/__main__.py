"""The master as a process: `python -m services.master`."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import platformdirs
import structlog
import typer

from services import config, logs, rpc
from services.clock import SystemClock
from services.log_format import CorruptEventError
from services.master.liveness import Bounds, RunnerBounds
from services.master.log_file import LogFileError
from services.master.log_lock import LogLockedError
from services.master.retention import Policy
from services.master.server import running
from services.master.settings import DEFAULT_ADDRESS, LOG_NAME, Settings, SettingsError, seconds

SWITCH_INTERVAL_SECONDS: Final = 0.0005
"""How long the event loop may keep the log's writer waiting: Python's own 5 ms are ten commits' time."""

GARBAGE_THRESHOLD: Final = 20_000
"""Objects made before Python looks for cycles: a batch of facts makes thousands, and none of them is one."""

STALLED_MORE_MS: Final = 500
"""A runner is silent for longer than its node may be and be live; otherwise a machine that slept would be blamed."""

log = structlog.get_logger()
app = typer.Typer(add_completion=False)


class MasterFailedError(Exception):
    """The master cannot go on; the message says why."""


@app.command()
def main(
    context: typer.Context,
    *,
    listen: Annotated[
        str,
        typer.Option(envvar="ULLAGE_MASTER_LISTEN", metavar="HOST:PORT", help="Port 0 takes any that is free."),
    ] = DEFAULT_ADDRESS,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on more than loopback, without TLS.")] = False,
    log_path: Annotated[
        Path | None,
        typer.Option("--log", envvar="ULLAGE_LOG", metavar="FILE", help="The log; else master/events.db there:"),
    ] = None,
    state_dir: Annotated[Path | None, typer.Option(envvar="ULLAGE_STATE_DIR", help="Where state is kept.")] = None,
    suspect_after_ms: Annotated[
        int, typer.Option(envvar="ULLAGE_SUSPECT_AFTER_MS", min=1, help="Silence after which a node gets no new work.")
    ] = 3_000,
    lost_after_ms: Annotated[
        int, typer.Option(envvar="ULLAGE_LOST_AFTER_MS", min=1, help="Silence after which a node is lost.")
    ] = 30_000,
    runner_stalled_after_ms: Annotated[
        int | None,
        typer.Option(
            envvar="ULLAGE_RUNNER_STALLED_AFTER_MS",
            min=1,
            help="Silence after which a runner whose node is heard has failed; else half a second over the first.",
        ),
    ] = None,
    runner_lost_after_ms: Annotated[
        int,
        typer.Option(
            envvar="ULLAGE_RUNNER_LOST_AFTER_MS",
            min=10_000,
            help="Silence after which a runner's shards have failed.",
        ),
    ] = 15_000,
    take_up_within_ms: Annotated[
        int,
        typer.Option(envvar="ULLAGE_TAKE_UP_WITHIN_MS", min=1, help="For a connected runner to take up a new shard."),
    ] = 30_000,
    keep_samples: Annotated[
        str, typer.Option(envvar="ULLAGE_KEEP_SAMPLES", help="Keep every sample for so long, then one a minute.")
    ] = "2h",
    keep_minutes: Annotated[
        str, typer.Option(envvar="ULLAGE_KEEP_MINUTES", help="Keep one sample a minute for so long; see `ullage log`.")
    ] = "7d",
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Show what a log says, without writing to it or its folder.")
    ] = False,
    ready_file: Annotated[Path | None, typer.Option(help="Written with the address once the master serves.")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(envvar="ULLAGE_LOG_LEVEL")
    ] = "info",
) -> None:
    """Run the cluster's master: it keeps the log, places models and tells runners what to run."""
    logs.configure("master", level=log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.freeze()  # What is imported stays, and need not be looked through again.
    gc.set_threshold(GARBAGE_THRESHOLD)
    try:
        log_path = log_path or (state_dir or platformdirs.user_state_path("ullage")) / LOG_NAME
        runner_stalled_after_ms = runner_stalled_after_ms or suspect_after_ms + STALLED_MORE_MS
        settings = Settings(
            address=rpc.listen_address(listen, insecure=insecure),
            log_path=log_path,
            bounds=Bounds(suspect_after_ms / 1000, lost_after_ms / 1000),
            read_only=read_only,
            retention=Policy(seconds(keep_samples), seconds(keep_minutes)),
            ready_file=ready_file,
            runner_bounds=RunnerBounds(
                runner_stalled_after_ms / 1000, runner_lost_after_ms / 1000, take_up_within_ms / 1000
            ),
            options=config.settings(context, log_path=log_path, runner_stalled_after_ms=runner_stalled_after_ms),
        )
        asyncio.run(_run(settings))
    except (
        SettingsError,
        rpc.AddressError,
        LogLockedError,
        LogFileError,
        CorruptEventError,
        MasterFailedError,
    ) as error:
        typer.echo(f"ullage master: {error}", err=True)
        raise typer.Exit(1) from error


async def _run(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings, SystemClock()) as master:
        if settings.ready_file is not None:
            _write_whole(settings.ready_file, master.address)
        stopping, failing = asyncio.create_task(stop.wait()), asyncio.create_task(master.fail())
        await asyncio.wait([stopping, failing], return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            log.error("failed", exc_info=failing.result())
            raise MasterFailedError(str(failing.result()))
        failing.cancel()
        log.info("stopping")


def _write_whole(path: Path, text: str) -> None:
    """Write `text` so that nobody ever reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    app()
