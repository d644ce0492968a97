"""The way from a command to the master, or to a runner: one channel, dialled within a bound.

Calls need a bound as well: pass `timeout=CALL_SECONDS_MAX` with each one that is answered once.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Final

import grpc
import typer

from services import rpc
from services.cli.failure import CommandError, ExitCode
from ullage.v1 import (
    dispatch_service_pb2_grpc,
    event_service_pb2_grpc,
    log_service_pb2_grpc,
    model_service_pb2_grpc,
    placement_service_pb2_grpc,
)

DEFAULT_MASTER: Final = "127.0.0.1:50500"
DIAL_SECONDS_MAX: Final = 5.0
CALL_SECONDS_MAX: Final = 30.0

MasterOption = Annotated[
    str, typer.Option("--master", envvar="ULLAGE_MASTER", metavar="HOST:PORT", help="The master to ask.")
]


@dataclass(frozen=True)
class Master:
    """A master that has answered, by its services."""

    address: str
    events: event_service_pb2_grpc.EventServiceStub
    models: model_service_pb2_grpc.ModelServiceStub
    placements: placement_service_pb2_grpc.PlacementServiceStub
    dispatch: dispatch_service_pb2_grpc.DispatchServiceStub
    log: log_service_pb2_grpc.LogServiceStub


@contextmanager
def master_at(address: str) -> Iterator[Master]:
    """The master at `address`, connected. Raises CommandError (UNAVAILABLE) when none answers there."""
    advice = "start one with `ullage up` or `ullage master`, or name another with --master"
    with channel_to(address, failure=f"no master answers at {address}: {advice}") as channel:
        yield Master(
            address=address,
            events=event_service_pb2_grpc.EventServiceStub(channel),
            models=model_service_pb2_grpc.ModelServiceStub(channel),
            placements=placement_service_pb2_grpc.PlacementServiceStub(channel),
            dispatch=dispatch_service_pb2_grpc.DispatchServiceStub(channel),
            log=log_service_pb2_grpc.LogServiceStub(channel),
        )


@contextmanager
def channel_to(address: str, *, failure: str) -> Iterator[grpc.Channel]:
    """A connected channel. Raises CommandError with the words `failure` when it cannot be dialled."""
    with grpc.insecure_channel(address, options=rpc.CHANNEL_OPTIONS) as channel:
        if not connected(channel):
            raise CommandError(failure, ExitCode.UNAVAILABLE)
        yield channel


def connected(channel: grpc.Channel, *, seconds: float = DIAL_SECONDS_MAX) -> bool:
    """Whether the peer answers within the bound; a refused connection is an answer too, and ends the wait.

    What has come is looked at even after the bound: this process may have stood still meanwhile.
    """
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    tell = states.put
    channel.subscribe(tell, try_to_connect=True)
    deadline = time.monotonic() + seconds
    try:
        while True:
            match states.get(timeout=max(0.0, deadline - time.monotonic())):
                case grpc.ChannelConnectivity.READY:
                    return True
                case grpc.ChannelConnectivity.TRANSIENT_FAILURE | grpc.ChannelConnectivity.SHUTDOWN:
                    return False
                case _:
                    continue
    except queue.Empty:
        return False
    finally:
        channel.unsubscribe(tell)
