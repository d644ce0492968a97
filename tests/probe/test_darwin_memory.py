"""macOS from what real machines printed: the pages, the level by the kernel's rule, and what could be given."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.probe.darwin import estimator as darwin_estimator
from services.probe.darwin import host_statistics, vm_stat
from services.probe.darwin.estimator import Figures, compression_ratio, device_limit_bytes
from services.probe.darwin.signs import kernel_rule
from services.probe.estimator import Estimate, estimate
from services.probe.pressure import Verdict, judge
from services.probe.reading import Darwin, Pages, Reading
from tests.probe.libsystem import packed
from ullage.v1 import node_pb2

RECORDED = Path(__file__).parents[1] / "recorded/vm_stat"
GIB = 1 << 30

NORMAL = node_pb2.PRESSURE_LEVEL_NORMAL
WARNING = node_pb2.PRESSURE_LEVEL_WARNING
CRITICAL = node_pb2.PRESSURE_LEVEL_CRITICAL
UNKNOWN = node_pb2.PRESSURE_LEVEL_UNKNOWN

TOTAL_GIB = {"a": 8, "b": 16, "c": 32, "e": 32, "g": 48, "j": 64}
COMPLETE = sorted(TOTAL_GIB)


def recorded(name: str) -> Pages:
    pages = vm_stat.parse((RECORDED / f"{name}.txt").read_bytes(), 4096)
    assert pages is not None
    return pages


def reading(pages: Pages, total: int = 64 * GIB, level: node_pb2.PressureLevel.ValueType | None = NORMAL) -> Reading:
    return Reading(
        node_pb2.MEMORY_SOURCE_VM_STAT,
        ram_total_bytes=total,
        ram_available_bytes=pages.reclaimable_bytes,
        wired_bytes=pages.wired_bytes,
        darwin=Darwin(level, pages),
    )


@pytest.mark.parametrize(
    ("name", "pages", "page_size"),
    [("a", 94084, 4096), ("b", 1134068, 4096), ("c", 7219397, 4096), ("e", 511917, 16384), ("g", 553157, 16384),
     ("j", 1465281, 16384), ("n", 2398682, 16384)],
)  # fmt: skip
def test_what_can_be_had_without_compressing_is_exact(name: str, pages: int, page_size: int) -> None:
    assert recorded(name).reclaimable_bytes == pages * page_size


@pytest.mark.parametrize("name", COMPLETE)
def test_file_backed_and_anonymous_pages_are_those_in_the_queues(name: str) -> None:
    assert recorded(name).surplus_bytes == 0


@pytest.mark.parametrize("name", COMPLETE)
def test_every_recorded_machine_is_normal_by_the_kernels_rule(name: str) -> None:
    assert kernel_rule(recorded(name)) == NORMAL


def figures(made: Reading, level: node_pb2.PressureLevel.ValueType) -> Figures:
    assert made.darwin is not None
    return darwin_estimator.figures(made, made.darwin, level)


def compressed(uncompressed: int, compressor: int) -> Pages:
    return Pages(
        free_bytes=uncompressed, active_bytes=0, inactive_bytes=0, speculative_bytes=0, compressor_bytes=compressor
    )


@pytest.mark.parametrize(
    ("uncompressed", "compressor", "level"),
    [
        (39499 + 35352 + 3589, 121875, WARNING),  # recorded m: a share of 0.392
        (50, 50, NORMAL),
        (49, 51, WARNING),
        (12, 23, WARNING),
        (119, 231, CRITICAL),
    ],
)
def test_the_kernels_rule_is_the_compressors_share_of_what_is_not_wired(
    uncompressed: int, compressor: int, level: node_pb2.PressureLevel.ValueType
) -> None:
    assert kernel_rule(compressed(uncompressed, compressor)) == level


@pytest.mark.parametrize(
    ("name", "strict_gib", "balanced_gib", "ceiling_gib"),
    [("a", 0.0, 0.0, 5.48), ("b", 3.33, 4.16, 13.29), ("c", 26.54, 26.68, 28.27), ("e", 6.81, 9.96, 29.13),
     ("g", 7.44, 12.51, 42.48), ("j", 21.08, 24.64, 58.39)],
)  # fmt: skip
def test_what_a_recorded_machine_can_give(
    name: str, strict_gib: float, balanced_gib: float, ceiling_gib: float
) -> None:
    given_bytes = figures(reading(recorded(name), TOTAL_GIB[name] * GIB), NORMAL)
    assert [round((size or 0) / GIB, 2) for size in given_bytes[:3]] == [strict_gib, balanced_gib, ceiling_gib]
    assert not given_bytes.coarse


@pytest.mark.parametrize("name", COMPLETE)
@pytest.mark.parametrize("level", [NORMAL, WARNING, CRITICAL, UNKNOWN])
@pytest.mark.parametrize("limit", [None, 4 * GIB])
def test_strict_is_at_most_balanced_and_that_at_most_the_ceiling_under_every_level(
    name: str, level: node_pb2.PressureLevel.ValueType, limit: int | None
) -> None:
    made = reading(recorded(name), TOTAL_GIB[name] * GIB)._replace(device_limit_bytes=limit)
    strict, balanced, ceiling, _ = estimate(made, level, None)
    assert strict is not None
    assert balanced is not None
    assert ceiling is not None
    assert 0 <= strict <= balanced <= ceiling <= (limit or TOTAL_GIB[name] * GIB)


def test_under_warning_nothing_more_is_to_be_compressed() -> None:
    given_bytes = figures(reading(recorded("g"), 48 * GIB), WARNING)
    assert given_bytes.balanced_bytes == given_bytes.strict_bytes


def test_a_shards_own_memory_is_never_counted_on_for_compressing() -> None:
    made = reading(recorded("g"), 48 * GIB)
    all_ours = made._replace(own_bytes=48 * GIB)
    assert figures(all_ours, NORMAL).balanced_bytes == figures(made, NORMAL).strict_bytes


def test_without_the_compressors_part_the_figures_are_coarse_and_low() -> None:
    pages = recorded("g")._replace(compressor_bytes=None, wired_bytes=None)
    strict, balanced, ceiling, coarse = figures(reading(pages, 48 * GIB), NORMAL)
    assert (strict, balanced, coarse) == (ceiling, ceiling, True)
    assert strict == 553157 * 16384 - GIB


def test_without_pages_the_figures_are_total_less_used_or_unknown() -> None:
    made = reading(Pages(), 24 * GIB)
    assert figures(made, NORMAL) == Figures()
    assert figures(made._replace(ram_available_bytes=4784324608), NORMAL) == Figures(
        4784324608 - GIB, 4784324608 - GIB, 4784324608 - GIB, coarse=True
    )
    assert estimate(made, NORMAL, None) == Estimate(None, None, None)


@pytest.mark.parametrize(
    ("held", "stored", "ratio"), [(10, 20, 2.0), (10, 11, 1.5), (10, 90, 3.0), (0, 0, 1.5), (None, 5, 1.5)]
)
def test_how_well_memory_compresses_is_taken_within_what_is_prudent(
    held: int | None, stored: int | None, ratio: float
) -> None:
    assert compression_ratio(Pages(compressor_bytes=held, compressed_bytes=stored)) == ratio


def test_the_devices_limit_is_the_operators_or_assumed() -> None:
    assert device_limit_bytes(114688, 128 * GIB) == (112 * GIB, False)
    assert device_limit_bytes(1 << 50, 128 * GIB) == (128 * GIB, False)
    assert device_limit_bytes(0, 100 * GIB) == (85 * GIB, True)
    assert device_limit_bytes(None, 100 * GIB) == (85 * GIB, True)
    assert device_limit_bytes(None, None) == (None, False)


def judged(*readings: Reading, period_s: float = 0.5) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for index, each in enumerate(readings):
        verdicts.append(judge(verdicts[-1] if verdicts else None, each, 1000.0 + index * period_s))
    return verdicts


CALM = recorded("c")


@pytest.mark.parametrize("level", [NORMAL, WARNING, CRITICAL])
def test_the_kernels_level_is_taken(level: node_pb2.PressureLevel.ValueType) -> None:
    verdict = judge(None, reading(CALM, 32 * GIB, level), 0.0)
    assert verdict.level == level
    assert [reason.signal for reason in verdict.reasons] == ([] if level == NORMAL else ["kernel_level"])


def test_a_level_that_is_none_is_unknown_and_not_made_up_for() -> None:
    verdict = judge(None, reading(CALM, 32 * GIB, UNKNOWN), 0.0)
    assert (verdict.level, verdict.pressure_pct) == (UNKNOWN, None)
    assert verdict.reasons[0].detail == "the kernel's pressure level is none of 1, 2 and 4"


def test_a_level_that_cannot_be_asked_is_unknown_and_says_what_the_page_counts_would_make_it() -> None:
    pressed = compressed(39499 + 35352 + 3589, 121875)
    for pages, hint in ((CALM, "NORMAL"), (pressed, "WARNING")):
        verdict = judge(None, reading(pages, 8 * GIB, None), 0.0)
        assert (verdict.level, verdict.pressure_pct) == (UNKNOWN, None)
        assert verdict.reasons[0].detail == (
            f"the kernel's pressure level cannot be read; by its rule the page counts would make it {hint}"
        )
    nothing = judge(None, reading(Pages(), 8 * GIB, None), 0.0)
    assert (nothing.level, nothing.reasons[0].detail) == (UNKNOWN, "the kernel's pressure level cannot be read")


def test_next_to_no_free_memory_is_no_sign() -> None:
    # psutil 923: 14 MiB free of 8 GiB.
    pages = CALM._replace(free_bytes=14966784)
    assert judge(None, reading(pages, 8 * GIB), 0.0).level == NORMAL


def test_a_full_swap_is_a_warning_though_the_kernel_says_normal() -> None:
    # continuum 3877: 40.0 of 40.9 GB used on 128 GiB.
    swapping = reading(CALM, 128 * GIB)._replace(swap_total_bytes=40_900_000_000, swap_available_bytes=900_000_000)
    verdict = judge(None, swapping, 0.0)
    assert verdict.level == WARNING
    assert verdict.reasons[0].detail == "37.25 GiB of swap used, more than 25 % of the memory"
    half = swapping._replace(swap_total_bytes=20_000_000_000)
    assert judge(None, half, 0.0).level == NORMAL


def flowing(swapped_mib_per_reading: int, count: int) -> list[Reading]:
    return [
        reading(CALM._replace(swapped_out_bytes=index * swapped_mib_per_reading << 20), 32 * GIB)
        for index in range(count)
    ]


def test_writing_to_swap_warns_and_a_flood_of_it_is_critical() -> None:
    assert [verdict.level for verdict in judged(*flowing(0, 12))] == [NORMAL] * 12
    slow = judged(*flowing(1, 12))
    assert [verdict.level for verdict in slow] == [NORMAL] * 4 + [WARNING] * 8
    assert slow[-1].reasons[0].detail == "0.00 GiB written to swap in 2 s"
    flood = judged(*flowing(33, 12))
    assert [verdict.level for verdict in flood] == [NORMAL] * 4 + [WARNING] * 6 + [CRITICAL] * 2


def test_a_compressor_that_grows_fast_warns() -> None:
    growing = [reading(CALM._replace(compressor_bytes=index * (90 << 20)), 32 * GIB) for index in range(22)]
    assert [verdict.level for verdict in judged(*growing)] == [NORMAL] * 20 + [WARNING] * 2


def test_a_rise_over_a_longer_time_counts_for_its_part_of_the_window() -> None:
    # Once a minute: 400 MiB to swap are 13 MiB in 2 s and 33 in 5, and 0.85 GiB of 16 are 0.9 % in 10 s.
    assert [verdict.level for verdict in judged(*flowing(400, 3), period_s=60.0)] == [NORMAL, WARNING, WARNING]
    growing = [reading(CALM._replace(compressor_bytes=index * (870 << 20)), 16 * GIB) for index in range(3)]
    assert [verdict.level for verdict in judged(*growing, period_s=60.0)] == [NORMAL] * 3


def test_the_kernels_level_is_held_too() -> None:
    verdicts = judged(reading(CALM, 32 * GIB, CRITICAL), *[reading(CALM, 32 * GIB, NORMAL)] * 90, period_s=0.5)
    assert [verdict.level for verdict in verdicts] == [CRITICAL] * 21 + [WARNING] * 61 + [NORMAL] * 9
    assert verdicts[1].reasons[0].detail == "held until nothing has said so any more for 10 s"


@pytest.mark.parametrize(("compressor", "pct"), [(0, 0.0), (35, 35.0), (50, 50.0), (100, 100.0)])
def test_the_pressure_follows_the_compressors_share(compressor: int, pct: float) -> None:
    verdict = judge(None, reading(compressed(100 - compressor, compressor), GIB, NORMAL), 0.0)
    assert verdict.pressure_pct == pytest.approx(pct)


@pytest.mark.parametrize("name", COMPLETE)
@pytest.mark.parametrize("count", [38, 40, 62])
def test_the_structure_of_every_release_gives_what_vm_stat_prints(name: str, count: int) -> None:
    pages, page_size = recorded(name), 4096 if name in {"a", "b", "c"} else 16384
    assert host_statistics.parse(packed(pages, page_size, count), count, page_size) == pages


def test_a_structure_that_is_short_or_contradicts_itself_is_not_believed() -> None:
    buffer = packed(recorded("j"), 16384)
    assert host_statistics.parse(buffer, 37, 16384) is None
    assert host_statistics.parse(buffer[:100], 38, 16384) is None
    assert host_statistics.parse(buffer, 38, 8192) is None
    assert host_statistics.parse(buffer[4:] + b"\0\0\0\0", 38, 16384) is None


def test_the_page_size_is_read_and_never_guessed() -> None:
    text = (RECORDED / "m11.txt").read_bytes()
    pages = vm_stat.parse(text)
    assert pages is not None
    held = (pages.uncompressed_bytes or 0) + (pages.wired_bytes or 0) + (pages.compressor_bytes or 0)
    assert held == 1550736 * 16384  # 23.66 GiB
    assert vm_stat.parse(text.partition(b"\n")[2]) is None
    assert vm_stat.parse(text.replace(b"16384", b"16385")) is None
    old = b"(page size of 4096 bytes)\nPages free: 90518.\nPages active: 205479.\nPages wired down: 61009.\n"
    assert vm_stat.parse(old) == Pages(free_bytes=90518 * 4096, active_bytes=205479 * 4096, wired_bytes=61009 * 4096)


def test_a_missing_line_of_file_backed_pages_follows_from_the_others() -> None:
    assert recorded("m").file_backed_bytes == (39499 + 35352 - 48250) * 16384
    assert recorded("d").file_backed_bytes is None


sizes = st.none() | st.integers(0, 2**62)


@settings(deadline=None)
@given(st.builds(Pages, **dict.fromkeys(Pages._fields, sizes)), sizes, sizes, sizes, st.sampled_from([NORMAL, WARNING]))
def test_the_order_of_the_estimators_holds_for_any_pages(
    pages: Pages, total: int | None, limit: int | None, own: int | None, level: node_pb2.PressureLevel.ValueType
) -> None:
    made = Reading(
        node_pb2.MEMORY_SOURCE_SYSCTL,
        ram_total_bytes=total,
        ram_available_bytes=pages.reclaimable_bytes,
        wired_bytes=pages.wired_bytes,
        device_limit_bytes=limit,
        own_bytes=own,
        darwin=Darwin(level, pages),
    )
    strict, balanced, ceiling, _ = figures(made, level)
    if strict is None or balanced is None or ceiling is None:
        assert (strict, balanced, ceiling) == (None, None, None)
    else:
        assert 0 <= strict <= balanced <= ceiling
