"""`ullage release`: takes an instance off its nodes."""

from __future__ import annotations

import getpass
from typing import Annotated

import typer

from services.cli import connection, names, tables
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.failure import CommandError, ExitCode
from services.cli.output import JsonOption, console, errors_console, print_json
from ullage.v1 import event_service_pb2, model_pb2, placement_service_pb2


def release(
    *,
    instance: Annotated[str | None, typer.Argument(metavar="INSTANCE", help="Its id, or the beginning of it.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Every instance of this model instead.")] = None,
    reason: Annotated[str, typer.Option("--reason", help="Why, for the log.")] = "",
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Take an instance off its nodes, or every instance of a model. Releasing twice is no error.

    Example: `ullage release --model smollm2-135m`
    """
    if (instance is None) == (model is None):
        raise CommandError("name one INSTANCE, or a model with --model: see `ullage status`", ExitCode.USAGE)
    with connection.master_at(master) as there:
        for instance_id in _chosen(there, instance, model):
            request = placement_service_pb2.ReleaseRequest(
                instance_id=instance_id, reason=reason, requested_by=getpass.getuser()
            )
            released = there.placements.Release(request, timeout=CALL_SECONDS_MAX).instance
            if as_json:
                print_json(released, one_line=True)
            else:
                console().print(released.instance_id, tables.instance_state_text(released))


def _chosen(master: Master, typed: str | None, model_id: str | None) -> list[str]:
    state = master.events.GetState(event_service_pb2.GetStateRequest(), timeout=CALL_SECONDS_MAX).state
    if typed is not None:
        return [names.find_instance(state.instances, typed).instance_id]
    gone = {model_pb2.INSTANCE_STATE_RELEASED, model_pb2.INSTANCE_STATE_RELEASING}
    of_model = [one for one in state.instances if one.spec.model_id == model_id and one.state not in gone]
    if not of_model and any(one.spec.model_id == model_id for one in state.instances):
        errors_console().print(f"every instance of {model_id} is released already", markup=False)
    elif not of_model:
        raise CommandError(f"no instance of {model_id!r} is placed: see `ullage status`", ExitCode.NOT_FOUND)
    return [one.instance_id for one in of_model]
