"""What every node says of itself, in columns: thousands of nodes are looked at together, not one by one.

A roster is kept from one decision to the next and takes over only what has changed. A decision gets a survey of it:
its own copy of the columns, which stands still while it is decided, in whatever thread.

Rules this module lives by:
- It holds nothing that the state does not: made anew from the same state it would be the same.
- Rows stand in the order of the nodes' ids, never in that in which they joined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final

import numpy as np

from services.master.allocator.capacity import ROOM_BYTES_MAX
from services.master.allocator.columns import ESTIMATES, Promises, Readings, Runners
from services.master.allocator.demand import Demands, Form, form_of
from services.master.allocator.hops import Way, way
from services.master.allocator.survey import Bools, Ints, Known, Survey
from services.master.state import NodeRecord, State
from ullage.v1 import node_pb2

MODELS_KEPT_MAX: Final = 32
"""For how many models it is kept which nodes have them."""

DEVICES_IN_RAM: Final = frozenset({"", "cpu", "metal"})
"""What runners compute on that has no memory of its own."""

_CHANGED_AT_OF: Final = attrgetter("changed_at")


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
    _device_free: Known = field(default_factory=lambda: Known.nothing(0))
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
        self._device_free = Known.nothing(count)
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
