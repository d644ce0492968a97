"""`ullage state`: the cluster as the log says it was, at any sequence."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli import connection, offline, status
from services.cli.connection import CALL_SECONDS_MAX
from services.cli.output import JsonOption, console, print_json
from ullage.v1 import event_service_pb2, state_pb2


def state(
    *,
    at: Annotated[int | None, typer.Option("--at", metavar="SEQ", min=0, help="At this sequence; else now.")] = None,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Show the state at a sequence of the log, of a running master or of a log file.

    Example: `ullage state --log events.db --at 120 --json`
    """
    request = event_service_pb2.GetStateRequest(at_sequence=at)
    with offline.master_or_log(master, log) as there:
        answer = there.events.GetState(request, timeout=CALL_SECONDS_MAX)
    if as_json:
        print_json(answer)
        return
    console().print(f"sequence {answer.state.sequence} of {answer.head_sequence}, {_recorded(answer.state)}")
    console().print(f"hash {answer.state_hash}\n")
    status.show(answer.state, everything=True)


def _recorded(shown: state_pb2.ClusterState) -> str:
    """When its last fact was recorded, if there is one."""
    if not shown.HasField("recorded_at"):
        return "before anything was recorded"
    return f"recorded at {shown.recorded_at.ToDatetime().isoformat(timespec='milliseconds')}Z"
