"""The allocator's figures: how long a decision takes as clusters grow, placements one after the other, and the gap.

A decision is what the master does for Place but for the log: it takes over what changed since the last one, decides,
and writes the answer. It runs in one thread and waits for nothing, so what is measured is its processor time: the
time it takes on a machine that does nothing else. Where nodes are "all changed", every one has spoken since the last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from benchmarks import placement_gap
from benchmarks.random_clusters import MODEL_ID, fleet, large_model, site_ways, state_of
from benchmarks.row import Row
from services.master.allocator import Roster, decide, understand
from services.master.state import State, apply
from ullage.v1 import event_pb2, model_pb2

SIZES: Final = (10, 100, 1_000, 10_000)
TARGETS_MS: Final = {10: 8.0, 100: 8.0, 1_000: 8.0, 10_000: 15.0}
TAIL: Final = 2.0
"""How much longer one decision in twenty may take."""
ROUNDS: Final = 40
SEQUENTIAL: Final = 300
LINKED_NODES: Final = 1_000
SITE_NODES: Final = 50
GAP_INSTANCES: Final = 60
SEED: Final = 1

SPEC: Final = model_pb2.PlacementSpec(model_id=MODEL_ID, context_tokens=8192)


def rows() -> Iterator[Row]:
    """All rows of the section."""
    medians = {}
    for count in SIZES:
        medians[count], tail = _latency(state_of(fleet(count, SEED), [], large_model()))
        target = TARGETS_MS[count]
        yield Row("placement", f"Place, {count:,} nodes, p50", medians[count], "ms", "lower", target)
        yield Row("placement", f"Place, {count:,} nodes, p95", tail, "ms", "lower", target * TAIL)
    growth = medians[10_000], medians[1_000]
    yield Row("placement", "ten times the nodes", growth[0], "ms", "lower", 4.0, growth[1], "Place, 1,000 nodes")
    machines = fleet(LINKED_NODES, SEED)
    linked, _ = _latency(state_of(machines, site_ways(machines, SITE_NODES, SEED), large_model()))
    yield Row("placement", "Place, 1,000 nodes with measured links, p50", linked, "ms", "lower", 16.0)
    for count, target in ((1_000, 40.0), (10_000, 400.0)):
        yield Row("placement", f"Place, {count:,} nodes all changed, p50", _cold(count), "ms", "lower", target)
    yield Row("placement", "refusal with its proof, 1,000 nodes, p50", _refusal(1_000), "ms", "lower", 100.0)
    yield from sequential_rows()
    yield from gap_rows()


def _decide(roster: Roster) -> model_pb2.Placement | model_pb2.Refusal:
    return decide(roster.survey(MODEL_ID), understand(roster.state, SPEC), SPEC, frozenset())


def _quantiles_ms(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The median and the 95th percentile of so many rounds, after one."""
    work()
    taken = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        taken.append((time.thread_time() - began) * 1000)
    taken.sort()
    return taken[len(taken) // 2], taken[int(len(taken) * 0.95)]


def _latency(state: State) -> tuple[float, float]:
    roster = Roster(state)
    return _quantiles_ms(lambda: _decide(roster), ROUNDS)


def _cold(count: int) -> float:
    state = state_of(fleet(count, SEED), [], large_model())
    return _quantiles_ms(lambda: _decide(Roster(state)), 5)[0]


def _refusal(count: int) -> float:
    """Many nodes that cannot hold the model together."""
    poor = [replace(machine, available_bytes=machine.available_bytes // 2000) for machine in fleet(count, SEED)]
    roster = Roster(state_of(poor, [], large_model()))
    return _quantiles_ms(lambda: _decide(roster), 5)[0]


def sequential_rows() -> Iterator[Row]:
    """Placements one after the other on a thousand nodes, each of which reserves what the next cannot have."""
    state = state_of(fleet(1_000, SEED), [], large_model())
    roster, began, placed = Roster(state), time.thread_time(), 0
    for number in range(SEQUENTIAL):
        outcome = _decide(roster)
        if isinstance(outcome, model_pb2.Placement):
            placed += 1
            fact = event_pb2.InstancePlaced(instance_id=f"i{number}", spec=SPEC, placement=outcome)
            event = event_pb2.RecordedEvent(sequence=state.sequence + 1, fact=event_pb2.Fact(instance_placed=fact))
            apply(state, event)
    rate = SEQUENTIAL / (time.thread_time() - began)
    over = sum(
        record.promised_bytes > record.memory.balanced_available_bytes
        for record in state.nodes.values()
        if record.memory is not None
    )
    yield Row(
        "placement", f"placements in a row, 1,000 nodes, {placed} of {SEQUENTIAL} placed", rate, "/s", "higher", 100.0
    )
    yield Row("placement", "nodes over-committed by them", float(over), "nodes", "lower", 0.0)


def gap_rows() -> Iterator[Row]:
    """Against an exact solver; `python -m benchmarks.placement_gap` takes more instances."""
    tally = placement_gap.measure(SEED, GAP_INSTANCES)
    yield Row("placement", f"optimal, of {len(tally.gaps)} random instances", tally.optimal, "", "higher", 0.99)
    yield Row("placement", "largest gap to HiGHS", tally.gap_max, "", "lower", 0.03)
    wrong = float(tally.false_accepts + tally.false_refusals)
    yield Row("placement", "false accepts and refusals", wrong, "", "lower", 0.0)
