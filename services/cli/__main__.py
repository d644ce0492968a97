"""The command `ullage`: what an operator types, one file for each noun."""

from __future__ import annotations

import importlib.metadata
import io
import json
import sys
from collections.abc import Sequence
from typing import Annotated

import grpc
import typer
from typer.exceptions import TyperException

from services.cli import (
    config,
    diff,
    events,
    failure,
    generate,
    log,
    models,
    node,
    place,
    release,
    replay,
    service,
    state,
    status,
    up,
    whatif,
    why,
)
from services.cli.failure import CommandError, ExitCode
from services.cli.output import JSON_FLAG, JsonOption

app = typer.Typer(
    name="ullage",
    epilog=failure.EXIT_CODES_TEXT,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def version(*, as_json: JsonOption = False) -> None:
    """Print the version.

    Example: `ullage version`
    """
    said = importlib.metadata.version("ullage")
    print(json.dumps({"version": said}) if as_json else said)


def _print_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run one language model over the memory that all your machines can really give."""


app.command()(up.up)
app.command(**service.PASS_THROUGH)(service.master)
app.command(**service.PASS_THROUGH)(service.probe)
app.command(**service.PASS_THROUGH)(service.runner)
app.command(**service.PASS_THROUGH)(service.doctor)
app.command()(node.node)
app.command()(status.status)
app.command()(config.config)
app.add_typer(models.app, name="models")
app.command()(place.place)
app.command()(release.release)
app.command()(generate.generate)
app.command()(events.events)
app.command()(state.state)
app.command()(diff.diff)
app.command()(why.why)
app.command()(whatif.whatif)
app.command()(replay.replay)
app.add_typer(log.app, name="log")
app.command()(version)


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    try:
        code = app(list(arguments), prog_name="ullage", standalone_mode=False)
    except CommandError as error:
        return _failed(error, arguments)
    except grpc.RpcError as error:
        return _failed(failure.from_rpc_error(error), arguments)
    except TyperException as error:
        return _failed(_usage(error), arguments) if error.format_message() else ExitCode.USAGE
    except ValueError as error:
        unsendable = failure.from_unsendable(error)
        if unsendable is None:
            raise
        return _failed(unsendable, arguments)
    except OSError as error:
        if error.errno is None:
            raise
        # A disk that is full, mostly: that of what stdout goes to, or of the temporary folder.
        message = f"{error.filename or 'the output cannot be written'}: {error.strerror or error}"
        return _failed(CommandError(message, reason="SYSTEM"), arguments)
    return code if isinstance(code, int) else ExitCode.OK


def _usage(error: TyperException) -> CommandError:
    context = getattr(error, "ctx", None)
    command = "ullage" if context is None else context.command_path
    return CommandError(f"{error.format_message().rstrip('.')}: see `{command} --help`", ExitCode.USAGE)


def _failed(error: CommandError, arguments: Sequence[str]) -> int:
    failure.report(error, as_json=JSON_FLAG in arguments)
    return error.exit_code


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character of an answer shows its number, as stderr does.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
