"""`ullage events`: what happened, from the log of a running master or from a log file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Final

import typer

from services.cli import connection, event_text, names, offline
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.failure import CommandError, ExitCode
from services.cli.output import JsonOption, message_json
from ullage.v1 import event_pb2, event_service_pb2

PAGE_EVENTS: Final = 1000
"""The most the master gives at once."""

DEFAULT_LIMIT: Final = 100


def events(
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is to come.")] = False,
    first: Annotated[int | None, typer.Option("--from", metavar="N", min=1, help="From this sequence on.")] = None,
    kind: Annotated[list[str] | None, typer.Option("--kind", help="Only this kind, e.g. instance_placed.")] = None,
    node: Annotated[list[str] | None, typer.Option("--node", metavar="NODE", help="Only about this node.")] = None,
    instance: Annotated[list[str] | None, typer.Option("--instance", help="Only about this instance.")] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help=f"At most so many; {DEFAULT_LIMIT} without --follow or --from.")
    ] = None,
    log: offline.LogOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Show the newest events, those from a sequence on, or those to come; in order, one a line.

    Example: `ullage events --follow --kind shard_status_changed --node node-2`
    """
    for name in kind or []:
        if name not in event_text.KINDS:
            raise CommandError(f"no kind is called {name!r}: there is {', '.join(event_text.KINDS)}", ExitCode.USAGE)
    limit = None if limit is None else min(limit, sys.maxsize)
    if follow and log is not None:
        raise CommandError("a log file without its master does not grow: leave out --follow", ExitCode.USAGE)
    with offline.master_or_log(master, log) as there:
        state = there.events.GetState(event_service_pb2.GetStateRequest(), timeout=CALL_SECONDS_MAX).state
        chosen = event_service_pb2.EventFilter(
            kinds=kind or [],
            node_ids=[names.find_node_id(state, typed) for typed in node or []],
            instance_ids=[names.find_instance(state.instances, typed).instance_id for typed in instance or []],
        )
        node_names = names.node_names(state)
        for event in islice(_wanted(there, chosen, first, follow=follow, limit=limit), limit):
            _learn_name(node_names, event.fact)
            print(message_json(event, one_line=True) if as_json else event_text.line(event, node_names), flush=True)


def _wanted(
    master: Master, chosen: event_service_pb2.EventFilter, first: int | None, *, follow: bool, limit: int | None
) -> Iterator[event_pb2.RecordedEvent]:
    if follow:
        return _following(master, chosen, first)
    if first is None:
        return _newest(master, chosen, limit or DEFAULT_LIMIT)
    return _from(master, chosen, first)


def _following(
    master: Master, chosen: event_service_pb2.EventFilter, first: int | None
) -> Iterator[event_pb2.RecordedEvent]:
    request = event_service_pb2.FollowRequest(filter=chosen)
    if first is None:
        request.from_now = True
    else:
        request.from_sequence = first
    for response in master.events.Follow(request):
        yield from response.events


def _newest(master: Master, chosen: event_service_pb2.EventFilter, limit: int) -> Iterator[event_pb2.RecordedEvent]:
    request = event_service_pb2.ListEventsRequest(filter=chosen, descending=True)
    return reversed(list(islice(pages(master, request, min(limit, PAGE_EVENTS)), limit)))


def _from(master: Master, chosen: event_service_pb2.EventFilter, first: int) -> Iterator[event_pb2.RecordedEvent]:
    request = event_service_pb2.ListEventsRequest(filter=chosen, from_sequence=first)
    return pages(master, request, PAGE_EVENTS)


def pages(
    master: Master, request: event_service_pb2.ListEventsRequest, page_size: int
) -> Iterator[event_pb2.RecordedEvent]:
    """What is listed, page after page."""
    request.page_size = page_size
    while True:
        page = master.events.ListEvents(request, timeout=CALL_SECONDS_MAX)
        yield from page.events
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _learn_name(node_names: dict[str, str], fact: event_pb2.Fact) -> None:
    """A node that joins while we follow is called by the name it announces."""
    if fact.WhichOneof("fact") == "node_announced":
        node_names[fact.node_announced.identity.node_id] = names.node_name(fact.node_announced.identity)
