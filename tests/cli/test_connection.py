"""How long a master is waited for, on a machine that stood still meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from services.cli.connection import connected

Tell = Callable[[grpc.ChannelConnectivity], None]


class Dialled:
    """A channel that has told all it will by the time it is waited for."""

    def __init__(self, *states: grpc.ChannelConnectivity) -> None:
        self._states = states

    def subscribe(self, tell: Tell, try_to_connect: bool = False) -> None:
        for state in self._states:
            tell(state)

    def unsubscribe(self, tell: Tell) -> None:
        pass


IDLE, CONNECTING, READY, FAILED = (
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.CONNECTING,
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
)


@pytest.mark.parametrize(
    ("states", "expected"),
    [((IDLE, CONNECTING, READY), True), ((IDLE, CONNECTING, FAILED), False), ((IDLE, CONNECTING), False)],
)
def test_what_came_within_the_bound_counts_when_it_is_seen_after_it(
    states: tuple[grpc.ChannelConnectivity, ...], expected: bool
) -> None:
    channel: Any = Dialled(*states)
    assert connected(channel, seconds=0) is expected
