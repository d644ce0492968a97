"""The allocator's figures: how long a decision takes as clusters grow, placements one after the other, and the gap.

A decision is what the master does for Place but for the log: it asks who is silent, takes over what changed since the
last one, decides, writes the answer and looks at its nodes again. Where nodes are "all changed", every one has spoken
since. Times are those of a clock on the wall: measure on a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import placement_gap
from benchmarks.random_clusters import (
    MODEL_ID,
    SMALL_MODEL_ID,
    fleet,
    large_model,
    site_ways,
    small_model,
    state_of,
    unequal_model,
)
from benchmarks.row import Row
from services.clock import SystemClock
from services.master import cluster as clusters
from services.master.allocator import Complaint, Roster, decide, stands, understand
from services.master.liveness import Bounds
from services.master.state import State, apply
from ullage.v1 import event_pb2, model_pb2

SIZES: Final = (10, 100, 1_000, 10_000)
TARGETS_MS: Final = {10: 8.0, 100: 8.0, 1_000: 8.0, 10_000: 15.0}
TAIL: Final = 2.0
"""How much longer one decision in twenty may take."""
ROUNDS: Final = 60
SEQUENTIAL: Final = 400
REFERENCE_PER_SECOND: Final = 352.0
"""What the measured prototype did: a third of them large models, two thirds small ones."""
LINKED_NODES: Final = 1_000
SITE_NODES: Final = 50
GAP_INSTANCES: Final = 60
SEED: Final = 1
NEVER_SILENT: Final = Bounds(suspect_after_seconds=1e9, lost_after_seconds=1e9)

SPEC: Final = model_pb2.PlacementSpec(model_id=MODEL_ID, context_tokens=8192)
SMALL_SPEC: Final = model_pb2.PlacementSpec(model_id=SMALL_MODEL_ID, context_tokens=8192)
Outcome = model_pb2.Placement | model_pb2.Refusal


@dataclass
class Master:
    """What of a master decides: its cluster, whose log is not written, and the nodes in columns."""

    state: State
    cluster: clusters.Cluster = field(init=False)
    roster: Roster = field(init=False)

    def __post_init__(self) -> None:
        self.cluster = asyncio.run(_heard(self.state))
        self.roster = Roster(self.state)

    def decided(self, spec: model_pb2.PlacementSpec = SPEC) -> Outcome:
        """What Place would answer now."""
        silent = self.cluster.silent_node_ids()
        survey, request = self.roster.survey(spec.model_id), understand(self.state, spec)
        outcome = decide(survey, request, spec, silent)
        if isinstance(outcome, model_pb2.Placement) and not isinstance(request, Complaint):
            before = replace(survey, sequence=survey.sequence - 1)  # So that it does look.
            if not stands(outcome, before, self.state, request, self.cluster.is_silent):
                raise ValueError("a decision does not stand on the state it was made on")
        return outcome


async def _heard(state: State) -> clusters.Cluster:
    """A cluster in this state, every node of which was just heard."""
    with tempfile.TemporaryDirectory() as folder:
        async with clusters.attached(Path(folder) / "events.db", SystemClock(), NEVER_SILENT) as cluster:
            cluster.state = state
            for node_id in state.nodes:
                cluster.hear_runner(node_id)
            return cluster


def rows() -> Iterator[Row]:
    """All rows of the section."""
    medians = {}
    for count in SIZES:
        master = Master(state_of(fleet(count, SEED), [], large_model()))
        medians[count], tail = _quantiles_ms(master.decided, ROUNDS)
        target = TARGETS_MS[count]
        yield Row("placement", f"Place, {count:,} nodes, p50", medians[count], "ms", "lower", target)
        yield Row("placement", f"Place, {count:,} nodes, p95", tail, "ms", "lower", target * TAIL)
    growth = medians[10_000], medians[1_000]
    yield Row("placement", "ten times the nodes", growth[0], "ms", "lower", 4.0, growth[1], "Place, 1,000 nodes")
    yield from other_rows()
    yield from sequential_rows()
    yield from gap_rows()


def other_rows() -> Iterator[Row]:
    """Decisions that are harder than most: over measured links, over nodes that all spoke, with other aims, refused."""
    machines = fleet(LINKED_NODES, SEED)
    linked = Master(state_of(machines, site_ways(machines, SITE_NODES, SEED), large_model()))
    yield _row("Place, 1,000 nodes with measured links, p50", linked.decided, 8.0)
    for count, target in ((1_000, 16.0), (10_000, 50.0)):
        master = Master(state_of(fleet(count, SEED), [], large_model()))
        yield _row(f"Place, {count:,} nodes all changed, p50", partial(_all_changed, master), target)
    master = Master(state_of(machines, [], large_model()))
    most = model_pb2.PlacementSpec(model_id=MODEL_ID, context_tokens=8192, objective=model_pb2.OBJECTIVE_THROUGHPUT)
    yield _row("Place for throughput, 1,000 nodes, p50", lambda: master.decided(most), 100.0)
    poor = [replace(machine, available_bytes=machine.available_bytes // 2000) for machine in machines]
    yield _row("refusal with its proof, 1,000 nodes, p50", Master(state_of(poor, [], large_model())).decided, 100.0)
    few = [replace(machine, available_bytes=7 * 2**30) for machine in fleet(8, SEED)]
    refused = Master(state_of(few, [], unequal_model(80, SEED)))
    yield _row("refusal, 8 nodes and 80 unequal layers, p50", refused.decided, 100.0)


def _row(name: str, work: Callable[[], object], target: float) -> Row:
    return Row("placement", name, _quantiles_ms(work, ROUNDS // 4)[0], "ms", "lower", target)


def _all_changed(master: Master) -> Outcome:
    """A decision after each node has spoken."""
    for record in master.state.nodes.values():
        record.changed_at += 1
    return master.decided()


def _quantiles_ms(work: Callable[[], object], rounds: int) -> tuple[float, float]:
    """The median and the 95th percentile of so many rounds, after one."""
    work()
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        taken.append((time.perf_counter() - began) * 1000)
    taken.sort()
    return taken[len(taken) // 2], taken[int(len(taken) * 0.95)]


def sequential_rows() -> Iterator[Row]:
    """Placements one after the other on a thousand nodes, each of which reserves what the next cannot have."""
    for specs, what, target in (
        ((SPEC, SMALL_SPEC, SMALL_SPEC), "a third of them 70B, two thirds 8B", REFERENCE_PER_SECOND),
        ((SPEC,), "70B all of them", 100.0),
    ):
        master = Master(state_of(fleet(1_000, SEED), [], large_model(), small_model()))
        rate, placed = _in_a_row(master, specs)
        name = f"placements in a row, 1,000 nodes, {what}: {placed} of {SEQUENTIAL} placed"
        yield Row("placement", name, rate, "/s", "higher", target)
        over = sum(
            record.promised_bytes > record.memory.balanced_available_bytes
            for record in master.state.nodes.values()
            if record.memory is not None
        )
        yield Row("placement", "nodes over-committed by them", float(over), "nodes", "lower", 0.0)


def _in_a_row(master: Master, specs: tuple[model_pb2.PlacementSpec, ...]) -> tuple[float, int]:
    """How many are decided in a second, and how many of them are placed."""
    began, placed = time.perf_counter(), 0
    for number in range(SEQUENTIAL):
        spec = specs[number % len(specs)]
        outcome = master.decided(spec)
        if isinstance(outcome, model_pb2.Placement):
            placed += 1
            fact = event_pb2.InstancePlaced(instance_id=f"i{number}", spec=spec, placement=outcome)
            sequence = master.state.sequence + 1
            apply(master.state, event_pb2.RecordedEvent(sequence=sequence, fact=event_pb2.Fact(instance_placed=fact)))
    return SEQUENTIAL / (time.perf_counter() - began), placed


def gap_rows() -> Iterator[Row]:
    """Against an exact solver; `python -m benchmarks.placement_gap` takes more instances."""
    tally = placement_gap.measure(SEED, GAP_INSTANCES)
    yield Row("placement", f"optimal, of {len(tally.gaps)} random instances", tally.optimal, "", "higher", 0.99)
    yield Row("placement", "largest gap to HiGHS", tally.gap_max, "", "lower", 0.03)
    wrong = float(tally.false_accepts + tally.false_refusals)
    yield Row("placement", "false accepts and refusals", wrong, "", "lower", 0.0)
