"""The macOS sampler: what its sources say makes one reading, whichever of them fail."""

from __future__ import annotations

import asyncio
import struct
import subprocess
import time
from pathlib import Path

import pytest

from services.clock import SystemClock
from services.probe.darwin import macmon, sysctl, vm_stat
from services.probe.darwin.commands import Commands
from services.probe.darwin.helper import MacmonHelper
from services.probe.darwin.macmon import Macmon
from services.probe.darwin.sampler import DarwinSampler, MacmonMemory, Seen, conclude
from services.probe.darwin.sysctl import Printed, Swap
from services.probe.failures import Failures
from services.probe.reading import Pages, Reading
from tests.clocks import FakeClock
from ullage.v1 import node_pb2

RECORDED = Path(__file__).parents[1] / "recorded"
GIB = 1 << 30

SYSCTL = node_pb2.MEMORY_SOURCE_SYSCTL
VM_STAT = node_pb2.MEMORY_SOURCE_VM_STAT
NORMAL = node_pb2.PRESSURE_LEVEL_NORMAL
UNKNOWN = node_pb2.PRESSURE_LEVEL_UNKNOWN


class Said:
    """A source, or a helper, that says the same every time."""

    def __init__(self, seen: Seen = Seen({}), memory: MacmonMemory | None = None) -> None:  # noqa: B008 - immutable
        self._seen = seen
        self._memory = memory

    def read(self) -> Seen:
        return self._seen

    def memory(self) -> MacmonMemory | None:
        return self._memory


def pages(name: str = "g") -> Pages:
    found = vm_stat.parse((RECORDED / f"vm_stat/{name}.txt").read_bytes())
    assert found is not None
    return found


NUMBERS = {sysctl.TOTAL: 48 * GIB, sysctl.USABLE: 47 * GIB, sysctl.LEVEL: 1, sysctl.WIRED_LIMIT_MB: 0}


def test_the_library_alone_makes_a_whole_reading() -> None:
    reading = DarwinSampler(Said(Seen(NUMBERS, Swap(8 * GIB, GIB), pages())), Said(), Said()).read()
    assert reading.source == SYSCTL
    assert (reading.ram_total_bytes, reading.ram_available_bytes) == (48 * GIB, 553157 * 16384)
    assert (reading.swap_total_bytes, reading.swap_available_bytes) == (8 * GIB, GIB)
    assert reading.wired_bytes == 295974 * 16384
    assert (reading.device_limit_bytes, reading.device_limit_assumed) == (48 * GIB * 85 // 100, True)
    assert reading.darwin is not None
    assert (reading.darwin.kernel_level, reading.darwin.usable_bytes) == (NORMAL, 47 * GIB)
    assert (reading.coarse, reading.clamped) == (False, False)


def test_the_commands_stand_in_for_a_library_that_is_missing_or_says_half() -> None:
    commands = Said(Seen(NUMBERS, Swap(), pages()))
    assert DarwinSampler(None, commands, Said()).read().source == VM_STAT
    half = DarwinSampler(Said(Seen({sysctl.LEVEL: 1}, Swap(GIB, GIB))), commands, Said()).read()
    assert (half.source, half.ram_total_bytes, half.swap_total_bytes) == (VM_STAT, 48 * GIB, GIB)
    no_level = DarwinSampler(Said(Seen({sysctl.TOTAL: 48 * GIB}, Swap(), pages())), commands, Said()).read()
    assert no_level.source == SYSCTL
    assert no_level.darwin is not None
    assert no_level.darwin.kernel_level == NORMAL


def test_the_page_counts_of_sysctl_do_without_wired_and_compressor() -> None:
    counts = {
        sysctl.PAGE_SIZE: 16384,
        "vm.page_free_count": 50667,
        "vm.page_purgeable_count": 16362,
        "vm.page_pageable_external_count": 486128,
    }
    reading = conclude(Seen(NUMBERS | counts), SYSCTL, None)
    assert reading.ram_available_bytes == 553157 * 16384
    assert (reading.wired_bytes, reading.coarse) == (None, True)


def test_macmon_stands_in_for_memory_that_nobody_else_tells() -> None:
    helper = Said(memory=MacmonMemory(25769803776, 20985479168, Swap(4294967296, 1692526976)))
    reading = DarwinSampler(None, Said(), helper).read()
    assert reading.source == node_pb2.MEMORY_SOURCE_MACMON
    assert (reading.ram_total_bytes, reading.ram_available_bytes) == (25769803776, 4784324608)
    assert (reading.swap_total_bytes, reading.swap_available_bytes) == (4294967296, 1692526976)
    beside = DarwinSampler(Said(Seen(NUMBERS, Swap(), pages())), Said(), helper).read()
    assert (beside.source, beside.ram_total_bytes) == (SYSCTL, 48 * GIB)


def test_a_mac_that_says_nothing_is_unknown_and_not_zero() -> None:
    reading = DarwinSampler(None, Said(), Said()).read()
    assert (reading.ram_total_bytes, reading.ram_available_bytes, reading.swap_total_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("value", "level"),
    [(1, NORMAL), (2, node_pb2.PRESSURE_LEVEL_WARNING), (4, node_pb2.PRESSURE_LEVEL_CRITICAL), (0, UNKNOWN),
     (3, UNKNOWN), (8, UNKNOWN), (12345, UNKNOWN), (None, None)],
)  # fmt: skip
def test_the_kernels_numbers_are_levels_or_unknown(
    value: int | None, level: node_pb2.PressureLevel.ValueType | None
) -> None:
    assert sysctl.level(value) == level


def test_an_integer_of_the_kernel_has_four_or_eight_bytes() -> None:
    assert sysctl.number(b"\x02\0\0\0") == 2
    assert sysctl.number((48 * GIB).to_bytes(8, "little")) == 48 * GIB
    assert [sysctl.number(value) for value in (b"", b"\x01", b"\xff" * 8, b"\xff" * 4)] == [None] * 4


def test_the_swap_structure_gives_what_is_left() -> None:
    structure = struct.pack("<QQQII", 4 * GIB, GIB, 3 * GIB, 16384, 1)
    assert sysctl.swap(structure) == Swap(4 * GIB, GIB)
    assert sysctl.swap(structure[:-1]) == Swap()


@pytest.mark.parametrize("line", [b"hw.memsize: 5", b"hw.memsize:5", b"hw.memsize: 5\r", b"hw.memsize:\t5"])
def test_a_line_of_the_command_is_read_however_it_is_spaced(line: bytes) -> None:
    assert sysctl.parse(b"hw.model: Mac16,5\n" + line + b"\n").numbers == {sysctl.TOTAL: 5}


@pytest.mark.parametrize("point", [b".", b","])
def test_what_the_command_prints_is_read_in_any_language(point: bytes) -> None:
    text = (
        b"kern.memorystatus_vm_pressure_level: 2\nhw.memsize: 17179869184\nvm.page_free_count: 12216\n"
        b"vm.swapusage: total = 2048.00M  used = 1024.50M  free = 1023.50M  (encrypted)\niogpu.wired_limit_mb: -1\n"
    )
    assert sysctl.parse(text.replace(b".00M", point + b"00M").replace(b".50M", point + b"50M")) == Printed(
        {"kern.memorystatus_vm_pressure_level": 2, "hw.memsize": 17179869184, "vm.page_free_count": 12216},
        Swap(2 * GIB, 2 * GIB - int(1024.5 * 2**20)),
    )


def test_a_new_and_an_old_line_of_macmon_say_the_same_things() -> None:
    (old,) = macmon.parse((RECORDED / "macmon/v0.6.json").read_bytes())
    (new,) = macmon.parse((RECORDED / "macmon/v0.8.json").read_bytes())
    assert old.memory == MacmonMemory(17179869184, 10585292800, Swap(2147483648, 1119682560))
    assert old.efficiency_cores_pct == pytest.approx(8.651, abs=1e-3)
    assert old.cpu_celsius == pytest.approx(44.509, abs=1e-3)
    assert old.gpu_celsius is None
    assert new.memory == MacmonMemory(68719476736, 28706603008, Swap(7516192768, 1814298624))
    assert new.cpu_pct == pytest.approx(11.302, abs=1e-3)
    assert new.gpu_pct == pytest.approx(20.722, abs=1e-3)
    assert new.system_watts == pytest.approx(18.952, abs=1e-3)


MEMORY = b""""memory":
 {"ram_total": 25769803776, "ram_usage": 20985479168, "swap_total": 4294967296, "swap_usage": 2602434560}"""
TOLD = MacmonMemory(25769803776, 20985479168, Swap(4294967296, 1692532736))


@pytest.mark.parametrize(
    "line",
    [
        b'{"ecpu_usage": [1172, 0.5], "temp": {"cpu_temp_avg": 44.5}, ' + MEMORY + b"}\n",
        b'{"ecpu_scaled_ratio": 0.5, "ecpu_freq_mhz": 1172, "fans": [], ' + MEMORY + b"}\n",
        b'{"ecpu_usage": "none", "temp": 5, "sys_power": [], ' + MEMORY + b"}\n",
        b"{" + MEMORY + b'}\n{"memory": {"ram_tot',
        b'{"memory": {}}{' + MEMORY + b"}",
        b'{"core": "' + b"x" * 8192 + b'", ' + MEMORY + b"}",
    ],
)
def test_memory_stands_by_itself_in_every_line(line: bytes) -> None:
    assert macmon.parse(line)[-1].memory == TOLD


@pytest.mark.parametrize("line", [b"", b"{", b"thread panicked\n", b"[1, 2]", b'{"memory": {"ram_total"', b"{" * 5000])
def test_a_line_that_is_no_object_says_nothing(line: bytes) -> None:
    assert macmon.parse(line) == []


def test_memory_that_contradicts_itself_is_unknown() -> None:
    assert macmon.parse(b'{"memory": {"ram_total": 1, "ram_usage": 2}}') == [Macmon()]
    assert macmon.parse(b'{"memory": {"ram_total": true, "ram_usage": -2}}') == [Macmon()]


def script(folder: Path, name: str, body: str) -> str:
    """A program. A shell writes it: what this process has open to write, a thread that forks meanwhile has open too."""
    path = folder / name
    written = f"#!/bin/sh\n{body}\n".encode()
    subprocess.run(["/bin/sh", "-c", 'cat > "$1" && chmod 755 "$1"', "sh", path], input=written, check=True)
    return str(path)


def commands(
    folder: Path, sysctl_body: str, vm_stat_body: str, failures: Failures, *, seconds_max: float = 60.0
) -> Commands:
    return Commands(
        SystemClock(),
        failures,
        sysctl_command=(script(folder, "sysctl", sysctl_body),),
        vm_stat_command=(script(folder, "vm_stat", vm_stat_body),),
        seconds_max=seconds_max,
    )


def test_the_commands_answer_without_keeping_anybody_waiting(tmp_path: Path) -> None:
    failures, may_answer = Failures(), tmp_path / "may_answer"
    asked = commands(
        tmp_path,
        f"while [ ! -e {may_answer} ]; do sleep 0.01; done; "
        f"echo hw.memsize: {48 * GIB}; echo kern.memorystatus_vm_pressure_level: 1; echo lang.$LC_ALL: 1; exit 1",
        f"cat {RECORDED}/vm_stat/g.txt",
        failures,
    )
    assert asked.read() == Seen({})
    may_answer.touch()
    end_s = time.monotonic() + 60
    while (seen := asked.read()) == Seen({}) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert seen.numbers == {sysctl.TOTAL: 48 * GIB, sysctl.LEVEL: 1}
    assert seen.pages == pages()
    assert not failures.counts


@pytest.mark.parametrize(("body", "seconds_max"), [("exit 1", 60.0), ("sleep 10", 0.5), ("echo nonsense", 60.0)])
def test_a_command_that_fails_hangs_or_talks_nonsense_is_absent(tmp_path: Path, body: str, seconds_max: float) -> None:
    failures = Failures()
    asked = commands(tmp_path, body, body, failures, seconds_max=seconds_max)
    asked.ask()
    assert asked.read() == Seen({})
    reading = DarwinSampler(None, asked, Said()).read()
    assert (reading.source, reading.ram_total_bytes) == (VM_STAT, None)
    assert (sum(failures.counts.values()) == 0) == (body == "echo nonsense")


def test_what_the_commands_said_is_forgotten_when_it_is_old(tmp_path: Path) -> None:
    clock = FakeClock()
    # It says so once: each reading has it asked again, and the answer may come at any time.
    once = f"mkdir {tmp_path / 'said'} 2> /dev/null && echo hw.memsize: {GIB}"
    asked = Commands(
        clock,
        Failures(),
        sysctl_command=(script(tmp_path, "sysctl", once),),
        vm_stat_command=("/nowhere/vm_stat",),
        seconds_max=60.0,
    )
    asked.ask()
    assert asked.read().numbers == {sysctl.TOTAL: GIB}
    clock.advance(60.0)
    assert asked.read() == Seen({})


async def until(helper: MacmonHelper, told: bool) -> None:
    async with asyncio.timeout(60):
        while (helper.memory() is not None) != told:  # noqa: ASYNC110 - another process makes it so
            await asyncio.sleep(0.01)


class Ageless(SystemClock):
    """Nothing grows old by it."""

    def monotonic(self) -> float:
        return 1000.0


def helper(folder: Path, body: str, failures: Failures) -> MacmonHelper:
    return MacmonHelper(
        Ageless(),
        failures,
        command=(script(folder, "macmon", body), "pipe"),
        silence_seconds_max=0.5,
        restart_seconds_max=0.05,
    )


LINE = '{"memory": {"ram_total": 25769803776, "ram_usage": 20985479168}, "sys_power": 9.5, "temp": {}}'


@pytest.mark.parametrize("then", ["exit", "exec sleep 60", "exec head -c 100000 /dev/zero"])
async def test_macmon_is_started_again_when_it_dies_hangs_or_rambles(tmp_path: Path, then: str) -> None:
    failures = Failures()
    asked = helper(tmp_path, f"echo '{LINE}'; {then}", failures)
    running = asyncio.create_task(asked.run())
    await until(asked, told=True)
    async with asyncio.timeout(60):
        while failures.counts["macmon"] < 2:  # noqa: ASYNC110 - another process makes it so
            await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    sample = node_pb2.SystemSample(cpu_pct=5.0)
    asked.fill(sample)
    assert sample == node_pb2.SystemSample(cpu_pct=5.0, system_power_watts=9.5)


async def test_a_mac_without_macmon_does_without_it() -> None:
    failures = Failures()
    asked = MacmonHelper(SystemClock(), failures, command=("no-such-macmon-anywhere",))
    async with asyncio.timeout(60):
        await asked.run()
    assert failures.counts == {"macmon": 1}
    assert asked.memory() is None


def test_readings_of_one_source_are_one_type() -> None:
    assert isinstance(DarwinSampler(None, Said(), Said()).read(), Reading)
