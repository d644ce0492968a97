"""What a roster has taken over of nodes, in columns that are written in place: readings, runners, promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, Literal, get_args

import numpy as np

from services.master.allocator.capacity import ROOM_BYTES_MAX
from services.master.allocator.survey import Held, Known
from services.master.state import NodeRecord
from ullage.v1 import model_pb2, node_pb2

_UNKNOWN: Final = node_pb2.PRESSURE_LEVEL_UNKNOWN

_Figure = Literal[
    "strict_available_bytes",
    "balanced_available_bytes",
    "ceiling_available_bytes",
    "ram_total_bytes",
    "device_limit_bytes",
]
_FIGURES: Final[dict[_Figure, attrgetter[int]]] = {name: attrgetter(name) for name in get_args(_Figure)}
_LEVEL_OF: Final = attrgetter("pressure_level")
_FLAGS_OF: Final = attrgetter("flags")

ESTIMATES: Final[dict[model_pb2.Admission.ValueType, _Figure]] = {
    model_pb2.ADMISSION_STRICT: "strict_available_bytes",
    model_pb2.ADMISSION_BALANCED: "balanced_available_bytes",
    model_pb2.ADMISSION_CEILING: "ceiling_available_bytes",
}
"""The estimate that each admission trusts."""

LEVELS: Final = frozenset(
    {node_pb2.PRESSURE_LEVEL_NORMAL, node_pb2.PRESSURE_LEVEL_WARNING, node_pb2.PRESSURE_LEVEL_CRITICAL}
)


class Readings:
    """What probes read, in columns."""

    def __init__(self, count: int) -> None:
        self.level = np.full(count, node_pb2.PRESSURE_LEVEL_UNKNOWN, dtype=np.int64)
        self.figures = {name: Known.nothing(count) for name in _FIGURES}
        self.overridden = np.zeros(count, dtype=np.bool_)
        self.limit_assumed = np.zeros(count, dtype=np.bool_)

    def take(self, rows: Sequence[int], samples: Sequence[node_pb2.MemorySample]) -> None:
        """Take over what these nodes read: all of one column, then of the next, which is several times faster."""
        self.level[rows] = [level if level in LEVELS else _UNKNOWN for level in map(_LEVEL_OF, samples)]
        for name, column in self.figures.items():
            # 64 bits without a sign are more than a column holds.
            figures = np.fromiter(map(_FIGURES[name], samples), np.uint64, len(samples))
            column.bytes[rows] = np.minimum(figures, ROOM_BYTES_MAX)
            known = figures > 0
            for place in np.flatnonzero(~known).tolist():
                known[place] = samples[place].HasField(name)
            column.known[rows] = known
        self.overridden[rows] = self.limit_assumed[rows] = False
        for row, flags in zip(rows, map(_FLAGS_OF, samples), strict=True):
            if flags:
                self.overridden[row] = node_pb2.MEMORY_FLAG_OVERRIDDEN in flags
                self.limit_assumed[row] = node_pb2.MEMORY_FLAG_DEVICE_LIMIT_ASSUMED in flags


class Runners:
    """What runners said when they started, in columns."""

    def __init__(self, count: int) -> None:
        self.form = np.full(count, -1, dtype=np.int64)
        self.overhead = np.zeros(count, dtype=np.int64)
        self.device_limit = Known.nothing(count)
        self.speeds = np.full((2, count), np.nan)

    def take(self, row: int, runner: node_pb2.RunnerProfile, form: int) -> None:
        """Take over what a runner says now."""
        self.form[row] = form
        self.overhead[row] = min(runner.shard_overhead_bytes, ROOM_BYTES_MAX)
        self.device_limit.bytes[row] = min(runner.device_limit_bytes, ROOM_BYTES_MAX)
        self.device_limit.known[row] = runner.HasField("device_limit_bytes")
        self.speeds[0, row] = runner.decode_bytes_per_second or np.nan
        self.speeds[1, row] = runner.flops_per_second or np.nan


class Promises:
    """What nodes hold and are promised, in columns."""

    def __init__(self, count: int) -> None:
        self.shards: dict[int, tuple[Held, ...]] = {}
        self.held = np.zeros(count, dtype=np.int64)
        self.unsettled = np.zeros(count, dtype=np.int64)
        self.unloaded = np.zeros(count, dtype=np.int64)
        """Of what is held, that of shards which do not run yet."""

    def take(self, row: int, record: NodeRecord) -> None:
        """Take over the shards a node has now."""
        shards = tuple(_held(record))
        if shards:
            self.shards[row] = shards
        elif self.shards.pop(row, None) is None:
            return
        self.held[row] = _sum(each.held_bytes for each in shards)
        self.unsettled[row] = _sum(each.unsettled_bytes for each in shards)
        self.unloaded[row] = _sum(each.held_bytes for each in shards if not each.running)


def _held(record: NodeRecord) -> Iterator[Held]:
    for (instance_id, _), shard in record.shards.items():
        running = shard.status.phase == model_pb2.SHARD_PHASE_RUNNING
        held = shard.held_bytes
        yield Held(instance_id, shard.unsettled_bytes, shard.settled_bytes, held, shard.shrinking, running)


def _sum(counts: Iterable[int]) -> int:
    return min(sum(counts), ROOM_BYTES_MAX)
