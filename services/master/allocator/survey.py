"""The nodes at one moment, in columns: what a decision looks at, and nothing changes meanwhile.

What is not known is marked as such beside its column; the number there means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from services.master.allocator.demand import Demands, Form
from services.master.allocator.hops import Ways
from services.master.state import InstanceRecord
from ullage.v1 import model_pb2

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
Bools = np.ndarray[tuple[int], np.dtype[np.bool_]]


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

    @classmethod
    def nothing(cls, count: int) -> Known:
        """A column of so many rows that says nothing of any."""
        return cls(np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_))

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
