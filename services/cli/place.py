"""`ullage place`: puts a model on nodes, says who got what, and waits until it runs."""

from __future__ import annotations

import getpass
from enum import Enum
from typing import Annotated, Final

import typer

from services.cli import connection, loading, names, tables
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.failure import CommandError, ExitCode, from_refusal
from services.cli.output import JsonOption, bytes_text, console, errors_console, print_json
from ullage.v1 import event_service_pb2, model_pb2, placement_service_pb2

LOAD_SECONDS_MAX: Final = 3600.0
"""The longest this command waits. What stands still fails much sooner, by its runner's own bounds."""


class Admission(Enum):
    """Which estimate of a node's memory to trust."""

    STRICT = "strict"
    BALANCED = "balanced"
    CEILING = "ceiling"


class Objective(Enum):
    """What a good placement is."""

    LATENCY = "latency"
    THROUGHPUT = "throughput"
    FEWEST_NODES = "fewest-nodes"
    PROPORTIONAL = "proportional"


def place(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model from `ullage models list`.")],
    context: Annotated[int | None, typer.Option("--context", min=1, help="Tokens of prompt and answer.")] = None,
    sequences: Annotated[int | None, typer.Option("--sequences", min=1, help="Requests served at once.")] = None,
    admission: Annotated[Admission | None, typer.Option("--admission", help="Which estimate to trust.")] = None,
    objective: Annotated[Objective | None, typer.Option("--objective", help="What to optimise for.")] = None,
    min_nodes: Annotated[int | None, typer.Option("--min-nodes", min=1, help="Use at least so many nodes.")] = None,
    max_nodes: Annotated[int | None, typer.Option("--max-nodes", min=1, help="Use at most so many nodes.")] = None,
    require: Annotated[list[str] | None, typer.Option("--require", metavar="NODE", help="Use this node.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", metavar="NODE", help="Leave it out.")] = None,
    layers: Annotated[
        list[str] | None, typer.Option("--layers", metavar="NODE=N", help="Give this node so many layers.")
    ] = None,
    include_unknown: Annotated[
        bool, typer.Option("--include-unknown", help="Use nodes whose memory or pressure is unknown.")
    ] = False,
    replace: Annotated[
        str,
        typer.Option("--replace", metavar="INSTANCE", help="Take the place of this instance; counts what it frees."),
    ] = "",
    prompt: Annotated[
        int | None, typer.Option("--prompt", min=1, help="Tokens of a usual prompt: its time counts too.")
    ] = None,
    warning_factor: Annotated[
        float | None,
        typer.Option("--warning-factor", min=0.1, max=1.0, help="What a node under WARNING counts for. Default: 0.6."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Place although it does not fit; the log says so.")] = False,
    request_id: Annotated[str, typer.Option("--request-id", help="The same id again gives the same instance.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Decide and show, but reserve nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it runs or fails.")] = True,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Put a model on the nodes, and wait until it runs.

    NODE is a node's name, its node_id, or the beginning of its node_id; the options that take one may be repeated.

    Example: `ullage place smollm2-135m --context 1024 --exclude node-3`
    """
    spec = model_pb2.PlacementSpec(
        model_id=model,
        request_id=request_id,
        context_tokens=context,
        concurrent_sequences=sequences,
        admission=_admission(admission),
        objective=_objective(objective),
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        replace_instance_id=replace,
        prompt_tokens_hint=prompt,
        warning_factor=warning_factor,
        force=force,
        include_unknown=include_unknown,
        requested_by=getpass.getuser(),
    )
    with connection.master_at(master) as there:
        _name_nodes(there, spec, require or [], exclude or [], layers or [])
        if dry_run:
            _preview(there, spec, as_json=as_json)
        else:
            _place(there, spec, wait=wait, as_json=as_json)


def _admission(chosen: Admission | None) -> model_pb2.Admission.ValueType:
    return model_pb2.ADMISSION_UNSPECIFIED if chosen is None else model_pb2.Admission.Value(f"ADMISSION_{chosen.name}")


def _objective(chosen: Objective | None) -> model_pb2.Objective.ValueType:
    return model_pb2.OBJECTIVE_UNSPECIFIED if chosen is None else model_pb2.Objective.Value(f"OBJECTIVE_{chosen.name}")


def _name_nodes(
    master: Master, spec: model_pb2.PlacementSpec, require: list[str], exclude: list[str], layers: list[str]
) -> None:
    """Put the node_ids of the nodes people named into `spec`."""
    if not (require or exclude or layers):
        return
    state = master.events.GetState(event_service_pb2.GetStateRequest(), timeout=CALL_SECONDS_MAX).state
    spec.require_node_ids.extend(names.find_node_id(state, typed) for typed in require)
    spec.exclude_node_ids.extend(names.find_node_id(state, typed) for typed in exclude)
    for typed in layers:
        node, separator, count = typed.rpartition("=")
        if not separator or not count.isdecimal():
            raise CommandError(f"--layers {typed!r}: write NODE=N, e.g. node-1=12", ExitCode.USAGE)
        spec.fixed_layers.add(node_id=names.find_node_id(state, node), layers=int(count))


def _preview(master: Master, spec: model_pb2.PlacementSpec, *, as_json: bool) -> None:
    request = placement_service_pb2.PreviewPlacementRequest(spec=spec)
    answer = master.placements.PreviewPlacement(request, timeout=CALL_SECONDS_MAX)
    if answer.HasField("refusal"):
        raise from_refusal(answer.refusal)
    if as_json:
        print_json(answer.placement)
        return
    console().print(f"{spec.model_id} would go (nothing is reserved):", markup=False)
    _show(answer.placement)


def _place(master: Master, spec: model_pb2.PlacementSpec, *, wait: bool, as_json: bool) -> None:
    request = placement_service_pb2.PlaceRequest(spec=spec)
    instance = master.placements.Place(request, timeout=CALL_SECONDS_MAX).instance
    if not as_json:
        console().print(f"{spec.model_id} is placed as {instance.instance_id}", markup=False)
        _show(instance.placement)
    if wait:
        instance = _wait(master, instance)
    if as_json:
        print_json(instance)


def _show(decided: model_pb2.Placement) -> None:
    out = console()
    out.print(tables.placement(decided))
    for line in tables.left_out(decided):
        out.print(line, markup=False, soft_wrap=True)
    total_bytes = sum(shard.bytes.total_bytes for shard in decided.shards)
    sequences = f"{decided.concurrent_sequences} sequence{'s' if decided.concurrent_sequences > 1 else ''}"
    out.print(f"{bytes_text(total_bytes)} in all, for {sequences} of {decided.context_tokens} tokens")
    if decided.explanation:
        out.print(decided.explanation, markup=False, soft_wrap=True)
    for line in (*tables.prediction(decided), *tables.runners_up(decided)):
        out.print(line, markup=False, soft_wrap=True)
    if decided.HasField("forced_past"):
        errors_console().print(f"forced past: {decided.forced_past.message}", style="yellow", markup=False)


def _wait(master: Master, instance: model_pb2.Instance) -> model_pb2.Instance:
    """The instance once it runs. Raises CommandError when it fails or is released instead."""
    request = placement_service_pb2.WatchInstanceRequest(instance_id=instance.instance_id)
    changes = master.placements.WatchInstance(request, timeout=LOAD_SECONDS_MAX)
    with loading.shown(instance) as show:
        try:
            for change in changes:
                instance = change.instance
                show(instance)
                if instance.state == model_pb2.INSTANCE_STATE_RUNNING:
                    return instance
        finally:
            changes.cancel()
    if instance.state == model_pb2.INSTANCE_STATE_FAILED:
        raise CommandError(loading.failure_text(instance), reason="INSTANCE_FAILED")
    raise CommandError(f"{instance.instance_id} was released before it ran", reason="INSTANCE_RELEASED")
