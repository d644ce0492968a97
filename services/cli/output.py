"""How commands print: results to stdout, everything else to stderr; sizes with their unit; levels in colour.

JSON is protobuf's own, with the names of the protos. A field that is absent is unknown; 0, false and the empty
list are printed, and 64-bit numbers are strings, as protobuf's JSON has them.
"""

from __future__ import annotations

import sys
from typing import Annotated, Final, TextIO

import typer
from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text

from ullage.v1 import node_pb2

JSON_FLAG: Final = "--json"

JsonOption = Annotated[bool, typer.Option(JSON_FLAG, help="Print JSON, for programs; errors too, to stderr.")]

PIPE_COLUMNS: Final = 200

UNKNOWN: Final = "unknown"

_LEVEL_STYLES: Final[dict[node_pb2.PressureLevel.ValueType, str]] = {
    node_pb2.PRESSURE_LEVEL_NORMAL: "green",
    node_pb2.PRESSURE_LEVEL_WARNING: "yellow",
    node_pb2.PRESSURE_LEVEL_CRITICAL: "bold red",
}


def console() -> Console:
    """Where results go."""
    return _console(sys.stdout)


def errors_console() -> Console:
    """Where progress, summaries and errors go, so that stdout holds the result alone."""
    return _console(sys.stderr)


def _console(file: TextIO) -> Console:
    # A pipe has no width of its own, and rich would cut tables to 80 columns.
    return Console(file=file, highlight=False, width=None if file.isatty() else PIPE_COLUMNS)


def message_json(message: Message, *, one_line: bool = False) -> str:
    """`message` as JSON, over several lines or on one."""
    return json_format.MessageToJson(
        message,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
        indent=None if one_line else 2,
    )


def print_json(message: Message, *, one_line: bool = False) -> None:
    """Print `message` as JSON to stdout, at once."""
    print(message_json(message, one_line=one_line), flush=True)


def bytes_text(size_bytes: int) -> str:
    """A size as people read it, labelled: "16.0 GiB", "1.25 GiB", "450 MiB", "12 KiB"."""
    if size_bytes >= 10 * 2**30:
        return f"{size_bytes / 2**30:.1f} GiB"
    if size_bytes >= 2**30:
        return f"{size_bytes / 2**30:.2f} GiB"
    if size_bytes >= 100 * 2**20:
        return f"{size_bytes / 2**20:.0f} MiB"
    if size_bytes >= 2**20:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**10:.0f} KiB" if size_bytes >= 2**10 else f"{size_bytes} B"


def known_bytes_text(message: Message, field: str) -> str:
    """The size in an optional field of `message`, or "unknown" when it is absent."""
    return bytes_text(getattr(message, field)) if message.HasField(field) else UNKNOWN


def level_text(level: node_pb2.PressureLevel.ValueType) -> Text:
    """A pressure level by its name, in its colour."""
    name = node_pb2.PressureLevel.Name(level).removeprefix("PRESSURE_LEVEL_")
    known = level != node_pb2.PRESSURE_LEVEL_UNSPECIFIED
    return Text(name if known else UNKNOWN.upper(), style=_LEVEL_STYLES.get(level, "magenta"))
