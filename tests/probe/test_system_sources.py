"""GPUs, power and bandwidth: what becomes of what drivers say, and of what they do not."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import psutil
import pytest

from services.clock import SystemClock
from services.probe import bandwidth, interfaces
from services.probe.bandwidth import Bandwidth
from services.probe.darwin import hardware_ports
from services.probe.darwin.commands import Commands
from services.probe.darwin.hardware_ports import HardwarePorts
from services.probe.darwin.helper import MacmonHelper
from services.probe.darwin.sampler import Seen
from services.probe.failures import Failures
from services.probe.gpu.amd import AmdGpus
from services.probe.gpu.memory import gpu
from services.probe.gpu.nvidia import NvidiaGpus
from services.probe.linux.power import ProcessorPower
from services.probe.own_memory import OwnMemory, is_shard
from tests.clocks import FakeClock
from ullage.v1 import node_pb2

GIB = 1 << 30
MIB = 1 << 20


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("total", "available", "expected"),
    [
        (129 * MIB, 115 * MIB, node_pb2.Gpu(memory_total_bytes=129 * MIB, memory_available_bytes=115 * MIB)),
        # A card that was taken for unified: more free than there is.
        (32106 * MIB, 55372 * MIB, node_pb2.Gpu(memory_total_bytes=32106 * MIB)),
        (None, None, node_pb2.Gpu(unified=True)),
        (0, 7976902656, node_pb2.Gpu(unified=True)),
        (8 * GIB, -1, node_pb2.Gpu(memory_total_bytes=8 * GIB)),
        (2**64, 1, node_pb2.Gpu()),
    ],
)  # fmt: skip
def test_a_gpus_memory_is_its_own_or_the_machines(
    total: int | None, available: int | None, expected: node_pb2.Gpu
) -> None:
    expected.name = "g"
    assert gpu("g", total, available) == expected


def amd(root: Path, **files: str) -> node_pb2.SystemSample:
    card = root / "sys/class/drm/card0/device"
    for name, text in {"vendor": "0x1002\n", "device": "0x744c\n", **files}.items():
        put(card / name.replace("__", "/"), text)
    sample = node_pb2.SystemSample()
    AmdGpus(root, Failures()).fill(sample)
    return sample


def test_an_amd_card_has_memory_of_its_own(tmp_path: Path) -> None:
    sample = amd(
        tmp_path,
        mem_info_vram_total=f"{24 * GIB}\n",
        mem_info_vram_used=f"{2 * GIB}\n",
        mem_info_gtt_total=f"{32 * GIB}\n",
        gpu_busy_percent="37\n",
        hwmon__hwmon3__temp1_input="51000\n",
        hwmon__hwmon3__power1_average="95000000\n",
    )
    assert list(sample.gpus) == [
        node_pb2.Gpu(
            name="AMD 0x744c",
            memory_total_bytes=24 * GIB,
            memory_available_bytes=22 * GIB,
            usage_pct=37,
            temperature_celsius=51,
            power_watts=95,
        )
    ]
    assert (sample.gpu_pct, sample.gpu_temperature_celsius, sample.gpu_power_watts) == (37, 51, 95)


def test_a_processors_own_graphics_are_unified(tmp_path: Path) -> None:
    sample = amd(tmp_path, mem_info_vram_total=f"{512 * MIB}\n", mem_info_gtt_total=f"{15 * GIB}\n")
    assert list(sample.gpus) == [node_pb2.Gpu(name="AMD 0x744c", unified=True)]


@pytest.mark.parametrize(("vendor", "is_unified"), [("samsung\n", False), ("unknown\n", True)])
def test_a_small_card_in_a_large_machine_is_told_by_who_made_its_chips(
    tmp_path: Path, vendor: str, is_unified: bool
) -> None:
    memory = {"mem_info_vram_total": f"{4080 * MIB}\n", "mem_info_gtt_total": f"{32 * GIB}\n"}
    (found,) = amd(tmp_path, **memory, mem_info_vram_used=f"{80 * MIB}\n", mem_info_vram_vendor=vendor).gpus
    assert found.unified == is_unified
    assert found.memory_available_bytes == (0 if is_unified else 4000 * MIB)


def test_what_the_driver_cannot_say_is_absent(tmp_path: Path) -> None:
    sample = amd(tmp_path, mem_info_vram_total="N/A\n", gpu_busy_percent="-1\n")
    assert list(sample.gpus) == [node_pb2.Gpu(name="AMD 0x744c")]
    assert not sample.HasField("gpu_pct")


class NotSupported(Exception):
    """What NVML raises for a figure the board does not have."""


class Nvml:
    """A management library with one board that answers as given."""

    NVMLError_NotSupported = NotSupported

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*_: object) -> Any:
            if name not in self._answers:
                raise NotSupported
            if isinstance(self._answers[name], Exception):
                raise self._answers[name]
            return self._answers[name]

        return answer


class Figures:
    """A structure of NVML's."""

    def __init__(self, **fields: int) -> None:
        self.__dict__.update(fields)


def nvidia(failures: Failures, **answers: Any) -> node_pb2.SystemSample:
    sample = node_pb2.SystemSample()
    NvidiaGpus(Nvml(**answers), failures).fill(sample)
    return sample


def test_an_nvidia_card_tells_its_memory_use_temperature_and_power() -> None:
    sample = nvidia(
        Failures(),
        nvmlDeviceGetName=b"NVIDIA GeForce RTX 4070",
        nvmlDeviceGetMemoryInfo=Figures(total=12_878_610_432, free=11_500_000_000, used=1_378_610_432),
        nvmlDeviceGetUtilizationRates=Figures(gpu=12, memory=3),
        nvmlDeviceGetTemperature=44,
        nvmlDeviceGetPowerUsage=31_500,
    )
    (found,) = sample.gpus
    assert (found.name, found.unified) == ("NVIDIA GeForce RTX 4070", False)
    assert (found.memory_total_bytes, found.memory_available_bytes) == (12_878_610_432, 11_500_000_000)
    assert (sample.gpu_pct, sample.gpu_temperature_celsius, sample.gpu_power_watts) == (12, 44, 31.5)


def test_a_board_that_shares_the_machines_memory_is_unified_and_no_failure() -> None:
    failures = Failures()
    (found,) = nvidia(failures, nvmlDeviceGetName="NVIDIA GB10").gpus
    assert found == node_pb2.Gpu(name="NVIDIA GB10", unified=True)
    assert not failures.counts


def test_a_driver_that_fails_leaves_the_sample_and_is_counted() -> None:
    failures = Failures()
    assert not nvidia(failures, nvmlDeviceGetName=RuntimeError("GPU is lost")).gpus
    assert failures.counts == {"nvml": 1}


@pytest.mark.parametrize("missing", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature"])
def test_a_figure_that_may_not_be_asked_takes_no_other_with_it(missing: str) -> None:
    failures = Failures()
    answers = {
        "nvmlDeviceGetMemoryInfo": Figures(total=12 * GIB, free=11 * GIB),
        "nvmlDeviceGetUtilizationRates": Figures(gpu=12),
        "nvmlDeviceGetTemperature": 44,
    }
    (found,) = nvidia(failures, **{**answers, missing: RuntimeError("Insufficient Permissions")}).gpus
    assert (found.memory_total_bytes, found.memory_available_bytes) == (12 * GIB, 11 * GIB)
    assert found.HasField("usage_pct") != found.HasField("temperature_celsius")
    assert failures.counts == {"nvml": 1}


def test_memory_that_may_not_be_asked_is_unknown_and_not_the_machines() -> None:
    denied = RuntimeError("Insufficient Permissions")
    (found,) = nvidia(Failures(), nvmlDeviceGetName="A100", nvmlDeviceGetMemoryInfo=denied).gpus
    assert found == node_pb2.Gpu(name="A100")


def test_a_board_that_is_lost_takes_no_other_with_it() -> None:
    class Two(Nvml):
        def nvmlDeviceGetCount(self) -> int:
            return 2

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            if index == 0:
                raise RuntimeError("GPU is lost")
            return index

    failures, sample = Failures(), node_pb2.SystemSample()
    NvidiaGpus(Two(nvmlDeviceGetName="RTX", nvmlDeviceGetTemperature=44), failures).fill(sample)
    assert [found.name for found in sample.gpus] == ["RTX"]
    assert sample.gpu_temperature_celsius == 44
    assert failures.counts == {"nvml": 1}


def test_of_the_gpus_of_two_makers_the_first_that_has_a_figure_tells_the_nodes(tmp_path: Path) -> None:
    sample = amd(tmp_path, mem_info_vram_total=f"{512 * MIB}\n", hwmon__hwmon3__temp1_input="41000\n")
    NvidiaGpus(Nvml(nvmlDeviceGetUtilizationRates=Figures(gpu=12), nvmlDeviceGetTemperature=44), Failures()).fill(
        sample
    )
    assert len(sample.gpus) == 2
    assert (sample.gpu_pct, sample.gpu_temperature_celsius) == (12, 41)


def test_the_processors_power_is_the_rise_of_its_energy_and_survives_a_wrap(tmp_path: Path) -> None:
    clock, failures = FakeClock(), Failures()
    package = tmp_path / "sys/class/powercap/intel-rapl:0"
    put(package / "energy_uj", "1000000\n")
    put(package / "max_energy_range_uj", "262143328850\n")
    put(tmp_path / "sys/class/powercap/intel-rapl:0:0/energy_uj", "5\n")
    power = ProcessorPower(tmp_path, clock, failures)

    def watts(energy: int) -> float | None:
        put(package / "energy_uj", f"{energy}\n")
        clock.advance(2.0)
        sample = node_pb2.SystemSample()
        power.fill(sample)
        return sample.cpu_power_watts if sample.HasField("cpu_power_watts") else None

    assert watts(262_000_000_000) is None
    assert watts(262_030_000_000) == pytest.approx(15.0)
    assert watts(30_000_000 - 113_328_850) is None  # No number, so nothing to compare with.
    assert watts(262_143_000_000) is None
    assert watts(20_000_000) == pytest.approx((328_850 + 20_000_000) / 2e6)


def test_what_the_whole_board_draws_is_not_added_to_the_processors_power(tmp_path: Path) -> None:
    clock = FakeClock()
    folders = {
        name: tmp_path / f"sys/class/powercap/intel-rapl:{index}" for index, name in enumerate(("package-0", "psys"))
    }
    for name, folder in folders.items():
        put(folder / "name", f"{name}\n")
        put(folder / "energy_uj", "0\n")
    power, sample = ProcessorPower(tmp_path, clock, Failures()), node_pb2.SystemSample()
    power.fill(sample)
    clock.advance(2.0)
    put(folders["package-0"] / "energy_uj", "20000000\n")
    put(folders["psys"] / "energy_uj", "60000000\n")  # The package's 20 J among them.
    power.fill(sample)
    assert sample.cpu_power_watts == pytest.approx(10.0)


def test_energy_that_only_root_may_read_is_absent(tmp_path: Path) -> None:
    sample = node_pb2.SystemSample()
    ProcessorPower(tmp_path, FakeClock(), Failures()).fill(sample)
    assert sample == node_pb2.SystemSample()


async def test_the_memorys_speed_is_measured_once_when_there_is_room() -> None:
    failures = Failures()
    speed = Bandwidth(failures)
    running = asyncio.create_task(speed.run())
    tight = node_pb2.SystemSample(memory=node_pb2.MemorySample(ram_available_bytes=100 * MIB))
    speed.fill(tight)
    await asyncio.sleep(0.05)
    assert not running.done()
    roomy = node_pb2.SystemSample(memory=node_pb2.MemorySample(ram_available_bytes=8 * GIB))
    speed.fill(roomy)
    async with asyncio.timeout(120):
        await running
    speed.fill(roomy)
    assert 10**8 < roomy.memory_bandwidth_bytes_per_second < 10**13
    assert not failures.counts


def test_a_copy_moves_bytes() -> None:
    # One that stood still meanwhile is slow, and not all of them have.
    assert any(bandwidth.measure(0.01) > 10**8 for _ in range(50))


def test_a_node_without_a_runner_does_not_know_its_own_memory(tmp_path: Path) -> None:
    assert OwnMemory(tmp_path).read() is None
    (tmp_path / "shards").mkdir()
    assert OwnMemory(tmp_path).read() == 0


async def test_the_memory_of_the_processes_in_the_folder_is_the_nodes_own(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        put(tmp_path / "shards" / str(process.pid), "")
        put(tmp_path / "shards" / "nonsense", "")
        put(tmp_path / "shards" / "4194305", "")  # Beyond any process id.
        own = OwnMemory(tmp_path, is_own=lambda pid: pid == process.pid)
        held = own.read()
        async with asyncio.timeout(60):
            while held is not None and held <= MIB // 16:  # It has only begun.
                await asyncio.sleep(0.01)
                held = own.read()
        assert held is not None
        assert MIB // 16 < held < 64 * MIB
        assert OwnMemory(tmp_path).read() == 0  # `sleep` is no shard, whatever the folder says.
    finally:
        process.kill()
        await process.wait()
    assert own.read() == 0


class Numbered:
    """A number that a shard had, and somebody else has now."""

    def __init__(self) -> None:
        self.is_gone = False

    def memory_info(self) -> Figures:
        if self.is_gone:
            raise psutil.NoSuchProcess(77)
        return Figures(rss=4096)


def test_whoever_gets_the_number_of_a_shard_that_died_is_no_shard(tmp_path: Path) -> None:
    put(tmp_path / "shards/77", "")
    process = Numbered()
    own = OwnMemory(tmp_path, is_own=lambda _: True, process=lambda _: cast("psutil.Process", process))
    assert own.read() == 4096
    process.is_gone = True
    assert own.read() == 0
    process.is_gone = False
    assert [own.read() for _ in range(20)] == [0] * 20
    (tmp_path / "shards/77").unlink()
    assert [own.read() for _ in range(8)] == [0] * 8
    put(tmp_path / "shards/77", "")  # The runner has cleared the folder, and started one under this number again.
    assert [own.read() for _ in range(8)][-1] == 4096


def test_without_a_file_to_be_had_the_own_memory_is_unknown_and_nobody_falls(tmp_path: Path) -> None:
    put(tmp_path / "shards/77", "")
    process = SimpleNamespace(memory_info=Mock(return_value=Figures(rss=4096)))
    look = Mock(return_value=True, side_effect=OSError(errno.EMFILE, "Too many open files"))
    own = OwnMemory(tmp_path, is_own=look, process=lambda _: cast("psutil.Process", process))
    assert own.read() is None
    look.side_effect = None
    assert own.read() == 4096  # It was not taken for a stranger meanwhile.
    process.memory_info.side_effect = OSError(errno.EMFILE, "Too many open files")
    assert own.read() is None
    process.memory_info.side_effect = None
    assert own.read() == 4096


async def test_a_machine_that_gives_no_more_threads_leaves_the_helpers_out_and_the_probe_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    failures = Failures()
    assert Commands(FakeClock(), failures).read() == Seen({})
    monkeypatch.setattr(asyncio, "create_subprocess_exec", Mock(side_effect=RuntimeError("can't start new thread")))
    speed = Bandwidth(failures)
    speed.fill(node_pb2.SystemSample(memory=node_pb2.MemorySample(ram_available_bytes=8 * GIB)))
    await speed.run()
    helpers = (MacmonHelper(SystemClock(), failures, command=("true",)), HardwarePorts(SystemClock(), failures))
    running = [asyncio.create_task(helper.run()) for helper in helpers]
    await asyncio.sleep(0)  # Each takes its first step, and waits for the next try.
    assert not any(task.done() for task in running)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    assert failures.counts.keys() == {"vm_stat", "memory bandwidth", "macmon", "networksetup"}


@pytest.mark.parametrize(
    "script",
    ["while :; do echo [; sleep 0.05; done", "while :; do echo [; done", "sleep 600; true"],
    ids=["now and then", "without end", "behind a wrapper"],
)
async def test_a_macmon_that_says_nothing_that_is_understood_is_ended_and_counted(script: str) -> None:
    failures = Failures()
    command = ("sh", "-c", script)
    helper = MacmonHelper(SystemClock(), failures, command=command, silence_seconds_max=0.5, restart_seconds_max=0.1)
    running = asyncio.create_task(helper.run())
    async with asyncio.timeout(60):
        while failures.counts.get("macmon", 0) < 2:  # noqa: ASYNC110 - a counter tells nobody
            await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def test_of_thousands_of_interfaces_those_that_others_reach_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = {
        f"a{number:04}": [SimpleNamespace(family=socket.AF_INET6, address=f"fe80::{number:x}")]
        for number in range(2000)
    }
    reached = {"eth0": [SimpleNamespace(family=socket.AF_INET, address="192.168.1.9")]}
    stats = SimpleNamespace(isup=True, speed=1000)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {**ends, **reached})
    monkeypatch.setattr(psutil, "net_if_stats", lambda: dict.fromkeys([*ends, *reached], stats))
    told = interfaces.interfaces(tmp_path)
    assert len(told) == interfaces.INTERFACES_MAX
    assert told[0].address == "192.168.1.9"


def test_a_process_that_is_none_is_no_shard() -> None:
    assert not is_shard(4194305)


PORTS = """
Hardware Port: Ethernet
Device: en0
Ethernet Address: aa:bb:cc:00:00:00

Hardware Port: Wi-Fi
Device: en1
Ethernet Address: aa:bb:cc:00:00:01

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: aa:bb:cc:00:00:02

Hardware Port: USB 10/100/1000 LAN
Device: en7
Ethernet Address: aa:bb:cc:00:00:03

VLAN Configurations
===================
"""


def test_a_macs_interfaces_are_what_their_ports_are_called() -> None:
    assert hardware_ports.parse(PORTS) == {
        "en0": node_pb2.INTERFACE_KIND_ETHERNET,
        "en1": node_pb2.INTERFACE_KIND_WIFI,
        "bridge0": node_pb2.INTERFACE_KIND_THUNDERBOLT,
        "en7": node_pb2.INTERFACE_KIND_ETHERNET,
    }
    assert hardware_ports.parse("networksetup: command not found\nDevice: \nHardware Port: ") == {}


async def test_a_macs_ports_correct_what_names_suggest(tmp_path: Path) -> None:
    (tmp_path / "said").write_text(PORTS)
    clock = FakeClock()
    ports = HardwarePorts(clock, Failures(), ("cat", str(tmp_path / "said")))
    sample = node_pb2.SystemSample(
        interfaces=[node_pb2.NetworkInterface(name="en1", kind=node_pb2.INTERFACE_KIND_ETHERNET)]
    )
    running = asyncio.create_task(ports.run())
    async with asyncio.timeout(60):
        while sample.interfaces[0].kind != node_pb2.INTERFACE_KIND_WIFI:
            await asyncio.sleep(0.01)
            clock.advance(hardware_ports.PERIOD_SECONDS)  # One that took too long to answer is asked again.
            ports.fill(sample)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
