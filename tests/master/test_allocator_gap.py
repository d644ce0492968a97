"""The allocator against an exact solver, on a few of the instances that `python -m benchmarks.placement_gap` takes."""

from __future__ import annotations

from benchmarks.placement_gap import measure


def test_placements_on_up_to_eight_nodes_are_the_best_there_are() -> None:
    tally = measure(seed=1, count=30)

    assert (tally.false_accepts, tally.false_refusals) == (0, 0)
    assert tally.optimal >= 0.99
    assert tally.gap_max <= 0.03
    assert len(tally.gaps) + tally.refused + tally.unsolved == 30
    assert tally.unsolved <= 2
