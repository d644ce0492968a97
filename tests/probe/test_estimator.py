"""What a node can give: the estimators, the operator's override, and the sample made of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.probe.estimator import Estimate, Override, estimate
from services.probe.memory_sample import memory_sample
from services.probe.pressure import judge
from services.probe.reading import Reading, Stall
from ullage.v1 import node_pb2

GIB = 1 << 30

NORMAL = node_pb2.PRESSURE_LEVEL_NORMAL
WARNING = node_pb2.PRESSURE_LEVEL_WARNING
CRITICAL = node_pb2.PRESSURE_LEVEL_CRITICAL
UNKNOWN = node_pb2.PRESSURE_LEVEL_UNKNOWN
OVERRIDDEN = node_pb2.MEMORY_FLAG_OVERRIDDEN
ZEROED = node_pb2.MEMORY_FLAG_CRITICAL_ZEROED


def reading(total: int | None = 20 * GIB, available: int | None = 12 * GIB, **more: Any) -> Reading:
    return Reading(source=node_pb2.MEMORY_SOURCE_PROCFS, ram_total_bytes=total, ram_available_bytes=available)._replace(
        **more
    )


def test_each_estimator_leaves_the_room_its_level_needs() -> None:
    assert estimate(reading(), NORMAL, None) == Estimate(10 * GIB, 11 * GIB, 12 * GIB)
    assert estimate(reading(available=GIB // 2), WARNING, None) == Estimate(0, 0, GIB // 2)


def test_a_cgroup_bounds_every_estimator() -> None:
    limited = reading(cgroup_limit_bytes=4 * GIB, cgroup_available_bytes=3 * GIB)
    assert estimate(limited, NORMAL, None) == Estimate(2 * GIB, 5 * GIB // 2, 3 * GIB)


def test_under_critical_there_is_a_measured_zero_and_it_is_flagged() -> None:
    assert estimate(reading(), CRITICAL, None) == Estimate(0, 0, 0, (ZEROED,))


def test_what_could_not_be_read_is_unknown_and_not_zero() -> None:
    assert estimate(reading(available=None), UNKNOWN, None) == Estimate(None, None, None)
    assert estimate(reading(total=None), UNKNOWN, None) == Estimate(None, None, None)


@pytest.mark.parametrize("level", [NORMAL, WARNING, UNKNOWN])
def test_an_override_stands_in_on_every_path(level: node_pb2.PressureLevel.ValueType) -> None:
    given_bytes = Override(size_bytes=3 * GIB)
    assert estimate(reading(), level, given_bytes) == Estimate(3 * GIB, 3 * GIB, 3 * GIB, (OVERRIDDEN,))


def test_an_override_counts_where_nothing_could_be_read() -> None:
    blind = reading(total=None, available=None)
    assert estimate(blind, UNKNOWN, Override(size_bytes=GIB)) == Estimate(GIB, GIB, GIB, (OVERRIDDEN,))
    assert estimate(blind, UNKNOWN, Override(fraction=0.5)) == Estimate(None, None, None)


def test_an_override_is_clamped_to_the_memory_there_is() -> None:
    assert estimate(reading(), NORMAL, Override(size_bytes=1 << 50)).ceiling_bytes == 20 * GIB
    limited = reading(cgroup_limit_bytes=4 * GIB)
    assert estimate(limited, NORMAL, Override(size_bytes=1 << 50)).ceiling_bytes == 4 * GIB


def test_an_override_may_be_a_share_of_the_memory() -> None:
    assert estimate(reading(), NORMAL, Override(fraction=0.5)).balanced_bytes == 10 * GIB


def test_an_override_does_not_lift_critical() -> None:
    assert estimate(reading(), CRITICAL, Override(size_bytes=GIB)) == Estimate(0, 0, 0, (OVERRIDDEN, ZEROED))


def test_the_level_rests_on_the_reading_whatever_the_override_says() -> None:
    pressed = reading(available=GIB // 2)
    verdict = judge(None, pressed, 0.0)
    assert verdict.level == CRITICAL
    assert estimate(pressed, verdict.level, Override(fraction=1.0)).ceiling_bytes == 0


amounts = st.none() | st.integers(0, 2**60)
overrides = (
    st.none() | st.builds(Override, size_bytes=st.integers(0, 2**62)) | st.builds(Override, fraction=st.floats(0, 1))
)


@settings(deadline=None)
@given(amounts, amounts, amounts, amounts, overrides, st.sampled_from([NORMAL, WARNING, CRITICAL, UNKNOWN]))
def test_strict_is_at_most_balanced_and_balanced_at_most_ceiling(
    total: int | None,
    available: int | None,
    limit: int | None,
    room: int | None,
    override: Override | None,
    level: node_pb2.PressureLevel.ValueType,
) -> None:
    bounded = available if total is None or available is None else min(total, available)
    made = reading(total, bounded, cgroup_limit_bytes=limit, cgroup_available_bytes=room)
    result = estimate(made, level, override)
    if result.ceiling_bytes is None:
        assert (result.strict_bytes, result.balanced_bytes) == (None, None)
        return
    assert result.strict_bytes is not None
    assert result.balanced_bytes is not None
    assert 0 <= result.strict_bytes <= result.balanced_bytes <= result.ceiling_bytes
    assert made.total_bytes is None or result.ceiling_bytes <= made.total_bytes


def sampled(made: Reading, override: Override | None = None) -> node_pb2.MemorySample:
    verdict = judge(None, made, 0.0)
    return memory_sample(made, verdict, estimate(made, verdict.level, override), 1_500_000_000)


def test_a_sample_holds_the_reading_the_conclusions_and_how_they_came_about() -> None:
    sample = sampled(reading(ram_free_bytes=GIB, host_stall=Stall(0, 0, 1.5, 0.5)), Override(size_bytes=GIB))
    assert sample.taken_at.ToNanoseconds() == 1_500_000_000
    assert (sample.ram_total_bytes, sample.ram_available_bytes, sample.ram_free_bytes) == (20 * GIB, 12 * GIB, GIB)
    assert (sample.stall_some_pct, sample.stall_full_pct) == (1.5, 0.5)
    assert sample.balanced_available_bytes == GIB
    assert sample.pressure_level == NORMAL
    assert list(sample.flags) == [OVERRIDDEN]
    assert sample.source == node_pb2.MEMORY_SOURCE_PROCFS


def test_a_sample_leaves_out_what_is_unknown() -> None:
    sample = sampled(reading(total=None, available=None))
    assert {field.name for field, _ in sample.ListFields()} == {
        "taken_at",
        "pressure_level",
        "pressure_reasons",
        "source",
        "flags",
    }
    assert list(sample.flags) == [node_pb2.MEMORY_FLAG_PSI_MISSING]


def test_a_sample_inside_a_limit_shows_the_limit_as_its_total() -> None:
    sample = sampled(reading(cgroup_limit_bytes=4 * GIB, cgroup_used_bytes=GIB, cgroup_available_bytes=3 * GIB))
    assert (sample.ram_total_bytes, sample.ram_available_bytes) == (4 * GIB, 3 * GIB)
    assert (sample.cgroup_limit_bytes, sample.cgroup_used_bytes) == (4 * GIB, GIB)
    assert node_pb2.MEMORY_FLAG_CGROUP_LIMITED in sample.flags


def test_no_more_is_free_inside_a_limit_than_the_limit() -> None:
    sample = sampled(reading(cgroup_limit_bytes=4 * GIB, cgroup_available_bytes=3 * GIB, ram_free_bytes=14 * GIB))
    assert sample.ram_free_bytes == 4 * GIB


def test_a_sample_says_when_a_figure_was_clamped_or_is_coarse() -> None:
    assert node_pb2.MEMORY_FLAG_CLAMPED in sampled(reading(clamped=True)).flags
    assert node_pb2.MEMORY_FLAG_ESTIMATED in sampled(reading(source=node_pb2.MEMORY_SOURCE_PSUTIL)).flags
