"""How far the allocator is from the best: `python -m benchmarks.placement_gap --seed N --instances M`.

Every instance is a random cluster of at most 8 nodes and a model of unequal layers, with ways of unequal cost, ways
that lead in one direction only, and ways that are missing. HiGHS solves it as an integer program, written down once
more from the design and sharing no code with the allocator; what HiGHS cannot finish in its time is counted as such.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Final

import highspy
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.random_clusters import LEVEL_FACTORS, MIB, MODEL_ID, Machine, Way, state_of
from services.master.allocator import place
from ullage.v1 import model_pb2, node_pb2

SOLVER_SECONDS_MAX: Final = 30.0
UNMEASURED_SECONDS: Final = 0.001
OPTIMAL: Final = 1e-6
"""Within what part of the best an answer is the best: both solvers count in floating point."""
KV_ELEMENT_BYTES: Final = 2
TOKENS: Final = 256


@dataclass(frozen=True)
class Instance:
    """A cluster and a model, as numbers."""

    machines: list[Machine]
    ways: list[Way]
    layer_bytes: list[int]
    kv_elements: list[int]
    embedding_bytes: int
    head_bytes: int
    tied: bool
    hidden_size: int

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return len(self.layer_bytes)

    def model(self) -> model_pb2.Model:
        """The model as it is registered."""
        return model_pb2.Model(
            model_id=MODEL_ID,
            layers=[
                model_pb2.Layer(weight=_weight(weight), kv_elements_per_token=kv)
                for weight, kv in zip(self.layer_bytes, self.kv_elements, strict=True)
            ],
            embedding=_weight(self.embedding_bytes),
            head=_weight(self.head_bytes),
            tied_embedding=self.tied,
            hidden_size=self.hidden_size,
            kv_allocation_step_tokens=TOKENS,
            context_tokens_max=TOKENS,
        )

    def kv_bytes(self, start: int, end: int) -> int:
        """The caches of the layers from `start` to `end`."""
        return sum(self.kv_elements[start:end]) * KV_ELEMENT_BYTES * TOKENS

    def needs(self, machine: Machine, start: int, end: int) -> int:
        """The bytes those layers take on a machine."""
        taken = sum(self.layer_bytes[start:end]) + self.kv_bytes(start, end) + machine.overhead_bytes
        # In every shard: the copy of one cache while it grows, and the activations of a chunk of the prompt, once in
        # use and once as freed buffers. The caches grow in one step, so none is outgrown.
        chunk = 128 * 2 * self.hidden_size * KV_ELEMENT_BYTES
        taken += max(self.kv_elements) * KV_ELEMENT_BYTES * TOKENS + chunk + min(32 * MIB, chunk)
        if start == 0:
            taken += self.embedding_bytes
        if end == self.layers:
            taken += self.head_bytes + (self.embedding_bytes if self.tied and start else 0)
        return taken

    def stage_seconds(self, machine: Machine, start: int, end: int) -> float:
        """The time those layers take on it for a token."""
        read = sum(self.layer_bytes[start:end])
        read += sum(kv * KV_ELEMENT_BYTES * TOKENS // 2 for kv in self.kv_elements[start:end])
        if end == self.layers:
            read += self.head_bytes + (self.embedding_bytes if self.tied else 0)
        return read / (machine.bytes_per_second * LEVEL_FACTORS[machine.level])

    def hop_seconds(self) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        """The ways between machines, onward with activations and back with a token; those that work."""
        places = {machine.node_id: place for place, machine in enumerate(self.machines)}
        pairs = [(i, j) for i in range(len(places)) for j in range(len(places)) if i != j]
        onward, back = dict.fromkeys(pairs, UNMEASURED_SECONDS), dict.fromkeys(pairs, UNMEASURED_SECONDS)
        for way in self.ways:
            pair = places[way.sender], places[way.receiver]
            if way.latency_ns is None:
                del onward[pair], back[pair]
            else:
                back[pair] = way.latency_ns / 1e9
                sent = self.hidden_size * KV_ELEMENT_BYTES
                onward[pair] = back[pair] + (sent / way.bytes_per_second if way.bytes_per_second else 0.0)
        return onward, back

    def seconds(self, shards: list[tuple[int, int, int]]) -> float:
        """The time for a token over (machine, start, end) by rank; infinite where a way is missing or bytes are."""
        onward, back = self.hop_seconds()
        total = 0.0
        for number, start, end in shards:
            machine = self.machines[number]
            fits = self.needs(machine, start, end) <= machine.available_bytes
            total += self.stage_seconds(machine, start, end) if fits else float("inf")
        for (sender, *_), (receiver, *_) in pairwise(shards):
            total += onward.get((sender, receiver), float("inf"))
        return total + (back.get((shards[-1][0], shards[0][0]), float("inf")) if len(shards) > 1 else 0.0)


def _weight(count: int) -> model_pb2.Weight:
    return model_pb2.Weight(stored_bytes=count, parameters=count)


def instances(seed: int, count: int) -> Iterator[Instance]:
    """So many instances, the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311 - the same for the same seed
    for _ in range(count):
        yield _instance(chance)


def _instance(chance: random.Random) -> Instance:
    layer_bytes = _layers(chance)
    kv_elements = [chance.choice([0, 512, 4096]) for _ in layer_bytes]
    embedding = int(chance.uniform(0, 2) * layer_bytes[0])
    nodes = chance.choice([2, 3, 4, 5, 5, 6, 6, 7, 7, 8, 8])
    # From too little to plenty: the sum of all budgets against what the model takes.
    whole = sum(layer_bytes) + 2 * embedding + sum(kv_elements) * KV_ELEMENT_BYTES * TOKENS
    share = whole * chance.choice([1.0, 1.25, 1.5, 2.0, 3.0, 6.0]) / nodes
    machines = [
        Machine(
            node_id=f"n{number}",
            available_bytes=int(share * chance.uniform(0.3, 1.7)),
            bytes_per_second=int(chance.choice([60e9, 100e9, 270e9, 400e9, 800e9]) * chance.uniform(0.7, 1.3)),
            overhead_bytes=int(chance.uniform(0, 0.2) * layer_bytes[0]),
            level=chance.choice([*[node_pb2.PRESSURE_LEVEL_NORMAL] * 4, node_pb2.PRESSURE_LEVEL_WARNING]),
        )
        for number in range(nodes)
    ]
    return Instance(
        machines=machines,
        ways=_ways(chance, machines),
        layer_bytes=layer_bytes,
        kv_elements=kv_elements,
        embedding_bytes=embedding,
        head_bytes=chance.choice([1024, embedding + 1024]),
        tied=chance.random() < 0.4,
        hidden_size=chance.choice([64, 2048, 8192]),
    )


def _layers(chance: random.Random) -> list[int]:
    """Layers of one, of two or of any sizes."""
    count, typical = chance.randint(4, 16), chance.uniform(20, 400) * MIB
    match chance.randrange(3):
        case 0:
            return [int(typical)] * count
        case 1:
            return [int(typical * chance.choice([1.0, 1.9])) for _ in range(count)]
        case _:
            return [int(typical * chance.uniform(0.4, 2.2)) for _ in range(count)]


def _ways(chance: random.Random, machines: list[Machine]) -> list[Way]:
    """A way for most pairs: on a wire, over the air or far away, each direction for itself, some of them broken."""
    ways = []
    base = chance.choice([50_000, 300_000, 3_000_000, 20_000_000])
    broken = chance.choice([0.0, 0.0, 0.1, 0.3])
    for sender in machines:
        for receiver in machines:
            if sender is receiver or chance.random() < 0.1:
                continue
            latency = None if chance.random() < broken else int(base * chance.uniform(0.3, 3.0))
            ways.append(Way(sender.node_id, receiver.node_id, latency, int(chance.choice([3e7, 1e8, 1e9]))))
    return ways


@dataclass
class Program:
    """An integer program, row by row: an arc for each range a machine can hold, and the ways between arcs."""

    costs: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)

    def variable(self, cost: float, *, whole: bool) -> int:
        """A new variable between 0 and 1."""
        self.costs.append(cost)
        self.whole.append(whole)
        return len(self.costs) - 1

    def row(self, low: float, high: float, terms: dict[int, float]) -> None:
        """`low` <= the sum of `terms` <= `high`."""
        self.rows.append((low, high, terms))

    def solve(self) -> tuple[str, float | None]:
        """Say whether it is "optimal", with the least cost, "infeasible" or "unsolved"."""
        solver = _silent_solver()
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("mip_rel_gap", 1e-9)
        solver.setOptionValue("time_limit", SOLVER_SECONDS_MAX)
        count = len(self.costs)
        solver.addVars(count, np.zeros(count), np.ones(count))
        solver.changeColsCost(count, np.arange(count, dtype=np.int32), np.array(self.costs))
        kinds = [highspy.HighsVarType.kInteger if each else highspy.HighsVarType.kContinuous for each in self.whole]
        solver.changeColsIntegrality(count, np.arange(count, dtype=np.int32), np.array(kinds))
        for low, high, terms in self.rows:
            indices, values = np.array(list(terms), dtype=np.int32), np.array(list(terms.values()), dtype=np.float64)
            solver.addRow(low, high, len(terms), indices, values)
        solver.run()
        match solver.getModelStatus():
            case highspy.HighsModelStatus.kOptimal:
                return "optimal", float(solver.getInfo().objective_function_value)
            case highspy.HighsModelStatus.kInfeasible:
                return "infeasible", None
            case _:
                return "unsolved", None


def _silent_solver() -> highspy.Highs:
    solver = highspy.Highs()  # type: ignore[no-untyped-call]  # ships no types
    solver.setOptionValue("output_flag", False)  # noqa: FBT003 - HiGHS takes it so
    return solver


def oracle(instance: Instance) -> tuple[str, float | None]:
    """The least seconds for a token by HiGHS, with "optimal"; or "infeasible", or "unsolved"."""
    program = Program()
    arcs = _arcs(instance, program)
    if not arcs:
        return "infeasible", None
    onward, back = instance.hop_seconds()
    _each_once(instance, program, arcs)
    for boundary in range(1, instance.layers):
        ended = {i: [v for (k, _, end), v in arcs.items() if k == i and end == boundary] for i in _places(instance)}
        begun = {i: [v for (k, start, _), v in arcs.items() if k == i and start == boundary] for i in _places(instance)}
        _linked(program, ended, begun, onward)
    alone = {
        i: [v for (k, start, end), v in arcs.items() if (k, start, end) == (i, 0, instance.layers)]
        for i in _places(instance)
    }
    ended = {
        i: [v for (k, start, end), v in arcs.items() if k == i and end == instance.layers and start] for i in alone
    }
    begun = {
        i: [v for (k, start, end), v in arcs.items() if k == i and not start and end < instance.layers] for i in alone
    }
    _linked(program, ended, begun, back)
    status, cost = program.solve()
    return status, None if cost is None else cost / 1000


def _places(instance: Instance) -> range:
    return range(len(instance.machines))


def _arcs(instance: Instance, program: Program) -> dict[tuple[int, int, int], int]:
    """A variable for each range of layers that a machine can hold; costs in milliseconds."""
    return {
        (i, start, end): program.variable(instance.stage_seconds(machine, start, end) * 1000, whole=True)
        for i, machine in enumerate(instance.machines)
        for start in range(instance.layers)
        for end in range(start + 1, instance.layers + 1)
        if instance.needs(machine, start, end) <= machine.available_bytes
    }


def _each_once(instance: Instance, program: Program, arcs: dict[tuple[int, int, int], int]) -> None:
    """Every layer is held once, and every machine holds one range."""
    for layer in range(instance.layers):
        program.row(1, 1, {v: 1.0 for (_, start, end), v in arcs.items() if start <= layer < end})
    for i in _places(instance):
        program.row(0, 1, {v: 1.0 for (k, _, _), v in arcs.items() if k == i})


def _linked(
    program: Program,
    ended: dict[int, list[int]],
    begun: dict[int, list[int]],
    ways: dict[tuple[int, int], float],
) -> None:
    """Whoever ends at a boundary hands on to whoever begins there, over a way that works."""
    handed = {
        (i, j): program.variable(seconds * 1000, whole=False)
        for (i, j), seconds in ways.items()
        if ended[i] and begun[j]
    }
    for i, variables in ended.items():
        if variables:
            taken = {v: -1.0 for (sender, _), v in handed.items() if sender == i}
            program.row(0, 0, {**dict.fromkeys(variables, 1.0), **taken})
    for j, variables in begun.items():
        if variables:
            taken = {v: -1.0 for (_, receiver), v in handed.items() if receiver == j}
            program.row(0, 0, {**dict.fromkeys(variables, 1.0), **taken})


@dataclass
class Tally:
    """What came out over all instances."""

    gaps: list[float] = field(default_factory=list)
    refused: int = 0
    false_accepts: int = 0
    false_refusals: int = 0
    unsolved: int = 0
    place_seconds: list[float] = field(default_factory=list)
    solver_seconds: list[float] = field(default_factory=list)

    def add(self, instance: Instance) -> None:
        """Solve `instance` both ways."""
        state = state_of(instance.machines, instance.ways, instance.model())
        asked = model_pb2.PlacementSpec(model_id=MODEL_ID, context_tokens=TOKENS)
        began = time.perf_counter()
        outcome = place(state, asked, ())
        placed = time.perf_counter()
        status, best = oracle(instance)
        self.place_seconds.append(placed - began)
        self.solver_seconds.append(time.perf_counter() - placed)
        if status == "unsolved":
            self.unsolved += 1
        elif isinstance(outcome, model_pb2.Refusal):
            self.refused += best is None
            self.false_refusals += best is not None
        else:
            self._placed(instance, outcome, best)

    def _placed(self, instance: Instance, outcome: model_pb2.Placement, best: float | None) -> None:
        places = {machine.node_id: place for place, machine in enumerate(instance.machines)}
        shards = [(places[shard.node_id], shard.first_layer, shard.end_layer) for shard in outcome.shards]
        seconds = instance.seconds(shards)
        if best is None or seconds == float("inf"):
            self.false_accepts += 1
        else:
            self.gaps.append(max(0.0, seconds / best - 1))

    @property
    def optimal(self) -> float:
        """The part of the placements that are the best."""
        return sum(gap <= OPTIMAL for gap in self.gaps) / len(self.gaps) if self.gaps else 1.0

    @property
    def gap_max(self) -> float:
        """How far the worst placement is from the best."""
        return max(self.gaps, default=0.0)


def measure(seed: int, count: int, skipped: int = 0) -> Tally:
    """The tally of so many instances, after as many as are skipped."""
    tally = Tally()
    for instance in islice(instances(seed, skipped + count), skipped, None):
        tally.add(instance)
    return tally


def table(tally: Tally, seed: int) -> Table:
    """The tally as people read it."""
    drawn = Table(title=f"Place against HiGHS {_silent_solver().version()}, seed {seed}")
    drawn.add_column("what")
    drawn.add_column("value", justify="right")
    placed, answered = len(tally.gaps), len(tally.gaps) + tally.refused
    solver, place_ms = sorted(tally.solver_seconds), sorted(1000 * each for each in tally.place_seconds)
    for name, value in (
        ("solved by both", f"{answered + tally.false_accepts + tally.false_refusals}"),
        (f"not solved by HiGHS in {SOLVER_SECONDS_MAX:g} s", f"{tally.unsolved}"),
        ("placed", f"{placed}"),
        ("refused by both", f"{tally.refused}"),
        ("optimal", f"{tally.optimal:.2%}"),
        ("gap, mean", f"{statistics.fmean(tally.gaps) if tally.gaps else 0:.4%}"),
        ("gap, largest", f"{tally.gap_max:.4%}"),
        ("false accepts", f"{tally.false_accepts}"),
        ("false refusals", f"{tally.false_refusals}"),
        ("place, p50 / p99", f"{place_ms[len(place_ms) // 2]:.1f} / {place_ms[int(len(place_ms) * 0.99)]:.1f} ms"),
        ("HiGHS, p50 / longest", f"{solver[len(solver) // 2]:.2f} / {solver[-1]:.2f} s"),
    ):
        drawn.add_row(name, value)
    return drawn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--instances", type=int, default=500)
    parser.add_argument("--skip", type=int, default=0, help="leave out so many first: for a run in parts")
    asked = parser.parse_args()
    tally = measure(asked.seed, asked.instances, asked.skip)
    Console().print(table(tally, asked.seed))
    wrong = tally.false_accepts + tally.false_refusals
    return 0 if not wrong and tally.optimal >= 0.99 and tally.gap_max <= 0.03 else 1


if __name__ == "__main__":
    sys.exit(main())
