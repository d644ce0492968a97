"""What each node could give to a shard, or why it gives nothing.

Rules this module lives by:
- Available is what the estimate the request trusts says; what is promised to others and not yet resident is
  subtracted from it, and the runner's process before it holds any layer. The device's limit holds in any case.
- Under WARNING a node's weight is a part of its room; its room is whole, except where the request is STRICT.
- A node that is CRITICAL, silent, or of which something is unknown gets nothing unless that is asked for by name.
- Nothing is guessed: a figure that is not there stays absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from services.master.allocator.capacity import ROOM_BYTES_MAX
from services.master.allocator.demand import Demand
from services.master.allocator.ranges import Candidate
from services.master.allocator.request import WHOLE_TENTHS, Request
from services.master.allocator.survey import Bools, Floats, Ints, Known, Survey
from ullage.v1 import model_pb2, node_pb2

_NEVER_LIFTED: Final = frozenset({model_pb2.EXCLUSION_REQUESTED, model_pb2.EXCLUSION_NO_RUNNER})


@dataclass(frozen=True)
class View:
    """Under which light the nodes are looked at: as they are, or as they would be if."""

    lifted: bool = False
    """Use nodes that would be left out, as a forced request does."""
    without_promises: bool = False
    every_way: bool = False
    """As if every node reached every other."""
    with_cut_off: bool = False
    """Weigh also the nodes that no others reach: with more room than it has, each might hold the model alone."""


AS_THEY_ARE: Final = View()


class Budget(NamedTuple):
    """A node as the allocator sees it for one request."""

    node_id: str
    name: str
    """As people call it; the id where names are missing or not unique."""
    friendly_name: str
    level: node_pb2.PressureLevel.ValueType
    left_out: model_pb2.Exclusion.ValueType | None
    """Why it is not even weighed."""
    ram_total_bytes: int | None
    available_bytes: int | None
    promised_bytes: int
    overhead_bytes: int
    device_limit_bytes: int | None
    overridden: bool
    """What is available is an operator's figure, which says what it says whatever is freed."""
    device_room_bytes: int | None
    """What the device's limit and others on it leave beside the shards that are there."""
    device_free_bytes: int | None
    """What others leave of a card's own memory; None where the runner computes in the node's RAM."""
    budget_bytes: int | None
    """What a shard may take; None when unknown."""
    tenths: int
    """The factor of pressure, in tenths."""
    layers_max: int
    """The most layers it could hold between two others."""
    demand: Demand | None
    """None without a runner: how it would hold a model is not known."""

    @property
    def exclusion(self) -> model_pb2.Exclusion.ValueType | None:
        """Why it gets nothing; None when it may get layers, if only one."""
        if self.left_out is None and not self.layers_max:
            return model_pb2.EXCLUSION_TOO_SMALL
        return self.left_out

    def message(self, *, layers: int = 0) -> model_pb2.NodeBudget:
        """The budget as it is stored and shown, with the `layers` the node got."""
        return model_pb2.NodeBudget(
            node_id=self.node_id,
            friendly_name=self.friendly_name or None,
            pressure_level=self.level,
            exclusion=self.exclusion,
            ram_total_bytes=self.ram_total_bytes,
            available_bytes=self.available_bytes,
            promised_bytes=self.promised_bytes,
            overhead_bytes=self.overhead_bytes,
            device_limit_bytes=self.device_limit_bytes,
            device_free_bytes=self.device_free_bytes,
            budget_bytes=self.budget_bytes,
            pressure_factor=self.tenths / WHOLE_TENTHS,
            layers_max=self.layers_max,
            layers=layers,
        )


class Credit(NamedTuple):
    """What the shards of a replaced instance count for, by node."""

    settled: Ints
    unsettled: Ints
    held: Ints


@dataclass(frozen=True, eq=False)
class Budgets:
    """All nodes for one request, in one light: columns to search in, and each node by itself to speak of."""

    survey: Survey
    request: Request
    silent_node_ids: Collection[str]
    view: View = AS_THEY_ARE

    def __len__(self) -> int:
        return len(self.survey.node_ids)

    def of(self, rows: Sequence[int]) -> list[Budget]:
        """The budgets of the nodes in `rows`, made of each column at once."""
        survey, room_known = self.survey, self.available.known
        free = Known(np.maximum(0, survey.device_free.bytes), survey.device_free.known)
        columns = zip(
            [survey.node_ids[row] for row in rows],
            [survey.names[row] for row in rows],
            [survey.friendly_names[row] for row in rows],
            survey.levels[rows].tolist(),
            [left_out or None for left_out in self.left_out[rows].tolist()],
            _figures(survey.ram_total, rows),
            _figures(self.available, rows),
            self.promised_bytes[rows].tolist(),
            survey.overhead_bytes[rows].tolist(),
            _figures(survey.device_limit, rows),
            survey.overridden[rows].tolist(),
            _figures(Known(self.device_room_bytes, self._on_device), rows),
            _figures(free, rows),
            _figures(Known(self.room_bytes, room_known), rows),
            self.tenths[rows].tolist(),
            self.layers_max[rows].tolist(),
            [self.demands[form] if form >= 0 else None for form in survey.form[rows].tolist()],
            strict=True,
        )
        return list(map(Budget._make, columns))

    @cached_property
    def weighed(self) -> Ints:
        """The rows of the nodes that are not left out, even if they are too small."""
        return np.flatnonzero(self.left_out == 0)

    @cached_property
    def able(self) -> Ints:
        """The rows of the nodes that may get layers, if only one."""
        return np.flatnonzero(self.is_able)

    @cached_property
    def is_able(self) -> Bools:
        """Which rows these are."""
        is_able: Bools = (self.left_out == 0) & (self.layers_max > 0)
        return is_able

    def named_among(self, rows: Ints) -> Ints:
        """Those of `rows` that must get layers."""
        return rows[self._named(self.request.wanted)[rows]]

    def row(self, node_id: str) -> int:
        """The row of a node that is there."""
        return self.survey.rows[node_id]

    @cached_property
    def demands(self) -> list[Demand]:
        """The demand on nodes of each form, worked out once for all of them."""
        request = self.request
        return [self.survey.demands.of(request.model, form, request.load) for form in self.survey.forms]

    @cached_property
    def speeds(self) -> Floats:
        """Bytes read in a second, weighed by pressure; not a number where it is not known."""
        return self.survey.bytes_per_second * self.tenths / WHOLE_TENTHS

    @cached_property
    def tenths(self) -> Ints:
        """The factor of pressure, in tenths."""
        levels = self.survey.levels
        tenths = np.where(levels == node_pb2.PRESSURE_LEVEL_NORMAL, WHOLE_TENTHS, 0)
        tenths[levels == node_pb2.PRESSURE_LEVEL_WARNING] = self.request.warning_tenths
        if self.request.include_unknown:
            tenths[levels == node_pb2.PRESSURE_LEVEL_UNKNOWN] = WHOLE_TENTHS
        return tenths

    @cached_property
    def available(self) -> Known:
        """What the nodes say they can give under the request's admission, never more than they have."""
        survey, request = self.survey, self.request
        estimate, total = survey.estimates[request.admission], survey.ram_total
        known, figures = estimate.known, estimate.bytes
        if request.include_unknown or self.view.lifted:
            figures = np.where(known, figures, total.bytes)
            known = known | total.known
        figures = np.where(total.known, np.minimum(figures, total.bytes), figures)
        # The latest reading shows the bytes of what is replaced as taken, and replacing it gives them back.
        return Known(figures + np.where(survey.overridden, 0, self._credited.settled), known)

    @cached_property
    def promised_bytes(self) -> Ints:
        """Promised to other instances and not yet resident."""
        if self.view.without_promises:
            return np.zeros(len(self), dtype=np.int64)
        credited = np.where(self.survey.overridden, self._credited.held, self._credited.unsettled)
        return np.maximum(0, self.survey.promised_bytes - credited)

    @cached_property
    def device_room_bytes(self) -> Ints:
        """What the device's limit and others on it leave beside the shards there; everything where nothing is known."""
        limit, free, credited = self.survey.device_limit, self.survey.device_free, self._credited.held
        within = np.where(limit.known, limit.bytes - (self.survey.held_bytes - credited), ROOM_BYTES_MAX)
        left = np.where(free.known, free.bytes + credited, ROOM_BYTES_MAX)
        return np.maximum(0, np.minimum(within, left))

    @cached_property
    def room_bytes(self) -> Ints:
        """What a shard may take; 0 where that is not known."""
        return np.where(self.available.known, self.room_with(0), 0)

    def room_with(self, more_bytes: int) -> Ints:
        """The same if `more_bytes` more were available on each."""
        offered = self.available.bytes + min(more_bytes, ROOM_BYTES_MAX)
        if self.strict:
            offered = offered * self.tenths // WHOLE_TENTHS
        offered = offered - self.promised_bytes - self.survey.overhead_bytes
        return np.maximum(0, np.minimum(offered, self.device_room_bytes))

    @property
    def strict(self) -> bool:
        """The factor of pressure counts against the room, not only the weight."""
        return self.request.admission == model_pb2.ADMISSION_STRICT

    @cached_property
    def _on_device(self) -> Bools:
        """Where something is known of what the device leaves."""
        on_device: Bools = self.survey.device_limit.known | self.survey.device_free.known
        return on_device

    @cached_property
    def weights(self) -> Ints:
        """What the nodes' shares are in proportion to."""
        return self.weights_of(self.room_bytes)

    def weights_of(self, rooms: Ints) -> Ints:
        """The same for rooms other than their own. Under STRICT the factor is in them already."""
        return rooms if self.strict else rooms * self.tenths // WHOLE_TENTHS

    @cached_property
    def layers_max(self) -> Ints:
        """The most layers each could hold between two others."""
        most = np.zeros(len(self), dtype=np.int64)
        for index, needs in enumerate(self.demands):
            rows = self.survey.form == index
            most[rows] = np.maximum(0, np.searchsorted(needs.inner_bytes, self.room_bytes[rows], side="right") - 1)
        return most

    @cached_property
    def left_out(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Why each node is not weighed, the weightiest reason of all; 0 where it is."""
        survey, request = self.survey, self.request
        levels = survey.levels
        silent = self._named(self.silent_node_ids)
        # A runner that lacks the model's files fetches its part of them from one that has them and is heard.
        # A model without files is asked for to see where it would go: nobody has it, and nobody needs to.
        absent = ~survey.has_model & ~((survey.has_model & ~silent).any() | request.model.computed_from_config)
        unknown = (levels == node_pb2.PRESSURE_LEVEL_UNKNOWN) & (not request.include_unknown)
        reasons = (
            (self._named(request.excluded), model_pb2.EXCLUSION_REQUESTED),
            (survey.form < 0, model_pb2.EXCLUSION_NO_RUNNER),
            (silent, model_pb2.EXCLUSION_STALE),
            (levels == node_pb2.PRESSURE_LEVEL_CRITICAL, model_pb2.EXCLUSION_CRITICAL),
            (~self.available.known, model_pb2.EXCLUSION_NO_MEMORY_READING),
            (unknown, model_pb2.EXCLUSION_UNKNOWN_LEVEL),
            (absent, model_pb2.EXCLUSION_MODEL_ABSENT),
        )
        left_out = np.zeros(len(self), dtype=np.int64)
        for holds, reason in reversed(reasons):
            if reason in _NEVER_LIFTED or not self.view.lifted:
                left_out[holds] = reason
        if self.survey.blocked and not (self.view.every_way or self.view.with_cut_off):
            left_out[self._cut_off(np.flatnonzero(left_out == 0))] = model_pb2.EXCLUSION_UNREACHABLE
        return left_out

    def candidates(self, rows: Collection[int], rooms: Ints, *, timed: bool) -> tuple[Candidate, ...]:
        """Nodes for the search, with these rooms; their speeds only where times are to be reckoned."""
        weights = self.weights_of(rooms)
        names = self.survey.node_ids
        return tuple(
            Candidate(
                node_id=names[row],
                demand=self.demands[int(self.survey.form[row])],
                room_bytes=int(rooms[row]),
                weight=int(weights[row]),
                bytes_per_second=float(self.speeds[row]) if timed else None,
                flops_per_second=self._flops(row) if timed else None,
                layers_fixed=self.request.layers_fixed.get(names[row]),
                required=names[row] in self.request.required,
            )
            for row in rows
        )

    def _flops(self, row: int) -> float | None:
        flops = float(self.survey.flops_per_second[row]) * int(self.tenths[row]) / WHOLE_TENTHS
        return flops if self.request.load.prompt_tokens and not np.isnan(flops) else None

    def _cut_off(self, rows: Ints) -> list[int]:
        """Those of `rows` that reach none of the others, or are reached by none, and are too small alone."""
        names = {self.survey.node_ids[row] for row in rows.tolist()}
        onward = {row: self.survey.blocked.get(row, frozenset()) & names for row in rows.tolist()}
        missed_by = Counter(node_id for missed in onward.values() for node_id in missed)
        others = len(rows) - 1
        return [
            row
            for row, missed in onward.items()
            if others
            and max(len(missed), missed_by[self.survey.node_ids[row]]) >= others
            and self.demands[int(self.survey.form[row])].alone_bytes > self.room_bytes[row]
        ]

    def _named(self, node_ids: Collection[str]) -> Bools:
        named = np.zeros(len(self), dtype=np.bool_)
        named[[self.survey.rows[node_id] for node_id in node_ids if node_id in self.survey.rows]] = True
        return named

    @cached_property
    def _credited(self) -> Credit:
        """What replacing an instance gives back, by node."""
        credit = Credit(*(np.zeros(len(self), dtype=np.int64) for _ in range(3)))
        replaced = self.request.replaced_instance_id
        for row, shards in self.survey.shards.items() if replaced else ():
            for shard in shards:
                if shard.instance_id == replaced:
                    credit.settled[row] += shard.settled_bytes
                    credit.unsettled[row] += shard.unsettled_bytes
                    credit.held[row] += shard.held_bytes
        return credit


def _figures(column: Known, rows: Sequence[int]) -> list[int | None]:
    known = column.known[rows].tolist()
    return [figure if said else None for figure, said in zip(column.bytes[rows].tolist(), known, strict=True)]
