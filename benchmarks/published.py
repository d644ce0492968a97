"""What others have published, beside what the allocator predicts: the table of docs/placement.md.

Each row is a cluster somebody measured, put to the allocator as it stands; `python -m benchmarks.published` prints
them. The bytes and the numbers of layers are the models' own; how fast a device reads, and what a hop costs, come from
its makers or were fitted, as each row says.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.random_clusters import GIB, MODEL_ID, Machine, Way, state_of
from services.master.allocator import place
from ullage.v1 import model_pb2

CONTEXT_TOKENS: Final = 1024


@dataclass(frozen=True)
class Case:
    """A published measurement, and the cluster it was made on."""

    source: str
    what: str
    machines: list[Machine]
    model: model_pb2.Model
    measured_ms: float | None
    """For a token; None where the others ran out of memory or say something else."""
    measured_text: str
    hop_ms: float = 1.0
    min_nodes: int = 1
    note: str = ""


def model(
    whole_gb: float, layers: int, *, active: float = 1.0, ends_gb: float = 0.5, kv_heads: int = 8, hidden: int = 4096
) -> model_pb2.Model:
    """A model of `whole_gb` with equal layers, of which a token reads the part `active`."""
    per_layer = int((whole_gb - 2 * ends_gb) * 1e9 / layers)
    weight = model_pb2.Weight(stored_bytes=per_layer, parameters=2 * per_layer)
    if active < 1:
        weight.active_parameters = int(2 * per_layer * active)
    end = model_pb2.Weight(stored_bytes=int(ends_gb * 1e9), parameters=int(2e9 * ends_gb))
    return model_pb2.Model(
        model_id=MODEL_ID,
        layers=[model_pb2.Layer(weight=weight, kv_elements_per_token=2 * 128 * kv_heads)] * layers,
        embedding=end,
        head=end,
        hidden_size=hidden,
        vocabulary_size=128_256,
        kv_allocation_step_tokens=256,
        context_tokens_max=131_072,
    )


def _machines(*each: tuple[str, float, float]) -> list[Machine]:
    return [Machine(name, int(available * GIB), int(speed * 1e9)) for name, available, speed in each]


M4_PRO: Final = [(f"m4-pro-{number}", 52.0, 273 * 0.785) for number in range(8)]
"""64 GB each. Of the 273 GB/s that the maker names 0.785 was fitted on two rows, with 9 ms for each stage."""
EXO: Final = "exo, day 2"
PRIMA: Final = "prima.cpp"
DLLAMA: Final = "distributed-llama, PR 64"
HOME: Final = [("d1-mac-m1", 2.4, 60.0), ("d2-3070", 8.0, 448.0), ("d3-2080ti", 11.0, 616.0), ("d4-kirin", 1.9, 25.0)]
"""prima.cpp's four devices: what is free on the Mac and the phone, the graphics memory of the other two."""


def cases() -> Iterator[Case]:
    """Every row, in the order of the page."""
    fitted, told = "fitted on this row", "0.785 of 273 GB/s, 9 ms a stage: from the two rows above"
    pros = _machines(*M4_PRO)
    yield Case(
        EXO, "Llama 3.1 405B, 4 bits, 8 x M4 Pro", pros, model(228, 126, hidden=16384), 1136, "0.88 tok/s", 9, 8, fitted
    )
    yield Case(
        EXO, "Llama 3.3 70B, 4 bits, 8 x M4 Pro", pros, model(39.7, 80, hidden=8192), 257, "3.89 tok/s", 9, 8, fitted
    )
    deepseek = model(378, 61, active=20.0 / 377, hidden=7168, kv_heads=1)
    yield Case(EXO, "DeepSeek V3 671B, 4 bits, 8 x M4 Pro", pros, deepseek, 186, "5.37 tok/s", 9, 8, told)
    home = _machines(*HOME)
    yield Case(PRIMA, "Llama 3 8B, Q4, 4 devices", home, model(4.7, 32), 15, "layers 32:0:0:0", note="the maker's GB/s")
    yield Case(
        PRIMA,
        "Llama 2 14B class, Q4, 4 devices",
        home,
        model(8.4, 40),
        20,
        "with device selection",
        note="the maker's GB/s",
    )
    yield Case(
        PRIMA,
        "Llama 3 70B, Q4, 4 devices",
        home,
        model(42.5, 80),
        None,
        "674 ms from disk; others out of memory",
        note="the maker's GB/s",
    )
    pis = _machines(*((f"pi5-{number}", 6.5, 9.6) for number in range(4)))
    q40 = model(4.9, 32)
    yield Case(
        DLLAMA,
        "Llama 3 8B, Q40, 2 x RPi 5",
        pis[:2],
        q40,
        325.5,
        "269.0 ms of it computing",
        1,
        2,
        "9.6 GB/s; theirs is a tensor split, ours a pipeline",
    )
    yield Case(
        DLLAMA,
        "Llama 3 8B, Q40, 4 x RPi 5",
        pis,
        q40,
        245.1,
        "169.3 ms of it computing",
        1,
        4,
        "9.6 GB/s; theirs is a tensor split, ours a pipeline",
    )


def outcome(case: Case, *, min_nodes: int) -> model_pb2.Placement | model_pb2.Refusal:
    """What the allocator says."""
    ways = [
        Way(one.node_id, two.node_id, int(case.hop_ms * 1e6))
        for one in case.machines
        for two in case.machines
        if one is not two
    ]
    asked = model_pb2.PlacementSpec(model_id=MODEL_ID, context_tokens=CONTEXT_TOKENS, min_nodes=min_nodes)
    return place(state_of(case.machines, ways, case.model), asked, ())


def table() -> str:
    """All rows as a table in Markdown."""
    lines = [
        "| source | what | published | predicted | error | layers | left to itself | speeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(_row(case))} |" for case in cases()]
    return "\n".join(lines)


def _row(case: Case) -> Sequence[str]:
    said = outcome(case, min_nodes=case.min_nodes)
    measured = "" if case.measured_ms is None else f"{case.measured_ms:g} ms: "
    published = f"{measured}{case.measured_text}"
    if isinstance(said, model_pb2.Refusal):
        return case.source, case.what, published, "refused", "-", said.message.split("\n")[0], "the same", case.note
    predicted = _milliseconds(said)
    error = "-" if case.measured_ms is None else f"{predicted / case.measured_ms - 1:+.0%}"
    free = outcome(case, min_nodes=1)
    alone = f"{_milliseconds(free):.0f} ms on {_layers(free)}" if isinstance(free, model_pb2.Placement) else "refused"
    return case.source, case.what, published, f"{predicted:.0f} ms", error, _layers(said), alone, case.note


def _milliseconds(placement: model_pb2.Placement) -> float:
    return placement.time_per_token.ToNanoseconds() / 1e6


def _layers(placement: model_pb2.Placement) -> str:
    """The layers of each rank, after the kind of node that most have."""
    counts = ":".join(str(shard.end_layer - shard.first_layer) for shard in placement.shards)
    return f"{counts} ({placement.shards[0].node_id}{', …' if len(placement.shards) > 1 else ''})"


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
