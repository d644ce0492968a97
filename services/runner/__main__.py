"""`python -m services.runner`: this machine's runner."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import platformdirs
import structlog
import typer

from services import event_engine

event_engine.leave_out()  # Here and in the shards; before anything imports gRPC.

from services import config, logs, rpc
from services.clock import SystemClock
from services.runner.description import DescriptionError
from services.runner.identity import IdentityError
from services.runner.runner import running
from services.runner.settings import DEFAULT_ADDRESS, DEFAULT_MASTER, Settings, SettingsError
from services.runner.supervisor import Bounds

SHARD_COMMAND: Final = (sys.executable, "-m", "services.runner.shard")

log = structlog.get_logger()
app = typer.Typer(add_completion=False)


@app.command()
def main(
    context: typer.Context,
    *,
    master: Annotated[
        str, typer.Option(envvar="ULLAGE_MASTER", metavar="HOST:PORT", help="Where the master is.")
    ] = DEFAULT_MASTER,
    listen: Annotated[
        str, typer.Option(envvar="ULLAGE_RUNNER_LISTEN", metavar="HOST:PORT", help="Port 0: any free one.")
    ] = DEFAULT_ADDRESS,
    advertise: Annotated[
        str | None,
        typer.Option(
            envvar="ULLAGE_RUNNER_ADVERTISE", metavar="HOST:PORT", help="Where others dial it; else where it listens."
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on more than loopback, without TLS.")] = False,
    state_dir: Annotated[
        Path | None, typer.Option(envvar="ULLAGE_STATE_DIR", help="Where the node's id is kept.")
    ] = None,
    models_dir: Annotated[
        Path | None, typer.Option(envvar="ULLAGE_MODELS_DIR", help="One folder for each model.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(envvar="ULLAGE_THREADS", min=1, max=4096, help="For all shards; else one a core.")
    ] = None,
    weights: Annotated[
        Literal["auto", "float32", "stored"],
        typer.Option(envvar="ULLAGE_WEIGHTS", help="How shards hold their weights; auto: what is fastest here."),
    ] = "auto",
    start_within_ms: Annotated[
        int, typer.Option(envvar="ULLAGE_START_WITHIN_MS", min=1, help="For a shard's process to answer.")
    ] = 60_000,
    stall_after_ms: Annotated[
        int, typer.Option(envvar="ULLAGE_STALL_AFTER_MS", min=1, help="Without a step forward of a shard that loads.")
    ] = 60_000,
    stuck_after_ms: Annotated[
        int, typer.Option(envvar="ULLAGE_STUCK_AFTER_MS", min=1, help="Of a shard that neither answers nor works.")
    ] = 3_000,
    answer_within_ms: Annotated[
        int, typer.Option(envvar="ULLAGE_ANSWER_WITHIN_MS", min=1, help="For a shard to answer, however busy.")
    ] = 15_000,
    ready_file: Annotated[Path | None, typer.Option(help="Written with the address once the runner listens.")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(envvar="ULLAGE_LOG_LEVEL")
    ] = "info",
) -> None:
    """Run this machine's runner: it takes assignments from the master, one child process for each shard."""
    logs.configure("runner", level=log_level)
    try:
        state_dir = state_dir or platformdirs.user_state_path("ullage")
        models_dir = models_dir or platformdirs.user_data_path("ullage") / "models"
        threads = threads or _cores()
        settings = Settings(
            master=master,
            address=rpc.listen_address(listen, insecure=insecure),
            advertise=advertise,
            state_dir=state_dir,
            models_dir=models_dir,
            threads=threads,
            weights=weights,
            ready_file=ready_file,
            bounds=Bounds(
                start_seconds=start_within_ms / 1000,
                stall_seconds=stall_after_ms / 1000,
                stuck_seconds=stuck_after_ms / 1000,
                answer_seconds=answer_within_ms / 1000,
            ),
            options=config.settings(context, state_dir=state_dir, models_dir=models_dir, threads=threads),
        )
        asyncio.run(_run(settings))
    except (SettingsError, rpc.AddressError, IdentityError, DescriptionError) as error:
        typer.echo(f"ullage runner: {error}", err=True)
        raise typer.Exit(1) from error


def _cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


async def _run(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(settings, SHARD_COMMAND, SystemClock()) as (runner, work):
        profile = runner.profile
        log.info(
            "listening",
            address=profile.address,
            node=profile.node_id,
            boot=profile.boot_id,
            device=profile.device,
            blas=profile.blas,
            threads=profile.threads,
        )
        if settings.ready_file is not None:
            _write_whole(settings.ready_file, profile.address)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, work], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
        log.info("stopping")


def _write_whole(path: Path, text: str) -> None:
    """Write `text` so that nobody ever reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    app()
