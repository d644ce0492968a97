"""What every sampler keeps, on recorded and on real machines."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.clock import SystemClock
from services.probe.darwin import sysctl, vm_stat
from services.probe.darwin.sampler import DarwinSampler, MacmonMemory, Seen
from services.probe.estimator import estimate
from services.probe.failures import Failures
from services.probe.linux.sampler import LinuxSampler
from services.probe.machine import MACHINE_ROOT, find
from services.probe.memory_sample import memory_sample
from services.probe.pressure import judge
from services.probe.psutil_sampler import PsutilSampler
from services.probe.reading import Reading
from services.probe.sampler import Sampler
from services.probe.windows import memory as windows
from services.probe.windows.sampler import WindowsSampler
from tests.probe.libsystem import Call
from ullage.v1 import node_pb2

RECORDED = Path(__file__).parents[1] / "recorded"
GIB = 1 << 30


class Said:
    """A source of macOS that says the same every time."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def read(self) -> Seen:
        return self._seen

    def memory(self) -> MacmonMemory | None:
        return None


def structure(commit: int, limit: int, physical: int, available: int, page: int = 4096) -> bytes:
    """PERFORMANCE_INFORMATION, in pages."""
    return struct.pack("<I4x10Q3I4x", 104, commit, limit, 0, physical, available, 0, 0, 0, 0, page, 1, 2, 3)


class Kernel32:
    """Windows' kernel32, with a machine that is as given. A low signal of None fails."""

    def __init__(self, written: bytes, *, low: bool | None) -> None:
        self._written = written
        self._low = low
        self.QueryMemoryResourceNotification = Call(self._query)
        self.CreateMemoryResourceNotification = Call(lambda _: 7)

    def K32GetPerformanceInfo(self, buffer: ctypes.Array[ctypes.c_char], size: int) -> int:
        buffer.raw = self._written[:size]
        return len(self._written)

    def _query(self, _: object, state: Any) -> int:
        state._obj.value = int(self._low or 0)
        return self._low is not None


HALF_FULL = structure(4 << 18, 24 << 18, 16 << 18, 9 << 18)


def mac() -> Sampler:
    pages = vm_stat.parse((RECORDED / "vm_stat/g.txt").read_bytes())
    said = Said(Seen({sysctl.TOTAL: 48 * GIB, sysctl.LEVEL: 1}, sysctl.Swap(GIB, GIB), pages))
    return DarwinSampler(said, said, said)


SAMPLERS: dict[str, Callable[[], Sampler]] = {
    "this machine": lambda: find(MACHINE_ROOT, Path("/nowhere"), SystemClock(), Failures()).sampler,
    "linux": lambda: LinuxSampler(RECORDED / "proc/normal", Failures()),
    "mac": mac,
    "windows": lambda: WindowsSampler(Kernel32(HALF_FULL, low=False), Failures()),
    "psutil": lambda: PsutilSampler(Failures()),
}

BLIND: dict[str, Callable[[], Sampler]] = {
    "linux": lambda: LinuxSampler(Path("/nowhere"), Failures()),
    "mac": lambda: DarwinSampler(None, Said(Seen({})), Said(Seen({}))),
    "windows": lambda: WindowsSampler(Kernel32(b"", low=None), Failures()),
}


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_a_reading_has_a_source_a_total_and_no_more_available_than_that(name: str) -> None:
    reading = SAMPLERS[name]().read()
    assert isinstance(reading, Reading)
    assert reading.source != node_pb2.MEMORY_SOURCE_UNSPECIFIED
    assert reading.total_bytes is not None
    assert reading.available_bytes is not None
    assert 0 < reading.available_bytes <= reading.total_bytes
    assert all(value >= 0 for value in reading if isinstance(value, int))


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_a_reading_makes_a_level_and_three_figures_in_order(name: str) -> None:
    reading = SAMPLERS[name]().read()
    verdict = judge(None, reading, 0.0)
    sample = memory_sample(reading, verdict, estimate(reading, verdict.level, None), 0)
    assert verdict.level != node_pb2.PRESSURE_LEVEL_UNKNOWN
    assert sample.HasField("strict_available_bytes")
    assert sample.strict_available_bytes <= sample.balanced_available_bytes <= sample.ceiling_available_bytes


@pytest.mark.parametrize("name", sorted(BLIND))
def test_a_machine_that_says_nothing_is_unknown_and_nothing_is_raised(name: str) -> None:
    sampler = BLIND[name]()
    for _ in range(3):
        reading = sampler.read()
    assert (reading.total_bytes, reading.available_bytes) == (None, None)
    assert judge(None, reading, 0.0).level == node_pb2.PRESSURE_LEVEL_UNKNOWN
    sample = memory_sample(
        reading, judge(None, reading, 0.0), estimate(reading, node_pb2.PRESSURE_LEVEL_UNKNOWN, None), 0
    )
    assert not [field.name for field, _ in sample.ListFields() if field.name.endswith("_bytes")]


def windows_reading(written: bytes, *, low: bool | None = False) -> Reading:
    return WindowsSampler(Kernel32(written, low=low), Failures()).read()


def test_windows_gives_what_is_physical_and_what_may_be_committed() -> None:
    reading = windows_reading(HALF_FULL)
    assert (reading.total_bytes, reading.ram_available_bytes) == (16 * GIB, 9 * GIB)
    assert (reading.commit_limit_bytes, reading.commit_available_bytes) == (24 * GIB, 20 * GIB)
    assert reading.available_bytes == 9 * GIB
    assert (reading.memory_low, reading.clamped) == (False, False)


@pytest.mark.parametrize(
    ("commit_gib", "level", "signal"),
    [(20, node_pb2.PRESSURE_LEVEL_NORMAL, None), (22, node_pb2.PRESSURE_LEVEL_WARNING, "commit"),
     (23, node_pb2.PRESSURE_LEVEL_CRITICAL, "commit")],
)  # fmt: skip
def test_windows_refuses_by_the_commit_charge_whatever_is_free(
    commit_gib: int, level: node_pb2.PressureLevel.ValueType, signal: str | None
) -> None:
    reading = windows_reading(structure(commit_gib << 18, 24 << 18, 16 << 18, 9 << 18))
    assert reading.available_bytes == min(9, 24 - commit_gib) * GIB
    verdict = judge(None, reading, 0.0)
    assert verdict.level == level
    assert signal is None or signal in {reason.signal for reason in verdict.reasons}


def test_windows_signal_of_low_memory_is_critical() -> None:
    verdict = judge(None, windows_reading(HALF_FULL, low=True), 0.0)
    assert [reason.signal for reason in verdict.reasons] == ["memory_low"]
    assert verdict.level == node_pb2.PRESSURE_LEVEL_CRITICAL


@pytest.mark.parametrize(
    "written", [b"", HALF_FULL[4:] + b"\0" * 4, structure(1, 2, 3, 1, page=1000), structure(1, 2, 0, 0)]
)
def test_a_structure_of_windows_that_makes_no_sense_is_unknown(written: bytes) -> None:
    assert windows.parse(written) is None
    assert windows_reading(written).total_bytes is None
    assert windows.parse(HALF_FULL[:-1]) is None


def test_more_committed_than_the_limit_is_clamped() -> None:
    reading = windows_reading(structure(25 << 18, 24 << 18, 16 << 18, 17 << 18))
    assert (reading.commit_available_bytes, reading.ram_available_bytes, reading.clamped) == (0, 16 * GIB, True)


@pytest.mark.skipif(sys.platform != "linux", reason="the other machines are not this one")
def test_this_machine_is_read_by_its_own_sampler() -> None:
    assert SAMPLERS["this machine"]().read().source == node_pb2.MEMORY_SOURCE_PROCFS
