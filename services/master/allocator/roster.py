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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from services.master.allocator.capacity import ROOM_BYTES_MAX
from services.master.allocator.demand import Demands, Form, form_of
from services.master.allocator.hops import Way, Ways, way
from services.master.state import InstanceRecord, NodeRecord, State
from ullage.v1 import model_pb2, node_pb2

MODELS_KEPT_MAX: Final = 32
"""For how many models it is kept which nodes have them."""

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]

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
_CHANGED_AT_OF: Final = attrgetter("changed_at")

ESTIMATES: Final[dict[model_pb2.Admission.ValueType, _Figure]] = {
    model_pb2.ADMISSION_STRICT: "strict_available_bytes",
    model_pb2.ADMISSION_BALANCED: "balanced_available_bytes",
    model_pb2.ADMISSION_CEILING: "ceiling_available_bytes",
}
"""The estimate that each admission trusts."""

DEVICES_IN_RAM: Final = frozenset({"", "cpu", "metal"})
"""What runners compute on that has no memory of its own."""

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
    running: bool


class Known(NamedTuple):
    """A column of bytes, and where it says something."""

    bytes: Ints
    known: Bools

    def copied(self) -> Known:
        """A column that stands still."""
        return Known(self.bytes.copy(), self.known.copy())


@dataclass(frozen=True, eq=False)
class Survey:
    """The nodes at one moment."""

    sequence: int
    node_ids: list[str]
    names: list[str]
    """As people call them; the id where a name is missing, and beside it where that is not unique."""
    friendly_names: list[str]
    levels: Ints
    estimates: Mapping[model_pb2.Admission.ValueType, Known]
    ram_total: Known
    device_limit: Known
    device_free: Known
    """What is free of a card's own memory, less what is to be loaded there, where the runner computes on one."""
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
    ways: Ways
    blocked: Mapping[int, frozenset[str]]
    """By row, the nodes that it tried and did not reach; only of nodes that miss some."""
    instances: Mapping[str, InstanceRecord]
    rows: Mapping[str, int]
    """Each node's row."""
    demands: Demands
    """What models take, as far as it was worked out."""

    def as_stored(self) -> Survey:
        """The same nodes, of which those that can hold weights as stored do; itself where none can.

        How fast such a node then is nobody measured: its speeds are of its usual form.
        """
        forms = [form.as_stored() for form in self.forms]
        if forms == self.forms:
            return self
        changed = np.array([*(form.is_changed for form in forms), False])[self.form]
        return replace(
            self,
            forms=forms,
            bytes_per_second=np.where(changed, np.nan, self.bytes_per_second),
            flops_per_second=np.where(changed, np.nan, self.flops_per_second),
        )


class Readings:
    """What probes read, in columns."""

    def __init__(self, count: int) -> None:
        self.level = np.full(count, node_pb2.PRESSURE_LEVEL_UNKNOWN, dtype=np.int64)
        self.figures = {name: _nothing_known(count) for name in _FIGURES}
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
        self.device_limit = _nothing_known(count)
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


@dataclass(eq=False)
class Roster:
    """The columns of a state, as far as they were taken over."""

    state: State
    among: frozenset[str] | None = None
    """The only nodes of it that are of interest; None where all are."""
    _records: list[NodeRecord] = field(default_factory=list)
    _node_ids: list[str] = field(default_factory=list)
    _names: list[str] = field(default_factory=list)
    _friendly_names: list[str] = field(default_factory=list)
    _rows: dict[str, int] = field(default_factory=dict)
    _identities: list[node_pb2.NodeIdentity] = field(default_factory=list)
    _seen: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The `changed_at` at which each row was taken over."""
    _runners_seen: list[node_pb2.RunnerProfile | None] = field(default_factory=list)
    _membership_seen: int = -1
    _readings: Readings = field(default_factory=lambda: Readings(0))
    _runners: Runners = field(default_factory=lambda: Runners(0))
    _promises: Promises = field(default_factory=lambda: Promises(0))
    _device_free: Known = field(default_factory=lambda: _nothing_known(0))
    _links: dict[int, dict[str, node_pb2.Link]] = field(default_factory=dict)
    """By row, the links that were taken over."""
    _ways: dict[str, Mapping[str, Way]] = field(default_factory=dict)
    _blocked: dict[int, frozenset[str]] = field(default_factory=dict)
    _links_seen: int = -1
    _forms: dict[Form, int] = field(default_factory=dict)
    _models: dict[str, Bools] = field(default_factory=dict)
    _demands: Demands = field(default_factory=Demands)

    def survey(self, model_id: str) -> Survey:
        """The nodes as they are now, and which have the model."""
        self.catch_up(len(self.state.nodes))
        readings, runners, promises = self._readings, self._runners, self._promises
        figures, free = readings.figures, self._device_free
        overridden = readings.overridden.copy()
        return Survey(
            sequence=self.state.sequence,
            node_ids=self._node_ids,
            names=self._names,
            friendly_names=self._friendly_names,
            levels=readings.level.copy(),
            estimates={admission: figures[name].copied() for admission, name in ESTIMATES.items()},
            ram_total=figures["ram_total_bytes"].copied(),
            device_limit=_lower(figures["device_limit_bytes"], readings.limit_assumed, runners.device_limit),
            device_free=Known(free.bytes - promises.unloaded, free.known.copy()),
            held_bytes=promises.held.copy(),
            promised_bytes=np.where(overridden, promises.held, promises.unsettled),
            overridden=overridden,
            overhead_bytes=runners.overhead.copy(),
            forms=list(self._forms),
            form=runners.form.copy(),
            bytes_per_second=runners.speeds[0].copy(),
            flops_per_second=runners.speeds[1].copy(),
            has_model=self._having(model_id).copy(),
            shards=dict(promises.shards),
            ways=dict(self._ways),
            blocked=dict(self._blocked),
            instances=self.state.instances,
            rows=self._rows,
            demands=self._demands,
        )

    def catch_up(self, rows_max: int) -> bool:
        """Take over at most so many of the nodes that have changed; whether that was all of them.

        A survey takes over what is left; whoever must not be held up so long at once calls this before.
        """
        nodes = self.state.nodes if self.among is None else self.among & self.state.nodes.keys()
        if self._membership_seen != self.state.membership_changed_at or len(self._records) != len(nodes):
            self._renew(sorted(nodes))
        changed_at = np.fromiter(map(_CHANGED_AT_OF, self._records), np.int64, len(self._records))
        changed = np.flatnonzero(changed_at != self._seen).tolist()
        everything = len(changed) <= rows_max
        changed = changed[:rows_max]
        self._seen[changed] = changed_at[changed]
        records = [self._records[row] for row in changed]
        self._take(changed, records)
        if self._links_seen != self.state.links_changed_at:
            self._take_links(changed)
            if everything:
                self._links_seen = self.state.links_changed_at
        if any(record.identity is not self._identities[row] for row, record in zip(changed, records, strict=True)):
            self._rename()
        return everything

    def _take_links(self, rows: list[int]) -> None:
        """Take over what these nodes have measured since, and whom they do not reach."""
        for row in rows:
            links, taken = self._records[row].links, self._links.get(row, {})
            if self.among is not None:
                links = {to: links[to] for to in self.among & links.keys()}
            fresh = {to: way(link) for to, link in links.items() if taken.get(to) is not link}
            if not fresh:
                continue
            node_id = self._node_ids[row]
            self._links[row] = dict(links)
            # New ones, since surveys that are still looked at have the old.
            self._ways[node_id] = ways = {**self._ways.get(node_id, {}), **fresh}
            missed = frozenset(to for to, each in ways.items() if each.seconds == float("inf"))
            if missed:
                self._blocked[row] = missed
            else:
                self._blocked.pop(row, None)

    def _renew(self, node_ids: list[str]) -> None:
        """Begin again with the nodes that there are now."""
        count = len(node_ids)
        self._node_ids = node_ids
        self._records = [self.state.nodes[node_id] for node_id in node_ids]
        self._rows = {node_id: row for row, node_id in enumerate(node_ids)}
        self._seen = np.full(count, -1, dtype=np.int64)
        self._runners_seen = [None] * count
        self._membership_seen = self.state.membership_changed_at
        self._readings, self._runners, self._promises = Readings(count), Runners(count), Promises(count)
        self._device_free = _nothing_known(count)
        self._links.clear()
        self._ways.clear()
        self._blocked.clear()
        self._links_seen = -1
        self._models.clear()
        self._rename()

    def _rename(self) -> None:
        # New lists, since surveys that are still looked at have the old ones.
        self._identities = [record.identity for record in self._records]
        self._friendly_names = [identity.friendly_name for identity in self._identities]
        uses = Counter(self._friendly_names)
        self._names = [
            node_id if not name else f"{name} ({node_id})" if uses[name] > 1 else name
            for node_id, name in zip(self._node_ids, self._friendly_names, strict=True)
        ]

    def _take(self, rows: Sequence[int], records: Sequence[NodeRecord]) -> None:
        """Take over what these nodes say now."""
        read = [(row, record.memory) for row, record in zip(rows, records, strict=True) if record.memory is not None]
        self._readings.take([row for row, _ in read], [sample for _, sample in read])
        for row, record in zip(rows, records, strict=True):
            if record.runner is not self._runners_seen[row]:
                self._take_runner(row, record)
            if record.shards or row in self._promises.shards:
                self._promises.take(row, record)
            if record.system is not None and record.runner is not None:
                free = _device_free(record.system, record.runner)
                self._device_free.known[row] = free is not None
                self._device_free.bytes[row] = min(free or 0, ROOM_BYTES_MAX)

    def _take_runner(self, row: int, record: NodeRecord) -> None:
        runner = self._runners_seen[row] = record.runner
        if runner is None:
            return
        self._runners.take(row, runner, self._forms.setdefault(form_of(runner), len(self._forms)))
        for model_id, having in self._models.items():
            having[row] = model_id in runner.model_ids

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
        running = shard.status.phase == model_pb2.SHARD_PHASE_RUNNING
        held = shard.held_bytes
        yield Held(instance_id, shard.unsettled_bytes, shard.settled_bytes, held, shard.shrinking, running)


def _sum(counts: Iterable[int]) -> int:
    return min(sum(counts), ROOM_BYTES_MAX)


def _nothing_known(count: int) -> Known:
    return Known(np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_))


def _lower(sampled: Known, assumed: Bools, announced: Known) -> Known:
    """The lower of the limits that were read; an assumed one only where no other was."""
    counted = sampled.known & ~(assumed & announced.known)
    figures = np.where(counted, sampled.bytes, announced.bytes)
    figures = np.where(counted & announced.known, np.minimum(figures, announced.bytes), figures)
    return Known(figures, counted | announced.known)


def _device_free(system: node_pb2.SystemSample, runner: node_pb2.RunnerProfile) -> int | None:
    """What is free of the card's own memory that a runner computes in; None where it computes in the node's RAM."""
    if runner.device in DEVICES_IN_RAM:
        return None
    cards = [gpu for gpu in system.gpus if not gpu.unified and gpu.HasField("memory_available_bytes")]
    named = [gpu for gpu in cards if gpu.name and gpu.name == runner.device_name]
    return next((gpu.memory_available_bytes for gpu in [*named, *cards]), None)
