"""What each node could give to a shard, or why it gives nothing.

Rules this module lives by:
- Available is what the estimate the request trusts says; what is promised to others and not yet resident is
  subtracted from it, and the runner's process before it holds any layer. The device's limit holds in any case.
- Under WARNING a node's weight is 0.6 of its room; its room is whole, except where the request is STRICT.
- A node that is CRITICAL, silent, or of which something is unknown gets nothing unless that is asked for by name.
- Nothing is guessed: a figure that is not there stays absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from services.master.allocator.demand import Demand, Form, demand, form_of
from services.master.allocator.ranges import Candidate
from services.master.allocator.request import Request
from services.master.state import NodeRecord, ShardRecord, State
from ullage.v1 import model_pb2, node_pb2

WARNING_TENTHS: Final = 6
"""The weight of a node under WARNING, in tenths: work flows to healthier nodes."""

_LEVELS: Final = frozenset(
    {node_pb2.PRESSURE_LEVEL_NORMAL, node_pb2.PRESSURE_LEVEL_WARNING, node_pb2.PRESSURE_LEVEL_CRITICAL}
)

_NEVER_LIFTED: Final = frozenset({model_pb2.EXCLUSION_REQUESTED, model_pb2.EXCLUSION_NO_RUNNER})


@dataclass(frozen=True)
class View:
    """Under which light the nodes are looked at: as they are, or as they would be if."""

    lifted: bool = False
    """Use nodes that would be left out, as a forced request does."""
    without_promises: bool = False


AS_THEY_ARE: Final = View()


@dataclass(frozen=True, eq=False)
class Budget:
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
    device_room_bytes: int | None
    """What the device's limit leaves beside the shards that are there."""
    tenths: int
    """The factor of pressure, in tenths."""
    strict: bool
    demand: Demand | None
    """None without a runner: how it would hold a model is not known."""
    decode_bytes_per_second: int | None
    layers_fixed: int | None
    required: bool

    @property
    def budget_bytes(self) -> int | None:
        """What a shard may take, None when unknown."""
        return self.room_bytes()

    def room_bytes(self, *, more_bytes: int = 0) -> int | None:
        """What a shard may take if `more_bytes` more were available."""
        if self.available_bytes is None:
            return None
        offered = self.available_bytes + more_bytes
        if self.strict:
            offered = offered * self.tenths // 10
        room = offered - self.promised_bytes - self.overhead_bytes
        if self.device_room_bytes is not None:
            room = min(room, self.device_room_bytes)
        return max(0, room)

    @property
    def exclusion(self) -> model_pb2.Exclusion.ValueType | None:
        """Why it gets nothing; None when it may get layers, if only one."""
        if self.left_out is None and not self.layers_max:
            return model_pb2.EXCLUSION_TOO_SMALL
        return self.left_out

    @cached_property
    def layers_max(self) -> int:
        """The most layers it could hold between two others."""
        return 0 if self.budget_bytes is None or self.demand is None else self.candidate().most_layers

    def candidate(self, *, more_bytes: int = 0, room_bytes: int | None = None) -> Candidate:
        """The node for the search, with its own room or with `room_bytes`."""
        if self.demand is None:
            raise ValueError(f"{self.node_id} has no runner")
        room = room_bytes if room_bytes is not None else self.room_bytes(more_bytes=more_bytes) or 0
        speed = self.decode_bytes_per_second
        return Candidate(
            node_id=self.node_id,
            demand=self.demand,
            room_bytes=room,
            # Under STRICT the factor is in the room already.
            weight=room if self.strict else room * self.tenths // 10,
            bytes_per_second=speed * self.tenths / 10 if speed else None,
            layers_fixed=self.layers_fixed,
            required=self.required,
        )

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
            budget_bytes=self.budget_bytes,
            pressure_factor=self.tenths / 10,
            layers_max=self.layers_max,
            layers=layers,
        )


def budgets(
    state: State, request: Request, silent_node_ids: Collection[str], view: View = AS_THEY_ARE
) -> tuple[Budget, ...]:
    """The budget of every node, by id."""
    silent = frozenset(silent_node_ids)
    demands: dict[Form, Demand] = {}
    names = _names(state)
    # A runner that lacks the model's files fetches its part of them from one that has them and is heard.
    fetchable = any(
        _has_model(record, request.model.model_id) for id_, record in state.nodes.items() if id_ not in silent
    )
    return tuple(
        _budget(
            state.nodes[node_id],
            request,
            names[node_id],
            demands,
            view,
            silent=node_id in silent,
            fetchable=fetchable,
        )
        for node_id in sorted(state.nodes)
    )


def _budget(
    record: NodeRecord,
    request: Request,
    name: str,
    demands: dict[Form, Demand],
    view: View,
    *,
    silent: bool,
    fetchable: bool,
) -> Budget:
    node_id, memory, runner = record.identity.node_id, record.memory, record.runner
    level = _level(memory)
    credited = [shard for (instance, _), shard in record.shards.items() if instance == request.replaced_instance_id]
    promised = 0 if view.without_promises else record.promised_bytes - _promised(record, credited)
    available = _available(memory, request, view)
    if available is not None and not record.overridden:
        # The latest reading shows these bytes as taken, and replacing the instance gives them back.
        available += sum(shard.settled_bytes for shard in credited)
    device_limit = _device_limit(memory, runner)
    without_model = not fetchable and not _has_model(record, request.model.model_id)
    held = sum(shard.held_bytes for shard in record.shards.values()) - sum(shard.held_bytes for shard in credited)
    return Budget(
        node_id=node_id,
        name=name,
        friendly_name=record.identity.friendly_name,
        level=level,
        left_out=_left_out(
            record, request, level, view, available=available, silent=silent, without_model=without_model
        ),
        ram_total_bytes=_ram_total(memory),
        available_bytes=available,
        promised_bytes=promised,
        overhead_bytes=runner.shard_overhead_bytes if runner is not None else 0,
        device_limit_bytes=device_limit,
        device_room_bytes=None if device_limit is None else max(0, device_limit - held),
        tenths=_tenths(level, request),
        strict=request.admission == model_pb2.ADMISSION_STRICT,
        demand=None if runner is None else _demand(request, form_of(runner), demands),
        decode_bytes_per_second=runner.decode_bytes_per_second if runner is not None else None,
        layers_fixed=request.layers_fixed.get(node_id),
        required=node_id in request.required,
    )


def _demand(request: Request, form: Form, demands: dict[Form, Demand]) -> Demand:
    """The demand on nodes of `form`, worked out once for all of them."""
    if form not in demands:
        demands[form] = demand(request.model, form, request.load)
    return demands[form]


def _promised(record: NodeRecord, shards: Collection[ShardRecord]) -> int:
    """The part these shards have in the node's promised bytes."""
    return sum(shard.held_bytes if record.overridden else shard.unsettled_bytes for shard in shards)


def _left_out(
    record: NodeRecord,
    request: Request,
    level: node_pb2.PressureLevel.ValueType,
    view: View,
    *,
    available: int | None,
    silent: bool,
    without_model: bool,
) -> model_pb2.Exclusion.ValueType | None:
    """Why the node is not weighed, the weightiest reason first; None when it is."""
    checks = (
        (record.identity.node_id in request.excluded, model_pb2.EXCLUSION_REQUESTED),
        (record.runner is None, model_pb2.EXCLUSION_NO_RUNNER),
        (silent, model_pb2.EXCLUSION_STALE),
        (level == node_pb2.PRESSURE_LEVEL_CRITICAL, model_pb2.EXCLUSION_CRITICAL),
        (available is None, model_pb2.EXCLUSION_NO_MEMORY_READING),
        (not request.include_unknown and level not in _LEVELS, model_pb2.EXCLUSION_UNKNOWN_LEVEL),
        (without_model, model_pb2.EXCLUSION_MODEL_ABSENT),
    )
    reason = next((exclusion for holds, exclusion in checks if holds), None)
    return None if view.lifted and reason not in _NEVER_LIFTED else reason


def _has_model(record: NodeRecord, model_id: str) -> bool:
    return record.runner is not None and model_id in record.runner.model_ids


def _level(memory: node_pb2.MemorySample | None) -> node_pb2.PressureLevel.ValueType:
    if memory is None or memory.pressure_level not in _LEVELS:
        return node_pb2.PRESSURE_LEVEL_UNKNOWN
    return memory.pressure_level


def _tenths(level: node_pb2.PressureLevel.ValueType, request: Request) -> int:
    match level:
        case node_pb2.PRESSURE_LEVEL_NORMAL:
            return 10
        case node_pb2.PRESSURE_LEVEL_WARNING:
            return WARNING_TENTHS
        case node_pb2.PRESSURE_LEVEL_UNKNOWN if request.include_unknown:
            return 10
        case _:
            return 0


def _ram_total(memory: node_pb2.MemorySample | None) -> int | None:
    return memory.ram_total_bytes if memory is not None and memory.HasField("ram_total_bytes") else None


def _available(memory: node_pb2.MemorySample | None, request: Request, view: View) -> int | None:
    """What the node says it can give under the request's admission, never more than it has."""
    if memory is None:
        return None
    total = _ram_total(memory)
    known: int | None = None
    match request.admission:
        case model_pb2.ADMISSION_STRICT if memory.HasField("strict_available_bytes"):
            known = memory.strict_available_bytes
        case model_pb2.ADMISSION_BALANCED if memory.HasField("balanced_available_bytes"):
            known = memory.balanced_available_bytes
        case model_pb2.ADMISSION_CEILING if memory.HasField("ceiling_available_bytes"):
            known = memory.ceiling_available_bytes
    if known is None:
        return total if request.include_unknown or view.lifted else None
    return known if total is None else min(known, total)


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


def _names(state: State) -> dict[str, str]:
    """What to call each node: its friendly name, with the id where that alone would not tell it apart."""
    uses = Counter(record.identity.friendly_name for record in state.nodes.values())
    names = {}
    for node_id, record in state.nodes.items():
        name = record.identity.friendly_name
        names[node_id] = node_id if not name else f"{name} ({node_id})" if uses[name] > 1 else name
    return names
