"""`python -m services.probe`: read this node's memory and pressure, and stream them to the master."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
import typer

from services import config, event_engine, logs
from services.clock import SystemClock
from services.probe import lean
from services.probe.estimator import Override
from services.probe.settings import Settings, SettingsError, override

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def probe(
    context: typer.Context,
    *,
    master: Annotated[str, typer.Option(envvar="ULLAGE_MASTER", help="HOST:PORT of the master.")] = "127.0.0.1:50500",
    listen: Annotated[str, typer.Option(help="HOST:PORT to answer on; port 0 takes a free one.")] = "127.0.0.1:50501",
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address other machines can reach; there is no TLS yet.")
    ] = False,
    state_dir: Annotated[
        Path | None, typer.Option(envvar="ULLAGE_STATE_DIR", help="Where the node's id is kept.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="What this node may give, whatever is read: 450MiB, 4GB, 512000000 or 50%."),
    ] = None,
    override_memory: Annotated[
        str | None, typer.Option(envvar="OVERRIDE_MEMORY", help="The same in whole GiB; --memory wins.", hidden=True)
    ] = None,
    period_ms: Annotated[int, typer.Option(min=100, max=60_000, help="Between memory samples.")] = 500,
    system_period_ms: Annotated[int, typer.Option(min=500, max=600_000, help="Between system samples.")] = 2000,
    name: Annotated[str | None, typer.Option(help="The node's name for people; the host's by default.")] = None,
    root: Annotated[
        Path,
        typer.Option(exists=True, file_okay=False, help="Where proc and sys are: a recorded tree, for debugging."),
    ] = Path("/"),
    ready_file: Annotated[Path | None, typer.Option(help="Write the address into this file once it answers.")] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="What to log.")] = "info",
    only_once: Annotated[bool, typer.Option("--once", help="Print one reading and exit.")] = False,
    examined: Annotated[
        bool, typer.Option("--doctor", help="Say what cannot be read, why, and what to do; exit 1 on a fault.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once or --doctor: print JSON.")] = False,
) -> None:
    """Read this node's memory and pressure, and stream them to the master."""
    logs.configure("probe", level=log_level)
    state_dir = state_dir or platformdirs.user_state_path("ullage")
    try:
        given = override(memory, override_memory)
        if only_once or examined:
            show = _examine if examined else _read_once
            show(root, state_dir, given, json=json)
            return
        settings = Settings(
            master=master,
            listen=listen,
            insecure=insecure,
            state_dir=state_dir,
            override=given,
            period_ms=period_ms,
            system_period_ms=system_period_ms,
            name=name,
            version=metadata.version("ullage"),
            root=root,
            ready_file=ready_file,
            options=config.settings(context, state_dir=state_dir),
        )
    except SettingsError as error:
        typer.echo(f"ullage probe: {error}", err=True)
        raise typer.Exit(1) from error
    event_engine.leave_out()
    lean.become(settings, log_level)


def _read_once(root: Path, state_dir: Path, given: Override | None, *, json: bool) -> None:
    from services.probe import once  # noqa: PLC0415 - not on the way to the lean program
    from services.probe.failures import Failures  # noqa: PLC0415 - not on the way to the lean program
    from services.probe.machine import find  # noqa: PLC0415 - not on the way to the lean program

    clock = SystemClock()
    sample = once.read_once(find(root, state_dir, clock, Failures()), given, clock)
    typer.echo(once.as_json(sample) if json else once.as_text(sample))


def _examine(root: Path, state_dir: Path, given: Override | None, *, json: bool) -> None:
    from services.probe import doctor  # noqa: PLC0415 - not on the way to the lean program
    from services.probe.failures import Failures  # noqa: PLC0415 - not on the way to the lean program

    logs.configure("probe", level="error")  # What failed is said below, with what to do about it.
    clock, failures = SystemClock(), Failures()
    found = doctor.examine(root, state_dir, given, clock, failures)
    typer.echo(doctor.as_json(found) if json else doctor.as_text(found))
    if any(finding.is_fault for finding in found):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
