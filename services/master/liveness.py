"""Whether a node is heard, from when the master last heard it and nothing else.

Ages come from the master's monotonic clock at receipt: a node's own clock is never asked, and a replay
revives nobody, since what was heard before a restart was heard by another process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from ullage.v1 import state_pb2


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a node may be silent, in seconds."""

    suspect_after_seconds: float = 3.0
    """Six samples missed at 2 Hz: no new work goes there."""
    lost_after_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class RunnerBounds:
    """How long a runner may keep its shards waiting, in seconds."""

    stalled_after_seconds: float = 3.5
    """Without a word, where its node's probe goes on speaking: more than a node may be silent and be live."""
    lost_after_seconds: float = 15.0
    """Without a word, also after the master's own start: its shards have failed."""
    take_up_seconds: float = 30.0
    """Connected, and told of a shard that it does not take up."""


DEFAULT_RUNNER_BOUNDS: Final = RunnerBounds()


def liveness(heard_at: float | None, now: float, bounds: Bounds) -> state_pb2.Liveness.ValueType:
    """What a node last heard at `heard_at` is at `now`; None was never heard by this master."""
    if heard_at is None:
        return state_pb2.LIVENESS_UNHEARD
    silent_seconds = now - heard_at
    if silent_seconds >= bounds.lost_after_seconds:
        return state_pb2.LIVENESS_LOST
    if silent_seconds >= bounds.suspect_after_seconds:
        return state_pb2.LIVENESS_SUSPECTED
    return state_pb2.LIVENESS_LIVE


def overdue(heard: Mapping[str, float], now: float, bounds: Bounds) -> Iterator[str]:
    """Those that are no longer live of all that were `heard`, each at the time said."""
    return (node_id for node_id, heard_at in heard.items() if now - heard_at >= bounds.suspect_after_seconds)


def fallen(
    before: Mapping[str, state_pb2.Liveness.ValueType], after: Mapping[str, state_pb2.Liveness.ValueType]
) -> list[tuple[str, state_pb2.Liveness.ValueType]]:
    """The nodes that became suspected or lost from one look to the next, each with what it became, by id."""
    fell = (state_pb2.LIVENESS_SUSPECTED, state_pb2.LIVENESS_LOST)
    return [(id_, now) for id_, now in sorted(after.items()) if now in fell and now != before.get(id_)]
