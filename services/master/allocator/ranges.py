"""Which ranges of layers a node can hold, as sets of boundaries between layers.

Boundary p lies before layer p; boundary L is the end. A set of boundaries is an int with bit p set for p: with
non-uniform layers what can be reached need not be an interval, and ints make the exact answer cheap.

Rules this module lives by:
- A node that is used holds at least one layer.
- More room never takes a range away, so more memory never makes a set smaller.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from services.master.allocator.demand import Demand, Sums

INT64_MAX: Final = 2**63 - 1
"""Sums beyond this are searched as Python's own numbers: only absurd models get there."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A node that may get layers."""

    node_id: str
    demand: Demand
    room_bytes: int
    """What a shard may take, its process's overhead already subtracted."""
    weight: int
    """What its share is in proportion to: its room, weighed by pressure."""
    bytes_per_second: float | None = None
    """How fast it reads while decoding, weighed by pressure; None when unknown."""
    flops_per_second: float | None = None
    """How fast it computes while it takes in a prompt, weighed by pressure; None when unknown."""
    layers_fixed: int | None = None
    required: bool = False

    @cached_property
    def layers(self) -> int:
        """How many layers the model has."""
        return self.demand.layers

    @property
    def must(self) -> bool:
        """The request names it: no placement goes without it."""
        return self.required or self.layers_fixed is not None

    @cached_property
    def alone(self) -> bool:
        """It can hold the whole model."""
        return self.layers_fixed in {None, self.layers} and self.demand.alone_bytes <= self.room_bytes

    @cached_property
    def first_high(self) -> int:
        """The last boundary where it can end as the first of several; below `first_low` when there is none."""
        farthest = bisect_right(self.demand.layer_sums, self.room_bytes - self.demand.first_bytes) - 1
        farthest = min(farthest, self.layers - 1)
        return farthest if self.layers_fixed is None else min(farthest, self.layers_fixed)

    @property
    def first_low(self) -> int:
        """The first such boundary."""
        return 1 if self.layers_fixed is None else self.layers_fixed

    @cached_property
    def last_low(self) -> int:
        """The first boundary where it can start as the last of several; above `last_high` when there is none."""
        sums = self.demand.layer_sums
        nearest = max(1, bisect_left(sums, sums[-1] - (self.room_bytes - self.demand.last_bytes)))
        return nearest if self.layers_fixed is None else max(nearest, self.layers - self.layers_fixed)

    @property
    def last_high(self) -> int:
        """The last such boundary."""
        return self.layers - (1 if self.layers_fixed is None else self.layers_fixed)

    @property
    def first_ends(self) -> int:
        """Where it can end as the first of several."""
        return _ones(self.first_low, self.first_high)

    @property
    def last_starts(self) -> int:
        """Where it can start as the last of several."""
        return _ones(self.last_low, self.last_high)

    @cached_property
    def second_sums(self) -> Sums:
        """The seconds that the first i layers take for a token, with their part of the prompt where that counts.

        For candidates whose speed is known.
        """
        seconds = self.demand.read_array / (self.bytes_per_second or np.nan)
        if self.flops_per_second:
            seconds = seconds + self.demand.prompt_flops / self.flops_per_second
        return seconds

    @cached_property
    def head_seconds(self) -> float:
        """What the last rank takes for a token besides its layers."""
        return self.demand.head_read_bytes / (self.bytes_per_second or float("nan"))

    def ends_from(self, starts: int) -> int:
        """Where it can end between two others, starting at any of `starts`."""
        inner = _ones(1, self.layers - 1)
        if self.layers_fixed is not None:
            return (starts & self._fixed_starts) << self.layers_fixed & inner
        starts &= self._starts
        ends = 0
        while starts:
            # Neighbouring starts reach one range of ends together, since farthest never falls.
            low = (starts & -starts).bit_length() - 1
            run = starts >> low
            high = low + (run ^ (run + 1)).bit_length() - 2
            ends |= _ones(low + 1, self.farthest[high])
            starts = starts >> (high + 1) << (high + 1)
        return ends & inner

    def starts_to(self, ends: int, starts: int) -> int:
        """Those of `starts` from which, between two others, it can end at one of `ends`."""
        return sum(1 << start for start in boundaries(starts) if self.ends_from(1 << start) & ends)

    @cached_property
    def most_layers(self) -> int:
        """The most layers it could hold between two others."""
        room = self.room_bytes - self.demand.working_bytes
        most = max(0, bisect_right(self.demand.least_window_bytes, room) - 1)
        if self.layers_fixed is None:
            return most
        return self.layers_fixed if self.layers_fixed <= most else 0

    @property
    def of_use(self) -> bool:
        """There are layers it can hold, alone or in some place among others."""
        inner = _ones(1, self.layers - 1)
        return bool(self.alone or self.first_ends or self.last_starts or self.ends_from(inner))

    @cached_property
    def farthest(self) -> tuple[int, ...]:
        """For each start the end of the longest range that fits between two others."""
        sums = self.demand.layer_sums
        # However far below nothing the room is, it holds no layer.
        room = max(-1, self.room_bytes - self.demand.working_bytes)
        if sums[-1] + room <= INT64_MAX:
            reached = np.searchsorted(self.demand.layer_ints, self.demand.layer_ints[:-1] + room, side="right") - 1
            return tuple(np.maximum(reached, np.arange(self.layers)).tolist())
        return tuple(max(start, bisect_right(sums, sums[start] + room) - 1) for start in range(self.layers))

    @cached_property
    def _starts(self) -> int:
        """Where it can hold the layer that follows."""
        return sum(1 << start for start, end in enumerate(self.farthest) if end > start)

    @cached_property
    def _fixed_starts(self) -> int:
        fixed = self.layers_fixed or 0
        return sum(1 << start for start, end in enumerate(self.farthest) if end - start >= fixed > 0)


def boundaries(bits: int) -> Iterator[int]:
    """The boundaries in a set, in order."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def _ones(first: int, last: int) -> int:
    """The set of the boundaries from `first` to `last`, both included; empty when there are none."""
    return (1 << (last + 1)) - (1 << first) if first <= last else 0
