"""What a runner starts and stops, as a table."""

from __future__ import annotations

import pytest

from services.runner.reconcile import Key, Steps, steps

A: Key = ("a", 0)
B: Key = ("b", 0)
C: Key = ("c", 1)


@pytest.mark.parametrize(
    ("wanted", "ended", "expected"),
    [
        ([], {}, Steps((), (), ())),
        ([B, A], {}, Steps(start=(A, B), stop=(), forget=())),
        ([A, B], {A: False}, Steps(start=(B,), stop=(), forget=())),
        ([A], {A: False, C: False, B: False}, Steps(start=(), stop=(B, C), forget=())),
        ([], {A: True, B: False}, Steps(start=(), stop=(B,), forget=(A,))),
        ([C], {A: True}, Steps(start=(C,), stop=(), forget=(A,))),
    ],
)
def test_the_steps_lead_from_what_there_is_to_what_is_wanted(
    wanted: list[Key], ended: dict[Key, bool], expected: Steps
) -> None:
    assert steps(wanted, ended) == expected


def test_a_running_shard_that_is_wanted_is_left_alone() -> None:
    assert steps([A], {A: False}) == Steps((), (), ())


def test_a_shard_that_has_ended_is_not_started_again_while_it_is_wanted() -> None:
    assert steps([A], {A: True}) == Steps((), (), ())
