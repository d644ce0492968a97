"""`ullage why`: why an instance went where it went, decided again from the state it was decided on."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from services.cli import connection, decisions, names, offline, tables
from services.cli.connection import CALL_SECONDS_MAX
from services.cli.failure import CommandError
from services.cli.output import JsonOption, console, print_json
from ullage.v1 import event_service_pb2

DECIDE_SECONDS_MAX: Final = 120.0
"""A state of some days ago is replayed first."""


def why(
    instance: Annotated[str, typer.Argument(metavar="INSTANCE", help="Its id, or the beginning of it.")],
    *,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Show a decision with every node's numbers, and whether it comes out the same when it is made again.

    Example: `ullage why smollm2-135m-1a2b3c`
    """
    with offline.master_or_log(master, log) as there:
        state = there.events.GetState(event_service_pb2.GetStateRequest(), timeout=CALL_SECONDS_MAX).state
        instance_id = names.find_instance(state.instances, instance).instance_id
        request = event_service_pb2.ExplainPlacementRequest(instance_id=instance_id)
        answer = there.events.ExplainPlacement(request, timeout=DECIDE_SECONDS_MAX)
    if as_json:
        print_json(answer)
    else:
        decided = answer.recorded
        out = console()
        out.print(
            f"{instance_id} is {answer.spec.model_id}, asked for with {decisions.asked(answer.spec)}", markup=False
        )
        out.print(f"decided on the state at sequence {decided.decided_at_sequence}\n")
        out.print(tables.placement(decided))
        out.print()
        decisions.show_reasons(decided)
        out.print(f"\n{_compared(answer)}", markup=False, soft_wrap=True)
        if not answer.equal and answer.HasField("derived"):
            out.print()
            out.print(tables.placement(answer.derived))
    if not answer.equal and _same_rules(answer):
        raise CommandError(
            "decided again by the same rules from the state it was decided on, it is another: the log is not what was "
            "stored (see `ullage log verify`)",
            reason="NOT_EQUAL",
        )


def _same_rules(answer: event_service_pb2.ExplainPlacementResponse) -> bool:
    recorded = answer.HasField("recorded_rules_version")
    return recorded and answer.recorded_rules_version == answer.derived_rules_version


def _compared(answer: event_service_pb2.ExplainPlacementResponse) -> str:
    """What came of deciding again."""
    outcome = "it is the same" if answer.equal else "it is another"
    if not answer.equal and not answer.HasField("derived"):
        outcome = "it would be refused"
    if _same_rules(answer):
        return f"decided again from that state {outcome}"
    numbered = answer.HasField("recorded_rules_version")
    by = f"rules {answer.recorded_rules_version}" if numbered else "rules of before they were numbered"
    return f"decided by the allocator's {by}; by rules {answer.derived_rules_version} of this release {outcome}"
