"""What every node says of itself, in columns: thousands of nodes are looked at together, not one by one.

A roster is kept from one decision to the next and takes over only what has changed. A decision gets a survey of it:
its own copy of the columns, which stands still while it is decided, in whatever thread.

Rules this module lives by:
- It holds nothing that the state does not: made anew from the same state it would be the same.
- Rows stand in the order of the nodes' ids, never in that in which they joined.
- What is not known is marked as such beside its column; the number there means nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from services.master.allocator.capacity import ROOM_BYTES_MAX
from services.master.allocator.demand import Form, form_of
from services.master.allocator.hops import Links
from services.master.state import InstanceRecord, NodeRecord, State
from ullage.v1 import model_pb2, node_pb2

MODELS_KEPT_MAX: Final = 32
"""For how many models it is kept which nodes have them."""

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

ESTIMATES: Final[dict[model_pb2.Admission.ValueType, str]] = {
    model_pb2.ADMISSION_STRICT: "strict_available_bytes",
    model_pb2.ADMISSION_BALANCED: "balanced_available_bytes",
    model_pb2.ADMISSION_CEILING: "ceiling_available_bytes",
}
"""The estimate that each admission trusts."""

LEVELS: Final = frozenset(
    {node_pb2.PRESSURE_LEVEL_NORMAL, node_pb2.PRESSURE_LEVEL_WARNING, node_pb2.PRESSURE_LEVEL_CRITICAL}
)


class Held(NamedTuple):
    """A shard as it counts against its node."""

    instance_id: str
    unsettled_bytes: int
    settled_bytes: int
    held_bytes: int
    shrinking: bool


class Known(NamedTuple):
    """A column of bytes, and where it says something."""

    bytes: Ints
    known: Bools


@dataclass(frozen=True, eq=False)
class Survey:
    """The nodes at one moment."""

    sequence: int
    links_changed_at: int
    node_ids: list[str]
    names: list[str]
    """As people call them; the id where a name is missing, and beside it where that is not unique."""
    friendly_names: list[str]
    levels: Ints
    estimates: Mapping[model_pb2.Admission.ValueType, Known]
    ram_total: Known
    device_limit: Known
    held_bytes: Ints
    """What their shards may hold in all."""
    promised_bytes: Ints
    overridden: Bools
    overhead_bytes: Ints
    forms: list[Form]
    form: Ints
    """The index of each one's form; -1 without a runner."""
    bytes_per_second: Floats
    flops_per_second: Floats
    """Not a number where it is not known."""
    has_model: Bools
    shards: Mapping[int, tuple[Held, ...]]
    """By row; only of nodes that have some."""
    links: Links
    blocked: Mapping[int, frozenset[str]]
    """By row, the nodes that it tried and did not reach; only of nodes that miss some."""
    instances: Mapping[str, InstanceRecord]
    rows: Mapping[str, int]
    """Each node's row."""


@dataclass(eq=False)
class Roster:
    """The columns of a state, as far as they were taken over."""

    state: State
    _records: list[NodeRecord] = field(default_factory=list)
    _node_ids: list[str] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _friendly_names: list[str] = field(default_factory=list)
    _rows: dict[str, int] = field(default_factory=dict)
    _seen: list[int] = field(default_factory=list)
    """The `changed_at` at which each row was taken over."""
    _membership_seen: int = -1
    _ints: np.ndarray[tuple[int, int], np.dtype[np.int64]] = field(default_factory=lambda: np.empty((0, 0), np.int64))
    _known: np.ndarray[tuple[int, int], np.dtype[np.bool_]] = field(default_factory=lambda: np.empty((0, 0), np.bool_))
    _speeds: np.ndarray[tuple[int, int], np.dtype[np.float64]] = field(default_factory=lambda: np.empty((0, 0)))
    _links: dict[str, dict[str, node_pb2.Link]] = field(default_factory=dict)
    _blocked: dict[int, frozenset[str]] = field(default_factory=dict)
    _links_seen: int = -1
    _forms: dict[Form, int] = field(default_factory=dict)
    _shards: dict[int, tuple[Held, ...]] = field(default_factory=dict)
    _models: dict[str, Bools] = field(default_factory=dict)

    def survey(self, model_id: str) -> Survey:
        """The nodes as they are now, and which have the model."""
        self._refresh()
        ints, known, speeds = self._ints.copy(), self._known.copy(), self._speeds.copy()
        return Survey(
            sequence=self.state.sequence,
            links_changed_at=self.state.links_changed_at,
            node_ids=self._node_ids,
            names=self._names,
            friendly_names=self._friendly_names,
            levels=ints[0],
            estimates={admission: Known(ints[i], known[i]) for i, admission in enumerate(ESTIMATES, start=1)},
            ram_total=Known(ints[4], known[4]),
            device_limit=Known(ints[5], known[5]),
            held_bytes=ints[6],
            promised_bytes=ints[7],
            overridden=known[7],
            overhead_bytes=ints[8],
            forms=list(self._forms),
            form=ints[9],
            bytes_per_second=speeds[0],
            flops_per_second=speeds[1],
            has_model=self._having(model_id).copy(),
            shards=dict(self._shards),
            links=self._links,
            blocked=dict(self._blocked),
            instances=self.state.instances,
            rows=self._rows,
        )

    def _refresh(self) -> None:
        if self._membership_seen != self.state.membership_changed_at or len(self._records) != len(self.state.nodes):
            self._renew()
        changed = [row for row, record in enumerate(self._records) if record.changed_at != self._seen[row]]
        renamed = False
        for row in changed:
            record = self._records[row]
            self._take(row, record)
            self._seen[row] = record.changed_at
            renamed = renamed or record.identity.friendly_name != self._friendly_names[row]
        if self._links_seen != self.state.links_changed_at:
            self._block(changed)
        if renamed:
            self._rename()

    def _block(self, rows: list[int]) -> None:
        """Take over whom these nodes do not reach."""
        for row in rows:
            missed = frozenset(to for to, link in self._records[row].links.items() if not link.reachable)
            if missed:
                self._blocked[row] = missed
            else:
                self._blocked.pop(row, None)
        self._links_seen = self.state.links_changed_at

    def _renew(self) -> None:
        """Begin again with the nodes that there are now."""
        self._node_ids = sorted(self.state.nodes)
        self._records = [self.state.nodes[node_id] for node_id in self._node_ids]
        self._rows = {node_id: row for row, node_id in enumerate(self._node_ids)}
        self._seen = [-1] * len(self._records)
        self._membership_seen = self.state.membership_changed_at
        self._ints = np.zeros((10, len(self._records)), dtype=np.int64)
        self._known = np.zeros((10, len(self._records)), dtype=np.bool_)
        self._speeds = np.full((2, len(self._records)), np.nan)
        self._links = {node_id: self.state.nodes[node_id].links for node_id in self._node_ids}
        self._blocked.clear()
        self._links_seen = -1
        self._shards.clear()
        self._models.clear()
        self._rename()

    def _rename(self) -> None:
        # New lists, since surveys that are still looked at have the old ones.
        self._friendly_names = [record.identity.friendly_name for record in self._records]
        uses = Counter(self._friendly_names)
        self._names = [
            node_id if not name else f"{name} ({node_id})" if uses[name] > 1 else name
            for node_id, name in zip(self._node_ids, self._friendly_names, strict=True)
        ]

    def _take(self, row: int, record: NodeRecord) -> None:
        """Take over what a node says now."""
        memory, runner = record.memory, record.runner
        limit = _device_limit(memory, runner)
        held = tuple(_held(record))
        figures = [*_estimates(memory), _ram_total(memory), limit]
        numbers = [0 if each is None else min(each, ROOM_BYTES_MAX) for each in figures]
        form = -1 if runner is None else self._forms.setdefault(form_of(runner), len(self._forms))
        in_all = sum(shard.held_bytes for shard in held)
        promised = in_all if record.overridden else sum(shard.unsettled_bytes for shard in held)
        overhead = 0 if runner is None else runner.shard_overhead_bytes
        sums = [min(each, ROOM_BYTES_MAX) for each in (in_all, promised, overhead)]
        self._ints[:, row] = [_level(memory), *numbers, *sums, form]
        self._known[:, row] = [
            memory is not None,
            *(each is not None for each in figures),
            *(False, record.overridden, False, False),
        ]
        self._speeds[:, row] = np.nan if runner is None else _speeds(runner)
        if held:
            self._shards[row] = held
        else:
            self._shards.pop(row, None)
        for model_id, having in self._models.items():
            having[row] = runner is not None and model_id in runner.model_ids

    def _having(self, model_id: str) -> Bools:
        """Which nodes have the model on their disk."""
        having = self._models.get(model_id)
        if having is None:
            runners = (record.runner for record in self._records)
            count = len(self._records)
            having = np.fromiter((each is not None and model_id in each.model_ids for each in runners), bool, count)
            while len(self._models) >= MODELS_KEPT_MAX:
                del self._models[next(iter(self._models))]
            self._models[model_id] = having
        return having


def _held(record: NodeRecord) -> Iterator[Held]:
    for (instance_id, _), shard in record.shards.items():
        settled = shard.settled_bytes
        yield Held(instance_id, shard.unsettled_bytes, settled, shard.held_bytes, shard.shrinking)


def _level(memory: node_pb2.MemorySample | None) -> node_pb2.PressureLevel.ValueType:
    if memory is None or memory.pressure_level not in LEVELS:
        return node_pb2.PRESSURE_LEVEL_UNKNOWN
    return memory.pressure_level


def _estimates(memory: node_pb2.MemorySample | None) -> list[int | None]:
    if memory is None:
        return [None] * len(ESTIMATES)
    return [getattr(memory, name) if memory.HasField(name) else None for name in ESTIMATES.values()]  # type: ignore[arg-type]  # names of its fields


def _ram_total(memory: node_pb2.MemorySample | None) -> int | None:
    return memory.ram_total_bytes if memory is not None and memory.HasField("ram_total_bytes") else None


def _device_limit(memory: node_pb2.MemorySample | None, runner: node_pb2.RunnerProfile | None) -> int | None:
    """The lowest limit that was read; an assumed one only where none was."""
    read = runner.device_limit_bytes if runner is not None and runner.HasField("device_limit_bytes") else None
    if memory is None or not memory.HasField("device_limit_bytes"):
        return read
    if read is None:
        return memory.device_limit_bytes
    if node_pb2.MEMORY_FLAG_DEVICE_LIMIT_ASSUMED in memory.flags:
        return read
    return min(read, memory.device_limit_bytes)


def _speeds(runner: node_pb2.RunnerProfile) -> tuple[float, float]:
    return runner.decode_bytes_per_second or float("nan"), runner.flops_per_second or float("nan")
