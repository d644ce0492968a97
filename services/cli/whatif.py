"""`ullage whatif`: what would have been decided, at any moment, had the request or the cluster been another."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from services.cli import connection, decisions, names, offline, tables
from services.cli.connection import CALL_SECONDS_MAX
from services.cli.output import JsonOption, console, print_json
from services.cli.why import DECIDE_SECONDS_MAX
from ullage.v1 import event_service_pb2, model_pb2


class Admission(StrEnum):
    """Which estimate of the nodes' memory is trusted."""

    STRICT = "strict"
    BALANCED = "balanced"
    CEILING = "ceiling"


def whatif(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Its id.")],
    *,
    at: Annotated[int | None, typer.Option("--at", metavar="SEQ", min=0, help="At this sequence; else now.")] = None,
    without: Annotated[list[str] | None, typer.Option(metavar="NODE", help="Think this node away.")] = None,
    admission: Annotated[Admission | None, typer.Option(help="Trust this estimate of the memory.")] = None,
    context: Annotated[int | None, typer.Option(metavar="TOKENS", min=1, help="With room for so many tokens.")] = None,
    derate: Annotated[
        float | None, typer.Option(metavar="FACTOR", min=0.0, max=1.0, help="What WARNING makes of a node's weight.")
    ] = None,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Decide on a past or present state, and record nothing. A refusal is an answer here, with exit code 0.

    Example: `ullage whatif --at 120 --without node-2 --admission strict smollm2-135m`
    """
    spec = model_pb2.PlacementSpec(model_id=model, context_tokens=context)
    if admission is not None:
        spec.admission = model_pb2.Admission.Value(f"ADMISSION_{admission.name}")
    if derate is not None:
        spec.warning_factor = derate
    with offline.master_or_log(master, log) as there:
        seen = event_service_pb2.GetStateRequest(at_sequence=at)
        state = there.events.GetState(seen, timeout=DECIDE_SECONDS_MAX).state
        request = event_service_pb2.WhatIfRequest(
            at_sequence=at,
            spec=spec,
            without_node_ids=[names.find_node_id(state, typed) for typed in without or []],
        )
        answer = there.events.WhatIf(request, timeout=DECIDE_SECONDS_MAX + CALL_SECONDS_MAX)
    if as_json:
        print_json(answer)
        return
    out = console()
    if answer.HasField("refusal"):
        out.print(f"at sequence {answer.at_sequence} {model} would have been refused:\n", markup=False)
        decisions.show_refusal(answer.refusal)
        return
    out.print(f"at sequence {answer.at_sequence} {model} would have gone:\n", markup=False)
    out.print(tables.placement(answer.placement))
    out.print()
    decisions.show_reasons(answer.placement)
