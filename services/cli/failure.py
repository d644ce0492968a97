"""What a command says when it cannot do what was asked, and the exit code it leaves with.

Every failure is one CommandError, printed in one place: to stderr, as people read it, or as one JSON object
with --json. A service's own words are passed on as they are.
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

import grpc
from google.protobuf import json_format
from rich.text import Text

from services import rpc
from services.cli.output import errors_console
from ullage.v1 import model_pb2


class ExitCode(IntEnum):
    """How a command ended, for scripts."""

    OK = 0
    ERROR = 1
    USAGE = 2
    REFUSED = 3
    NOT_FOUND = 4
    UNAVAILABLE = 5
    INTERRUPTED = 130


EXIT_CODES_TEXT = (
    "Exit codes: 0 done, 1 error, 2 wrong usage, 3 placement refused, 4 not found, "
    "5 master or runner unavailable, 130 interrupted."
)


class CommandError(Exception):
    """A command cannot do what was asked; str() says why and what to do next."""

    def __init__(
        self,
        message: str,
        exit_code: ExitCode = ExitCode.ERROR,
        *,
        reason: str = "",
        refusal: model_pb2.Refusal | None = None,
    ) -> None:
        """`reason` is UPPER_SNAKE and stable, as in the ErrorInfo of a status."""
        super().__init__(message)
        self.exit_code = exit_code
        self.reason = reason or exit_code.name
        self.refusal = refusal


def from_rpc_error(error: grpc.RpcError) -> CommandError:
    """The failure a call's status stands for."""
    code = error.code()
    details: str = error.details() or code.name
    reason = rpc.error_reason(error)
    refusal = rpc.error_detail(error, model_pb2.Refusal)
    if refusal is not None:
        return from_refusal(refusal)
    if reason is None and code == grpc.StatusCode.UNAVAILABLE:
        details = f"the connection was lost ({details}): see that it is still running, and try again"
    if reason is None and code == grpc.StatusCode.DEADLINE_EXCEEDED:
        details = "no answer in time: it is connected but does not respond; look at its log"
    return CommandError(details, _EXIT_CODES.get(code, ExitCode.ERROR), reason=reason or code.name)


def from_unsendable(error: ValueError) -> CommandError | None:
    """The failure of a request that cannot hold what was typed; None when `error` is of another kind."""
    if isinstance(error, UnicodeEncodeError):
        message = f"the text given is no UTF-8 from its character {error.start + 1} on: write it in UTF-8"
        return CommandError(message, ExitCode.USAGE)
    prefix, _, number = str(error).partition(_OUT_OF_RANGE)
    if prefix or not number:
        return None
    return CommandError(f"{number} is a larger number than any request can hold: name a smaller one", ExitCode.USAGE)


_OUT_OF_RANGE = "Value out of range: "
"""How protobuf begins, of a number that goes into no field of that size."""


def from_refusal(refusal: model_pb2.Refusal) -> CommandError:
    """The failure a refused placement stands for."""
    reason = model_pb2.RefusalReason.Name(refusal.reason).removeprefix("REFUSAL_REASON_")
    return CommandError(refusal.message, ExitCode.REFUSED, reason=reason, refusal=refusal)


_EXIT_CODES = {
    grpc.StatusCode.NOT_FOUND: ExitCode.NOT_FOUND,
    grpc.StatusCode.UNAVAILABLE: ExitCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ExitCode.UNAVAILABLE,
}


def report(error: CommandError, *, as_json: bool) -> None:
    """Print `error` to stderr."""
    if as_json:
        errors_console().print(json.dumps(_as_json(error)), markup=False, highlight=False, soft_wrap=True)
        return
    label = "refused" if error.exit_code is ExitCode.REFUSED else "error"
    text = Text.assemble((f"{label} ({error.reason}): ", "bold red"), str(error))
    errors_console().print(text, highlight=False, soft_wrap=True)


def _as_json(error: CommandError) -> dict[str, Any]:
    body: dict[str, Any] = {"reason": error.reason, "message": str(error), "exit_code": int(error.exit_code)}
    if error.refusal is not None:
        body["refusal"] = json_format.MessageToDict(error.refusal, preserving_proto_field_name=True)
    return {"error": body}
