"""Nodes in order with the layers each gets, and the time that is predicted for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.master.allocator.cuts import cut_by_shares, cut_by_time, stage_seconds
from services.master.allocator.problem import Problem
from services.master.allocator.ranges import Candidate


@dataclass(frozen=True)
class Solution:
    """Nodes in order, each with the end of its layers."""

    order: tuple[Candidate, ...]
    ends: tuple[int, ...]
    stage_seconds: tuple[float, ...] | None
    """Of each rank for a token, predicted; None where a speed is unknown."""
    hop_seconds: tuple[float, ...]
    """From each rank to the next, and from the last to the first; none where there is one rank."""

    @property
    def seconds_per_token(self) -> float | None:
        """Predicted; None where a speed is unknown."""
        return None if self.stage_seconds is None else sum(self.stage_seconds) + sum(self.hop_seconds)

    @property
    def bottleneck_seconds(self) -> float | None:
        """The longest time a token spends on one rank or way."""
        return None if self.stage_seconds is None else max(*self.stage_seconds, *self.hop_seconds, 0.0)

    @property
    def weight(self) -> int:
        """The weighted memory of its nodes."""
        return sum(candidate.weight for candidate in self.order)

    @property
    def node_ids(self) -> frozenset[str]:
        """The nodes it uses."""
        return frozenset(candidate.node_id for candidate in self.order)


def solution(problem: Problem, order: Sequence[int], *, timed: bool, bottleneck: bool = False) -> Solution | None:
    """The best cut among nodes that stand in this order; None where it cannot hold the model or has no way."""
    hops = hop_seconds(problem, order)
    if any(seconds == float("inf") for seconds in hops):
        return None
    candidates = tuple(problem.candidates[i] for i in order)
    ends = cut_by_time(candidates, bottleneck=bottleneck) if timed else cut_by_shares(candidates)
    if ends is None:
        return None
    stages = _stages(candidates, ends) if all(each.bytes_per_second for each in candidates) else None
    return Solution(candidates, ends, stages, hops)


def hop_seconds(problem: Problem, order: Sequence[int]) -> tuple[float, ...]:
    """The way from each rank to the next, and of the sampled token from the last to the first."""
    if len(order) == 1:
        return ()
    onward = [float(problem.hops.onward[sender, receiver]) for sender, receiver in pairwise(order)]
    return (*onward, float(problem.hops.back[order[-1], order[0]]))


def _stages(order: Sequence[Candidate], ends: Sequence[int]) -> tuple[float, ...]:
    starts = (0, *ends[:-1])
    return tuple(
        stage_seconds(candidate, start, end) for candidate, start, end in zip(order, starts, ends, strict=True)
    )
