"""`ullage status`: the nodes and what they can give, the instances and how far they are."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from services.cli import connection, tables
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.output import JsonOption, bytes_text, console, print_json
from ullage.v1 import event_service_pb2, model_pb2, state_pb2

ON_THE_WAY: Final = frozenset(
    {model_pb2.INSTANCE_STATE_PLACED, model_pb2.INSTANCE_STATE_LOADING, model_pb2.INSTANCE_STATE_RELEASING}
)


def status(
    *,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    everything: Annotated[bool, typer.Option("--all", help="Released instances too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the nodes (what they can give now) and the instances (phase by phase).

    Example: `ullage status`
    """
    with connection.master_at(master) as there:
        answer = there.events.GetState(event_service_pb2.GetStateRequest(), timeout=CALL_SECONDS_MAX)
        if as_json:
            print_json(answer)
            return
        show(answer.state, everything=everything)
        for instance in answer.state.instances:
            if instance.state in ON_THE_WAY:
                _say_since_when(there, answer.state, instance)


def show(state: state_pb2.ClusterState, *, everything: bool) -> None:
    """Print the nodes and the instances of `state`."""
    out = console()
    if state.nodes:
        out.print(tables.nodes(state))
    else:
        out.print("no nodes: start one with `ullage node`", markup=False)
    if gpus := tables.gpus(state):
        out.print("\n" + "\n".join(gpus), markup=False, soft_wrap=True)
    shown = [one for one in state.instances if everything or one.state != model_pb2.INSTANCE_STATE_RELEASED]
    if shown:
        out.print()
        out.print(tables.instances(state, shown))
    for instance in shown:
        if instance.failure:
            out.print(f"\n{instance.instance_id}: {instance.failure}", style="red", markup=False, soft_wrap=True)
        for shard in instance.shards:
            if shard.HasField("over_grant_bytes"):
                more = f"rank {shard.rank} holds {bytes_text(shard.over_grant_bytes)} more than it was promised"
                advice = "new requests wait until it does not"
                out.print(f"\n{instance.instance_id}: {more}; {advice}", style="yellow", markup=False, soft_wrap=True)


def _say_since_when(master: Master, state: state_pb2.ClusterState, instance: model_pb2.Instance) -> None:
    """Tell slow from stuck: the time since a shard of `instance` last got on, all by the master's clock."""
    request = event_service_pb2.ListEventsRequest(
        page_size=1,
        descending=True,
        filter=event_service_pb2.EventFilter(
            kinds=["instance_placed", "shard_status_changed"], instance_ids=[instance.instance_id]
        ),
    )
    events = master.events.ListEvents(request, timeout=CALL_SECONDS_MAX).events
    if events:
        seconds = (state.recorded_at.ToNanoseconds() - events[0].recorded_at.ToNanoseconds()) / 1e9
        console().print(f"\n{instance.instance_id}: last progress {max(0.0, seconds):.0f} s ago", markup=False)
