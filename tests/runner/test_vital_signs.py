"""A process judged by readings of it."""

from __future__ import annotations

import pytest

from services.runner.grant import over_grant_bytes
from services.runner.vital_signs import LOOK_SECONDS_MAX, Reading, VitalSigns

MIB = 1 << 20


def seen(*readings: tuple[float, float, bool]) -> VitalSigns:
    """After readings at these seconds, of so much processor time, stopped or not; the first second is 0."""
    signs = VitalSigns(0.0)
    for now, processor_seconds, is_stopped in readings:
        signs.see(Reading(MIB, processor_seconds, is_stopped), now)
    return signs


def test_a_process_is_stopped_for_as_long_as_every_reading_says_so() -> None:
    assert seen((1, 0, True), (2, 0, True)).stopped_seconds == 2
    assert seen((1, 0, True), (2, 0, False), (3, 0, True)).stopped_seconds == 1
    assert seen((1, 0, True), (2, 0, False)).stopped_seconds == 0


def test_a_process_is_idle_while_it_takes_next_to_no_time() -> None:
    assert seen((1, 1.0, False), (2, 1.01, False), (3, 1.02, False)).idle_seconds == 2


def test_a_process_at_work_is_not_idle() -> None:
    assert seen((1, 1.0, False), (2, 1.0, False), (3, 1.2, False)).idle_seconds == 0


def test_whoever_looks_late_was_held_up_and_blames_nobody_for_that_time() -> None:
    assert seen((1, 1.0, False), (100, 1.0, False)).idle_seconds == LOOK_SECONDS_MAX
    assert seen((1, 1.0, False), (100, 1.0, True)).stopped_seconds == LOOK_SECONDS_MAX


@pytest.mark.parametrize(
    ("resident", "granted", "over"),
    [
        (1000 * MIB, 1000 * MIB, None),
        (1125 * MIB, 1000 * MIB, None),
        (1126 * MIB, 1000 * MIB, 126 * MIB),
        (164 * MIB, 100 * MIB, None),
        (165 * MIB, 100 * MIB, 65 * MIB),
        (900 * MIB, 0, None),
    ],
)
def test_a_shard_is_over_its_grant_by_more_than_an_eighth_and_64_mebibytes(
    resident: int, granted: int, over: int | None
) -> None:
    assert over_grant_bytes(resident, granted) == over
