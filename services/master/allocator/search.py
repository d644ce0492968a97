"""Who gets which layers: the best arrangement under an objective, and what came close.

Rules this module lives by:
- It answers whenever `fits` says yes, and `fits` does not depend on the objective: wishes choose, they never refuse.
- Speeds count only when they are known for every candidate: a guess would send layers to whoever says nothing.
- Deterministic: nodes are preferred by weight, then by id, never by when they joined.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import Final

from services.master.allocator.arrangement import EXACT_NODES_MAX, Arrangements, Members, Problem
from services.master.allocator.cuts import cut, share_cost, stage_seconds, time_cost
from services.master.allocator.ranges import Candidate
from ullage.v1 import model_pb2

HOP_SECONDS: Final = 0.001
"""From one rank to the next where no link was measured: what a hop may cost on a local network."""

RUNNERS_UP_MAX: Final = 3

SETS_CUT_MAX: Final = 4
"""How many sets are cut exactly after all were ranked by an estimate, which is within some per cent of it."""

LinkSeconds = Mapping[tuple[str, str], float]
"""The measured latency from one node to another."""


@dataclass(frozen=True)
class Solution:
    """Nodes in order, each with the end of its layers."""

    order: tuple[Candidate, ...]
    ends: tuple[int, ...]
    seconds_per_token: float | None
    """Predicted; None where a speed is unknown."""
    bottleneck_seconds: float | None
    """The longest time a token spends on one rank or link."""

    @property
    def weight(self) -> int:
        """The weighted memory of its nodes."""
        return sum(candidate.weight for candidate in self.order)


def fits(problem: Problem) -> bool:
    """Some arrangement of the candidates holds the model."""
    arrangements = Arrangements(_by_weight(problem))
    sizes = range(problem.size_min, min(problem.size_max, EXACT_NODES_MAX) + 1)
    if any(next(arrangements.sets(size), None) for size in sizes):
        return True
    return arrangements.chain(most=False) is not None


def solve(
    problem: Problem, objective: model_pb2.Objective.ValueType, link_seconds: LinkSeconds
) -> tuple[Solution, ...]:
    """The best arrangement, then runners-up; empty when the model does not fit."""
    speeds_known = all(candidate.bytes_per_second for candidate in problem.candidates)
    match objective:
        case model_pb2.OBJECTIVE_FEWEST_NODES:
            return _fewest(problem, link_seconds, timed=speeds_known)
        case model_pb2.OBJECTIVE_PROPORTIONAL:
            return _widest(problem, link_seconds)
        case model_pb2.OBJECTIVE_THROUGHPUT:
            if speeds_known:
                return _fastest(problem, link_seconds, throughput=True)
            return _widest(problem, link_seconds)
        case _:
            if speeds_known:
                return _fastest(problem, link_seconds, throughput=False)
            return _fewest(problem, link_seconds, timed=False)


def _fewest(problem: Problem, link_seconds: LinkSeconds, *, timed: bool) -> tuple[Solution, ...]:
    """The smallest sets, the weightiest first or, when `timed`, the fastest."""
    arrangements = Arrangements(_by_weight(problem))
    for size in range(problem.size_min, min(problem.size_max, EXACT_NODES_MAX) + 1):
        sets = list(islice(arrangements.sets(size), None if timed else RUNNERS_UP_MAX + 1))
        if timed and sets:
            return _ranked_by_time(arrangements, sets, link_seconds, throughput=False)
        if sets:
            return tuple(_shared(arrangements, arrangements.order(members), link_seconds) for members in sets)
    found = arrangements.chain(most=False)
    return (_shared(arrangements, found, link_seconds),) if found else ()


def _widest(problem: Problem, link_seconds: LinkSeconds) -> tuple[Solution, ...]:
    """Over as many nodes as can hold a layer each, in shares of their weight."""
    arrangements = Arrangements(_by_weight(problem))
    found = arrangements.chain(most=True)
    if found:
        return (_shared(arrangements, found, link_seconds),)
    sizes = range(min(problem.size_max, EXACT_NODES_MAX), problem.size_min - 1, -1)
    sets = islice(chain.from_iterable(map(arrangements.sets, sizes)), RUNNERS_UP_MAX + 1)
    return tuple(_shared(arrangements, arrangements.order(members), link_seconds) for members in sets)


def _fastest(problem: Problem, link_seconds: LinkSeconds, *, throughput: bool) -> tuple[Solution, ...]:
    """The least predicted time per token or, for `throughput`, the shortest bottleneck."""
    arrangements = Arrangements(_by_speed_and_room(problem))
    sizes = range(problem.size_min, min(problem.size_max, EXACT_NODES_MAX) + 1)
    sets = list(chain.from_iterable(map(arrangements.sets, sizes)))
    if sets:
        return _ranked_by_time(arrangements, sets, link_seconds, throughput=throughput)
    return _fewest(problem, link_seconds, timed=False)


def _ranked_by_time(
    arrangements: Arrangements, sets: Sequence[Members], link_seconds: LinkSeconds, *, throughput: bool
) -> tuple[Solution, ...]:
    estimated = sorted(sets, key=lambda members: (_estimate(arrangements, members, throughput=throughput), members))
    solutions = [
        _timed(arrangements, members, link_seconds, throughput=throughput) for members in estimated[:SETS_CUT_MAX]
    ]

    def rank(solution: Solution) -> tuple[float, float, int]:
        seconds, bottleneck = solution.seconds_per_token or 0.0, solution.bottleneck_seconds or 0.0
        first, second = (bottleneck, seconds) if throughput else (seconds, bottleneck)
        return first, second, -solution.weight

    return tuple(sorted(solutions, key=rank)[: RUNNERS_UP_MAX + 1])


def _estimate(arrangements: Arrangements, members: Members, *, throughput: bool) -> float:
    """About the seconds a token takes on these nodes: the fastest are filled first, layers taken as divisible."""
    candidates = sorted((arrangements.candidates[i] for i in members), key=lambda each: -(each.bytes_per_second or 0.0))
    whole = [stage_seconds(candidate, 0, candidate.layers) for candidate in candidates]
    least = 1 / candidates[0].layers
    if throughput:
        return 1 / sum(1 / seconds for seconds in whole)
    left, total = 1.0, HOP_SECONDS * len(members) if len(members) > 1 else 0.0
    for place, (candidate, seconds) in enumerate(zip(candidates, whole, strict=True)):
        most = min(candidate.room_bytes / candidate.demand.layer_sums[-1], left - least * (len(members) - 1 - place))
        part = max(least, most)
        total += part * seconds
        left -= part
    return total


def _shared(arrangements: Arrangements, order: Members, link_seconds: LinkSeconds) -> Solution:
    candidates = tuple(arrangements.candidates[i] for i in order)
    return _solution(candidates, cut(candidates, share_cost(candidates), operator.add), link_seconds)


def _timed(arrangements: Arrangements, members: Members, link_seconds: LinkSeconds, *, throughput: bool) -> Solution:
    candidates = tuple(arrangements.candidates[i] for i in arrangements.order(members))
    ends = cut(candidates, time_cost(candidates), max if throughput else operator.add)
    return _solution(candidates, ends, link_seconds)


def _solution(order: tuple[Candidate, ...], ends: tuple[int, ...], link_seconds: LinkSeconds) -> Solution:
    if not all(candidate.bytes_per_second for candidate in order):
        return Solution(order, ends, None, None)
    stages = [
        stage_seconds(candidate, start, end) for candidate, start, end in zip(order, (0, *ends[:-1]), ends, strict=True)
    ]
    hops = _hops(order, link_seconds)
    return Solution(order, ends, sum(stages) + sum(hops), max(*stages, *hops, 0.0))


def _hops(order: Sequence[Candidate], link_seconds: LinkSeconds) -> list[float]:
    """The way from each rank to the next, and of the sampled token from the last to the first."""
    if len(order) == 1:
        return []
    ring = zip(order, (*order[1:], order[0]), strict=True)
    return [link_seconds.get((sender.node_id, receiver.node_id), HOP_SECONDS) for sender, receiver in ring]


def _by_weight(problem: Problem) -> Problem:
    return replace(problem, candidates=tuple(sorted(problem.candidates, key=lambda each: (-each.weight, each.node_id))))


def _by_speed_and_room(problem: Problem) -> Problem:
    """The fastest, the roomiest, the second fastest, …: the few that are looked at hold both kinds."""
    fast = sorted(problem.candidates, key=lambda each: (-(each.bytes_per_second or 0.0), each.node_id))
    roomy = sorted(problem.candidates, key=lambda each: (-each.room_bytes, each.node_id))
    mixed = {each.node_id: each for pair in zip_longest(fast, roomy) for each in pair if each is not None}
    return replace(problem, candidates=tuple(mixed.values()))
