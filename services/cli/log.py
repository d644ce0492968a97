"""`ullage log`: looks after the log, on a running master or on a file: its size, its soundness, a copy of it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final

import typer
from google.protobuf.proto import serialize_length_prefixed
from rich.table import Table

from services.cli import connection, offline
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.failure import CommandError, ExitCode
from services.cli.output import JsonOption, bytes_text, console, message_json, print_json
from ullage.v1 import event_service_pb2, log_service_pb2

WORK_SECONDS_MAX: Final = 3600.0
"""Reading or thinning all of a log of some hundred million events."""

PAGE_EVENTS: Final = 1000

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

app = typer.Typer(no_args_is_help=True, help="Look after the log: its size, its soundness, its age, a copy of it.")


@app.command()
def size(
    *,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Show what the log takes on disk, what for, and how long samples are kept.

    Example: `ullage log size`
    """
    with offline.master_or_log(master, log) as there:
        answer = there.log.GetLog(log_service_pb2.GetLogRequest(), timeout=WORK_SECONDS_MAX)
    if as_json:
        print_json(answer)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("KIND", "EVENTS", "BYTES"):
        table.add_column(column, justify="left" if column == "KIND" else "right", overflow="fold")
    for kind in answer.kinds:
        table.add_row(kind.kind, str(kind.events), bytes_text(kind.payload_bytes))
    out = console()
    out.print(table)
    free = f"{bytes_text(answer.free_bytes)} of them free" if answer.free_bytes else "none of them free"
    out.print(f"\n{bytes_text(answer.file_bytes)} on disk, {free}, and {bytes_text(answer.wal_bytes)} of WAL")
    out.print(f"{len(answer.checkpoint_sequences)} checkpoints, {bytes_text(answer.checkpoint_bytes)}")
    if answer.compacted_sequence:
        out.print(f"samples are thinned up to sequence {answer.compacted_sequence} of {answer.head_sequence}")
    if answer.HasField("keep_samples_seconds"):
        every, minutes = (_length(answer.keep_samples_seconds), _length(answer.keep_minutes_seconds))
        out.print(f"every sample is kept for {every}, one a minute for {minutes}, decisions for ever")


@app.command()
def verify(
    *,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Read all of the log, and name what in it is not what was stored; exit code 1 when there is something.

    Example: `ullage log verify --log events.db`
    """
    report = _verified_file(log) if log is not None else _verified(master)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        for finding in report["findings"]:
            console().print(finding, style="red", markup=False, soft_wrap=True)
        read = f"{report['events']} events, {report['commits']} commits and {report['ranges']} compacted ranges"
        console().print(f"{read} were read, up to sequence {report['head_sequence']}", markup=False)
    if report["findings"]:
        found = len(report["findings"])
        advice = "restore a backup, or read it with --log up to the first of them"
        raise CommandError(f"the log is damaged in {found} place{'s'[: found - 1]}: {advice}", reason="LOG_DAMAGED")


def _verified(address: str) -> dict[str, Any]:
    with connection.master_at(address) as there:
        answer = there.log.VerifyLog(log_service_pb2.VerifyLogRequest(), timeout=WORK_SECONDS_MAX)
    return {
        "findings": list(answer.findings),
        "head_sequence": answer.head_sequence,
        "events": answer.events,
        "commits": answer.commits,
        "ranges": answer.ranges,
    }


def _verified_file(log: Path) -> dict[str, Any]:
    """The same of a file, by a process that reads it without replaying it: it may be damaged."""
    said = _service("services.master.log_check", str(log))
    if said.returncode == 2:
        raise CommandError(said.stderr.strip())
    if said.returncode not in {0, 1}:
        raise CommandError(f"the log was not read to its end: {said.stderr.strip().splitlines()[-1]}")
    report: dict[str, Any] = json.loads(said.stdout)
    return report


def _service(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=WORK_SECONDS_MAX,
        check=False,
    )


@app.command()
def compact(
    *,
    keep_samples: Annotated[str | None, typer.Option(help="Keep every sample for so long, e.g. 2h.")] = None,
    keep_minutes: Annotated[str | None, typer.Option(help="And one a minute for so long, e.g. 7d.")] = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Let go of old samples now; decisions and what came of them are kept for ever.

    Example: `ullage log compact --keep-samples 15m --keep-minutes 1d`
    """
    request = log_service_pb2.CompactLogRequest(
        keep_samples_seconds=None if keep_samples is None else _seconds(keep_samples),
        keep_minutes_seconds=None if keep_minutes is None else _seconds(keep_minutes),
    )
    with connection.master_at(master) as there:
        before = _bytes(there)
        answer = there.log.CompactLog(request, timeout=WORK_SECONDS_MAX)
        after = _bytes(there)
    if as_json:
        print_json(answer)
        return
    console().print(
        f"{answer.removed_events} samples went, up to sequence {answer.compacted_sequence}; "
        f"the log was {bytes_text(before)} and is {bytes_text(after)}"
    )


def _bytes(there: Master) -> int:
    """What the log takes, without what is free in it."""
    answer = there.log.GetLog(log_service_pb2.GetLogRequest(), timeout=WORK_SECONDS_MAX)
    return answer.file_bytes - answer.free_bytes


@app.command()
def backup(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where the copy goes; nothing may be there.")],
    *,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Write a consistent copy of the log, of a running master or of a file: a log itself.

    Example: `ullage log backup monday.db`
    """
    with _written(path) as file, offline.master_or_log(master, log) as there:
        for piece in there.log.BackUpLog(log_service_pb2.BackUpLogRequest(), timeout=WORK_SECONDS_MAX):
            file.write(piece.content)
    size_bytes = path.stat().st_size
    if as_json:
        print(json.dumps({"file": str(path), "bytes": size_bytes}), flush=True)
    else:
        console().print(f"{bytes_text(size_bytes)} in {path}", markup=False)


@app.command()
def export(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where the events go; - for standard output.")],
    *,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Write every event there is: as RecordedEvents, each behind its length, or with --json one a line.

    Example: `ullage log export events.bin`
    """
    with (
        nullcontext(sys.stdout.buffer) if str(path) == "-" else _written(path) as file,
        offline.master_or_log(master, log) as there,
    ):
        request = event_service_pb2.ListEventsRequest(page_size=PAGE_EVENTS)
        while True:
            page = there.events.ListEvents(request, timeout=CALL_SECONDS_MAX)
            for event in page.events:
                if as_json:
                    file.write(message_json(event, one_line=True).encode() + b"\n")
                else:
                    serialize_length_prefixed(event, file)  # type: ignore[arg-type]  # it takes any file
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


@app.command(name="import")
def import_(
    path: Annotated[Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="What export wrote.")],
    *,
    log: Annotated[Path, typer.Option("--log", metavar="FILE", help="The log to make; nothing may be there.")],
    as_json: JsonOption = False,
) -> None:
    """Make a log of exported events, with their sequences, times and sources.

    Example: `ullage log import events.bin --log events.db`
    """
    said = _service("services.master.log_import", str(path), str(log))
    if said.returncode:
        raise CommandError(said.stderr.strip().splitlines()[-1])
    if as_json:
        print(json.dumps({"log": str(log), "head_sequence": int(said.stdout)}), flush=True)
    else:
        console().print(f"{log} holds events up to {said.stdout.strip()}", markup=False)


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A file that is at `path` once all of it is written; nothing is there before, and nothing after a failure."""
    if path.exists():
        raise CommandError(f"{path} is there already: name a file that is not", ExitCode.USAGE)
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
        unfinished.replace(path)
    except OSError as error:
        raise CommandError(
            f"{path} cannot be written: {error.strerror}: name another place, or make room there"
        ) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _seconds(text: str) -> int:
    number, unit = text[:-1], _UNITS.get(text[-1:])
    if unit is None or not number.isdecimal():
        raise CommandError(f"{text!r} is no length of time: write e.g. 90s, 15m, 2h or 7d", ExitCode.USAGE)
    return int(number) * unit


def _length(seconds: int) -> str:
    """A length of time in the largest unit that divides it."""
    unit, size = next((unit, size) for unit, size in reversed(_UNITS.items()) if seconds % size == 0)
    return f"{seconds // size} {unit}"
