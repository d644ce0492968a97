"""`ullage diff`: what changed between two moments of the log, as facts and as state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import typer

from services.cli import connection, event_text, events, names, offline
from services.cli.failure import CommandError, ExitCode
from services.cli.output import JsonOption, bytes_text, console, known_bytes_text, message_json
from services.cli.why import DECIDE_SECONDS_MAX
from ullage.v1 import event_service_pb2, model_pb2, node_pb2, state_pb2

SAMPLES: Final = ("memory_sampled", "system_sampled", "link_measured")
"""Facts that say what the state shows anyway: they are not listed."""

_IN_DETAILS: Final = (
    "the state is different in details alone, as samples are: compare `ullage state --at {first} --json` and {last}"
)


def diff(
    first: Annotated[int, typer.Argument(metavar="A", min=0, help="A sequence.")],
    last: Annotated[int, typer.Argument(metavar="B", min=0, help="A later one.")],
    *,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Show the facts after A and up to B, but for samples, and what is different in the state.

    Example: `ullage diff 100 250`
    """
    if last < first:
        raise CommandError(f"{last} is before {first}: give the earlier sequence first", ExitCode.USAGE)
    with offline.master_or_log(master, log) as there:
        before, after = (
            there.events.GetState(event_service_pb2.GetStateRequest(at_sequence=at), timeout=DECIDE_SECONDS_MAX).state
            for at in (first, last)
        )
        request = event_service_pb2.ListEventsRequest(from_sequence=first + 1, to_sequence=last)
        request.filter.kinds.extend(kind for kind in event_text.KINDS if kind not in SAMPLES)
        happened = list(events.pages(there, request, events.PAGE_EVENTS))
    known = names.node_names(before) | names.node_names(after)
    changes = list(_changes(before, after))
    alike = "the state is the same" if _equal(before, after) else _IN_DETAILS.format(first=first, last=last)
    for event in happened:
        print(message_json(event, one_line=True) if as_json else event_text.line(event, known))
    if as_json:
        return
    print()
    for change in changes or [alike]:
        console().print(change, markup=False, soft_wrap=True)


def _equal(before: state_pb2.ClusterState, after: state_pb2.ClusterState) -> bool:
    """Whether all is the same but how far the log had come."""
    both = [state_pb2.ClusterState.FromString(each.SerializeToString()) for each in (before, after)]
    for state in both:
        state.ClearField("sequence")
        state.ClearField("recorded_at")
        for node in state.nodes:
            node.ClearField("last_sequence")
    return both[0] == both[1]


def _changes(before: state_pb2.ClusterState, after: state_pb2.ClusterState) -> Iterator[str]:
    """A line for each thing that is different, but for samples that tell of nothing new."""
    known = names.node_names(before) | names.node_names(after)
    old_nodes = {node.identity.node_id: node for node in before.nodes}
    new_nodes = {node.identity.node_id: node for node in after.nodes}
    for node_id in sorted(old_nodes.keys() | new_nodes.keys()):
        old, new = old_nodes.get(node_id), new_nodes.get(node_id)
        name = names.node_name((new or old or state_pb2.NodeView()).identity)
        if old is None or new is None:
            yield f"node {name}: {'gone' if new is None else 'new'}"
        else:
            yield from (f"node {name}: {change}" for change in (*_node_changes(old, new), *_ways(old, new, known)))
    yield from _model_changes(before, after)
    states = {instance.instance_id: _state_name(instance) for instance in before.instances}
    for instance in after.instances:
        was, is_ = states.get(instance.instance_id), _state_name(instance)
        if was is None:
            yield f"instance {instance.instance_id}: new, {is_}"
        elif was != is_:
            why = f", {instance.failure}" if instance.failure else ""
            yield f"instance {instance.instance_id}: {was} -> {is_}{why}"


def _model_changes(before: state_pb2.ClusterState, after: state_pb2.ClusterState) -> Iterator[str]:
    old = {model.model_id: model.digest for model in before.models}
    new = {model.model_id: model.digest for model in after.models}
    for model_id in sorted(old.keys() | new.keys()):
        if model_id not in old:
            yield f"model {model_id}: new"
        elif model_id not in new:
            yield f"model {model_id}: gone"
        elif old[model_id] != new[model_id]:
            yield f"model {model_id}: other files, {old[model_id]} -> {new[model_id]}"


def _node_changes(old: state_pb2.NodeView, new: state_pb2.NodeView) -> Iterator[str]:
    if old.memory.pressure_level != new.memory.pressure_level:
        yield f"level {_level(old.memory)} -> {_level(new.memory)}"
    figures = (
        ("available", _available(old), _available(new)),
        ("promised", bytes_text(old.promised_bytes), bytes_text(new.promised_bytes)),
        ("resident", bytes_text(old.resident_bytes), bytes_text(new.resident_bytes)),
    )
    for what, was, is_ in figures:
        if was != is_:
            yield f"{what} {was} -> {is_}"
    if old.identity.boot_id != new.identity.boot_id:
        yield "its probe was started again"
    if old.runner.boot_id != new.runner.boot_id:
        yield f"runner at {new.runner.address}" if new.runner.address else "runner gone"
    had, has = set(old.runner.model_ids), set(new.runner.model_ids)
    if had != has:
        yield "; ".join(
            f"{what} {', '.join(sorted(models))}"
            for what, models in (("has the files of", has - had), ("has no more the files of", had - has))
            if models
        )


def _ways(old: state_pb2.NodeView, new: state_pb2.NodeView, known: Mapping[str, str]) -> Iterator[str]:
    """Whom the node reaches now and did not, and the other way round; whom it has not tried is neither."""
    before = {link.to_node_id: link for link in old.links}
    for link in new.links:
        was = before.get(link.to_node_id)
        if was is None or was.reachable != link.reachable:
            failure = f": {link.failure}" if link.failure else ""
            other = names.named(known, link.to_node_id)
            yield f"reaches {other}" if link.reachable else f"does not reach {other}{failure}"


def _available(node: state_pb2.NodeView) -> str:
    return known_bytes_text(node.memory, "balanced_available_bytes")


def _level(sample: node_pb2.MemorySample) -> str:
    if sample.pressure_level == node_pb2.PRESSURE_LEVEL_UNSPECIFIED:
        return "unknown"
    return node_pb2.PressureLevel.Name(sample.pressure_level).removeprefix("PRESSURE_LEVEL_")


def _state_name(instance: model_pb2.Instance) -> str:
    return model_pb2.InstanceState.Name(instance.state).removeprefix("INSTANCE_STATE_")
