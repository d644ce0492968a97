"""The level and its hysteresis, reading by reading, at times that the tests choose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.probe.estimator import estimate
from services.probe.pressure import Verdict, judge
from services.probe.reading import Darwin, Pages, Reading, Stall
from ullage.v1 import node_pb2

GIB = 1 << 30

NORMAL = node_pb2.PRESSURE_LEVEL_NORMAL
WARNING = node_pb2.PRESSURE_LEVEL_WARNING
CRITICAL = node_pb2.PRESSURE_LEVEL_CRITICAL
UNKNOWN = node_pb2.PRESSURE_LEVEL_UNKNOWN

# Of 20 GiB, W is 2 and K is 1.
TOTAL = 20 * GIB


def reading(available_gib: float, **more: Any) -> Reading:
    return Reading(
        source=node_pb2.MEMORY_SOURCE_PROCFS,
        ram_total_bytes=TOTAL,
        ram_available_bytes=int(available_gib * GIB),
    )._replace(**more)


def stalled(some_s: float, full_s: float = 0.0, avg10: float = 0.0) -> Stall:
    """Counters that stand at so many seconds."""
    return Stall(int(some_s * 1e6), int(full_s * 1e6), avg10, 0.0)


def judged(readings: Iterable[Reading], period_s: float = 0.5) -> list[Verdict]:
    """The verdicts of readings that follow each other."""
    verdicts: list[Verdict] = []
    for index, each in enumerate(readings):
        verdicts.append(judge(verdicts[-1] if verdicts else None, each, 1000.0 + index * period_s))
    return verdicts


def levels(readings: Iterable[Reading], period_s: float = 0.5) -> list[node_pb2.PressureLevel.ValueType]:
    return [verdict.level for verdict in judged(readings, period_s)]


def signals(verdict: Verdict) -> list[str]:
    return [reason.signal for reason in verdict.reasons]


@pytest.mark.parametrize(
    ("available_gib", "level", "pct"),
    [(20, NORMAL, 0.0), (4, NORMAL, 0.0), (3, NORMAL, 25.0), (2, NORMAL, 50.0), (1.5, WARNING, 65.0),
     (1, WARNING, 80.0), (0.5, CRITICAL, 90.0), (0, CRITICAL, 100.0)],
)  # fmt: skip
def test_a_first_reading_takes_its_raw_level(
    available_gib: float, level: node_pb2.PressureLevel.ValueType, pct: float
) -> None:
    verdict = judge(None, reading(available_gib), 0.0)
    assert verdict.level == level
    assert verdict.pressure_pct == pytest.approx(pct)


def test_the_reason_names_the_figure_and_its_bound() -> None:
    (reason,) = judge(None, reading(0.5), 0.0).reasons
    assert (reason.level, reason.signal) == (CRITICAL, "available")
    assert reason.detail == "0.50 GiB available, below 1.00 GiB"


@pytest.mark.parametrize(
    ("total_gib", "warning_gib", "critical_gib"),
    [(512, 8, 4), (128, 8, 4), (64, 6.4, 3.2), (16, 1.6, 0.8), (4, 1, 0.5), (2, 0.5, 0.25), (1, 0.25, 0.125)],
)
def test_the_bounds_follow_the_size_of_the_machine(total_gib: float, warning_gib: float, critical_gib: float) -> None:
    def level(available_gib: float) -> int:
        sized = reading(available_gib)._replace(ram_total_bytes=int(total_gib * GIB))
        return judge(None, sized, 0.0).level

    assert [level(warning_gib * 1.01), level(warning_gib * 0.99)] == [NORMAL, WARNING]
    assert [level(critical_gib * 1.01), level(critical_gib * 0.99)] == [WARNING, CRITICAL]


def test_a_big_server_with_a_full_cache_is_under_no_pressure() -> None:
    # ray 33741: 54.9 G with 926 M free and 45.4 G available.
    verdict = judge(None, reading(45.4)._replace(ram_total_bytes=int(54.9 * GIB), ram_free_bytes=926 << 20), 0.0)
    assert verdict.level == NORMAL


def test_lack_of_room_raises_the_level_at_once() -> None:
    assert levels([reading(10), reading(1.5), reading(0.5)]) == [NORMAL, WARNING, CRITICAL]


def test_critical_falls_one_step_at_a_time_after_its_holds() -> None:
    verdicts = judged([reading(0.5), *[reading(10)] * 100])
    assert [verdict.level for verdict in verdicts[:21]] == [CRITICAL] * 21
    assert [verdict.level for verdict in verdicts[21:82]] == [WARNING] * 61
    assert [verdict.level for verdict in verdicts[82:]] == [NORMAL] * 19
    assert signals(verdicts[1]) == ["hold"]
    assert verdicts[1].reasons[0].level == CRITICAL
    assert verdicts[1].pressure_pct == 0.0


def test_a_hold_starts_anew_when_its_bound_is_broken() -> None:
    # Between K and 1.5 K is neither CRITICAL nor calm.
    assert levels([reading(0.5), *[reading(10)] * 20, reading(1.2), *[reading(10)] * 20, reading(10)]) == [
        *[CRITICAL] * 42,
        WARNING,
    ]


def test_room_just_above_the_warning_bound_does_not_end_a_warning() -> None:
    assert levels([reading(1.9), *[reading(2.4)] * 100])[-1] == WARNING
    assert levels([reading(1.9), *[reading(2.6)] * 100])[-1] == NORMAL


def test_a_fall_does_not_go_below_the_raw_level() -> None:
    assert set(levels([reading(0.5), *[reading(1.8)] * 200])[22:]) == {WARNING}


def test_the_level_flaps_no_more_than_its_holds_allow() -> None:
    flapping = levels([reading(1.9 if index % 2 else 2.1) for index in range(200)])
    assert flapping[1:] == [WARNING] * 199


def test_stalls_in_one_reading_do_not_count_and_in_two_they_do() -> None:
    one = [reading(5, host_stall=stalled(some)) for some in (0, 0, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3)]
    assert levels(one[:3]) == [NORMAL, NORMAL, NORMAL]
    assert levels(one)[3] == WARNING  # 0.3 s in the last 1.5 s are still 20 % of it.
    two = [reading(5, host_stall=stalled(some)) for some in (0, 0, 0.3, 0.6)]
    verdicts = judged(two)
    assert [verdict.level for verdict in verdicts] == [NORMAL, NORMAL, NORMAL, WARNING]
    assert verdicts[3].stalls.some_pct == pytest.approx(40.0)
    assert signals(verdicts[3]) == ["psi_some"]


def test_an_average_of_ten_seconds_that_is_high_once_is_not_yet_pressure() -> None:
    # systemd 23606: "51.07 % > 50 % for > 20 s".
    calm = reading(5, host_stall=stalled(0))
    lone = [calm, calm, reading(5, host_stall=stalled(0, avg10=51.07)), calm]
    assert levels(lone) == [NORMAL] * 4
    lasting = [reading(5, host_stall=stalled(0.5107 * index / 2, avg10=51.07)) for index in range(40)]
    assert levels([calm, *lasting])[-1] == WARNING


@pytest.mark.parametrize(
    ("share", "level"), [(0.04, NORMAL), (0.06, WARNING), (0.19, WARNING), (0.21, CRITICAL), (1.0, CRITICAL)]
)
def test_full_stalls_raise_the_level_by_their_share_of_the_window(
    share: float, level: node_pb2.PressureLevel.ValueType
) -> None:
    readings = [reading(5, host_stall=Stall(0, int(share * 0.5e6 * index), 0.0, 0.0)) for index in range(10)]
    verdict = judged(readings)[-1]
    assert verdict.level == level
    assert verdict.stalls.full_pct == pytest.approx(share * 100)
    assert verdict.pressure_pct == pytest.approx(
        max(min(400 * share, 100), {NORMAL: 0, WARNING: 50, CRITICAL: 80}[level])
    )


def test_stalls_with_more_than_half_of_the_memory_available_are_a_warning_at_most() -> None:
    readings = [reading(11, host_stall=Stall(0, 500_000 * index, 0.0, 0.0)) for index in range(10)]
    assert judged(readings)[-1].level == WARNING


def test_a_first_reading_takes_the_kernels_average_for_its_window() -> None:
    # thrash-protect 28.
    verdict = judge(None, reading(5, host_stall=Stall(3559632828, 3300487258, 70.24, 57.59)), 0.0)
    assert verdict.level == CRITICAL
    assert (verdict.stalls.some_pct, verdict.stalls.full_pct) == (70.24, 57.59)


def test_the_worse_of_machine_and_cgroup_counts() -> None:
    readings = [
        reading(5, host_stall=stalled(0), cgroup_stall=Stall(0, 250_000 * index, 0.0, 0.0)) for index in range(5)
    ]
    assert judged(readings)[-1].stalls.full_pct == pytest.approx(50.0)


def test_counters_that_go_back_start_a_new_window() -> None:
    verdicts = judged([reading(5, host_stall=stalled(some)) for some in (100, 101, 2, 2)])
    assert verdicts[2].stalls.some_pct == 0.0
    assert verdicts[3].stalls.some_pct == 0.0


def test_the_marks_of_a_window_are_few_however_often_it_is_read() -> None:
    verdict = judged([reading(5, host_stall=stalled(0))] * 3000, period_s=0.001)[-1]
    assert len(verdict.stalls.host_marks) <= 12


def test_missing_psi_leaves_the_other_signals() -> None:
    verdict = judge(None, reading(5), 0.0)
    assert verdict.level == NORMAL
    assert verdict.stalls.some_pct is None
    assert judge(None, reading(0.5), 0.0).level == CRITICAL


def test_running_out_of_memory_is_critical_at_once() -> None:
    verdicts = judged([reading(15, oom_events=7), reading(15, oom_events=7), reading(15, oom_events=8)])
    assert [verdict.level for verdict in verdicts] == [NORMAL, NORMAL, CRITICAL]
    assert signals(verdicts[2]) == ["oom_kill"]
    assert verdicts[2].pressure_pct == 80.0


def test_hits_on_the_limit_warn_unless_there_is_ample_room() -> None:
    assert levels([reading(5, limit_events=1), reading(5, limit_events=2)]) == [NORMAL, WARNING]
    assert levels([reading(15, limit_events=1), reading(15, limit_events=2)]) == [NORMAL, NORMAL]


def swapping(available_gib: float, used_pct: int, **more: Any) -> Reading:
    total = 16 * GIB
    return reading(available_gib, swap_total_bytes=total, swap_available_bytes=total * (100 - used_pct) // 100, **more)


@pytest.mark.parametrize(
    ("available_gib", "used_pct", "level"),
    [(12, 95, WARNING), (12, 89, NORMAL), (16, 95, NORMAL), (1.5, 95, CRITICAL), (1.5, 50, WARNING)],
)
def test_full_swap_counts_while_what_is_in_it_would_not_fit_back(
    available_gib: float, used_pct: int, level: node_pb2.PressureLevel.ValueType
) -> None:
    assert judge(None, swapping(available_gib, used_pct), 0.0).level == level


def test_a_nearly_full_swap_file_is_a_warning_though_the_page_axis_is_normal() -> None:
    # continuum 3877: 40.0 of 40.9 GB swap used, 30 of 128 GiB available.
    verdict = judge(
        None,
        reading(30, ram_total_bytes=128 * GIB, swap_total_bytes=40_900_000_000, swap_available_bytes=900_000_000),
        0.0,
    )
    assert verdict.level == WARNING
    assert signals(verdict) == ["swap"]


def test_the_machines_swap_does_not_count_inside_a_limited_cgroup() -> None:
    limited = swapping(12, 95, cgroup_limit_bytes=14 * GIB, cgroup_available_bytes=12 * GIB)
    assert judge(None, limited, 0.0).level == NORMAL


@pytest.mark.parametrize("missing", ["ram_total_bytes", "ram_available_bytes"])
def test_an_unread_memory_is_unknown_and_neither_normal_nor_critical(missing: str) -> None:
    verdict = judge(None, reading(10, **{missing: None}), 0.0)
    assert verdict.level == UNKNOWN
    assert verdict.pressure_pct is None
    assert signals(verdict) == ["available"]


def test_a_reading_that_fails_does_not_make_a_node_forget_its_level() -> None:
    lost = reading(10, ram_available_bytes=None)
    assert levels([reading(0.5), lost, reading(10)]) == [CRITICAL, UNKNOWN, CRITICAL]
    assert levels([reading(10), lost, reading(10)]) == [NORMAL, UNKNOWN, NORMAL]
    assert levels([lost, reading(0.5)]) == [UNKNOWN, CRITICAL]


amounts = st.none() | st.integers(0, 2**50)
stalls = st.none() | st.builds(
    Stall,
    st.none() | st.integers(0, 2**40),
    st.none() | st.integers(0, 2**40),
    st.none() | st.floats(0, 100),
    st.none() | st.floats(0, 100),
)
readings = st.builds(
    Reading,
    source=st.just(node_pb2.MEMORY_SOURCE_PROCFS),
    ram_total_bytes=amounts,
    ram_available_bytes=amounts,
    swap_total_bytes=amounts,
    swap_available_bytes=st.none() | st.integers(0, 2**20),
    cgroup_limit_bytes=st.none() | st.integers(1, 2**50),
    cgroup_available_bytes=amounts,
    host_stall=stalls,
    cgroup_stall=stalls,
    oom_events=amounts,
    limit_events=amounts,
    arc_bytes=amounts,
    own_bytes=amounts,
    commit_limit_bytes=amounts,
    commit_available_bytes=amounts,
    darwin=st.none()
    | st.builds(
        Darwin,
        st.none() | st.sampled_from([NORMAL, WARNING, CRITICAL, UNKNOWN]),
        st.builds(Pages, **dict.fromkeys(Pages._fields, amounts)),
        amounts,
    ),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(readings, max_size=6), st.sampled_from([0.0, 0.5, 20.0]))
def test_any_history_gives_a_level_with_its_reasons(history: list[Reading], period_s: float) -> None:
    before = 0
    for verdict in judged(history, period_s):
        assert verdict.level in {NORMAL, WARNING, CRITICAL, UNKNOWN}
        assert (verdict.pressure_pct is None) == (verdict.level == UNKNOWN)
        assert verdict.pressure_pct is None or 0 <= verdict.pressure_pct <= 100
        assert (verdict.level == NORMAL) == (not verdict.reasons)
        assert max((reason.level for reason in verdict.reasons), default=NORMAL) == verdict.level
        assert not (before == CRITICAL and verdict.level == NORMAL)
        before = verdict.level if verdict.level != UNKNOWN else before


@pytest.mark.parametrize(
    ("available_gib", "own_gib", "level"),
    [
        (4, 50, NORMAL),  # Filled as far as balanced allows: K of 64 GiB is 3.2.
        (4, 0, WARNING),
        (1.3, 50, WARNING),
        (0.6, 50, CRITICAL),
        (0.6, 64, WARNING),  # However much is ours, the bounds of 4 GiB stay.
        (0.4, 64, CRITICAL),
    ],
)
def test_what_our_own_shards_hold_does_not_raise_the_bounds(
    available_gib: float, own_gib: int, level: node_pb2.PressureLevel.ValueType
) -> None:
    loaded = reading(available_gib, ram_total_bytes=64 * GIB, own_bytes=own_gib * GIB)
    assert judge(None, loaded, 0.0).level == level


def test_a_node_filled_as_far_as_balanced_allows_is_not_critical() -> None:
    for total_gib in (2, 4, 8, 16, 32, 64, 128, 512):
        empty = reading(total_gib * 0.9, ram_total_bytes=total_gib * GIB)
        given_bytes = estimate(empty, NORMAL, None).balanced_bytes
        assert given_bytes is not None
        left = (empty.available_bytes or 0) - given_bytes
        loaded = empty._replace(ram_available_bytes=left, own_bytes=given_bytes)
        assert judge(None, loaded, 0.0).level < CRITICAL


def test_stalls_count_whoever_caused_them() -> None:
    ours = [reading(6, own_bytes=12 * GIB, host_stall=Stall(0, 250_000 * index, 0.0, 0.0)) for index in range(5)]
    assert levels(ours)[-1] == CRITICAL


def test_what_a_v1_cgroup_announces_counts_when_it_is_seen_again_and_there_is_no_ample_room() -> None:
    hard = reading(5, reclaim_alarm=True)
    assert levels([reading(5), hard, reading(5), hard, hard]) == [NORMAL] * 4 + [WARNING]
    assert signals(judged([hard, hard])[-1]) == ["reclaim"]
    assert levels([reading(15, reclaim_alarm=True)] * 3) == [NORMAL] * 3


def test_the_kernels_trigger_needs_no_second_look() -> None:
    verdicts = judged([reading(5, host_stall=stalled(0)), reading(5, host_stall=stalled(0), stall_alarm=True)])
    assert [verdict.level for verdict in verdicts] == [NORMAL, WARNING]
    assert signals(verdicts[1]) == ["psi_trigger"]
    seen = judged([reading(5, host_stall=stalled(0)), reading(5, host_stall=stalled(0.3, 0.3), stall_alarm=True)])
    assert [verdict.level for verdict in seen] == [NORMAL, WARNING]
    assert signals(seen[1]) == ["psi_full", "psi_some"]
