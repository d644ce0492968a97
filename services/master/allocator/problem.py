"""What the search is given: who may get layers, how many of them shall, and the ways between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from services.master.allocator.demand import least_bytes
from services.master.allocator.hops import Hops
from services.master.allocator.ranges import Candidate

STEPS_MAX: Final = 400_000
"""After so many steps of a few microseconds each a search is given up: no decision takes many seconds."""

QUESTION_STEPS_MAX: Final = 3000
"""The same for one of some tens of questions that a single answer takes."""

Members = tuple[int, ...]
"""Indices of candidates."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Who may get layers, and how many of them shall."""

    candidates: tuple[Candidate, ...]
    """In the order in which they are preferred."""
    hops: Hops
    nodes_min: int = 1
    nodes_max: int | None = None
    holding: Members | None = None
    """An order that was found to hold the model, where one was looked for."""
    steps_max: int = STEPS_MAX
    """How long an order is looked for."""

    @property
    def layers(self) -> int:
        """How many layers are to be placed; 0 without candidates."""
        return self.candidates[0].layers if self.candidates else 0

    @property
    def size_min(self) -> int:
        """The fewest nodes that respect the request."""
        return max(1, self.nodes_min, len(self.required))

    @property
    def size_max(self) -> int:
        """The most nodes that respect the request and get a layer each."""
        most = min(len(self.candidates), self.layers)
        return most if self.nodes_max is None else min(most, self.nodes_max)

    @property
    def speeds_known(self) -> bool:
        """Every candidate's speed is known: a guess would send layers to whoever says nothing."""
        return all(candidate.bytes_per_second for candidate in self.candidates)

    @cached_property
    def required(self) -> Members:
        """The candidates that must get layers."""
        return tuple(i for i, candidate in enumerate(self.candidates) if candidate.must)

    @cached_property
    def least_bytes(self) -> int:
        """No set of nodes takes less."""
        return least_bytes(candidate.demand for candidate in self.candidates)

    def among(self, members: Sequence[int]) -> Problem:
        """The same for some of the candidates, in the order given."""
        candidates = tuple(self.candidates[i] for i in members)
        return replace(self, candidates=candidates, hops=self.hops.among(members), holding=None)
