"""What psutil gives on this machine, and what is left out where it gives nothing."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.probe.failures import Failures
from services.probe.interfaces import kind
from services.probe.psutil_sampler import PsutilSampler, conclude
from services.probe.reading import Reading
from services.probe.system import SystemSampler
from ullage.v1 import node_pb2


def test_this_machine_has_cores_a_disk_and_a_loopback_interface(tmp_path: Path) -> None:
    failures = Failures()
    memory = node_pb2.MemorySample(ram_total_bytes=1)
    sample = SystemSampler(tmp_path, Path("/"), failures).read(memory)
    assert sample.logical_cores >= 1
    assert 0 <= sample.cpu_pct <= 100
    assert 0 < sample.disk_available_bytes <= sample.disk_total_bytes
    assert sample.memory == memory
    loopback = next(each for each in sample.interfaces if each.address == "127.0.0.1")
    assert loopback.kind == node_pb2.INTERFACE_KIND_LOOPBACK
    assert not loopback.HasField("speed_bits_per_second")
    assert not sample.HasField("gpu_pct")
    assert not failures.counts


def test_a_system_that_keeps_no_load_average_has_none_and_nothing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "getloadavg")
    failures = Failures()
    sample = SystemSampler(tmp_path, Path("/"), failures).read(node_pb2.MemorySample())
    assert not sample.HasField("load_1m")
    assert not failures.counts


def test_a_disk_that_is_gone_is_absent_and_counted() -> None:
    failures = Failures()
    sample = SystemSampler(Path("/nowhere/at/all"), Path("/"), failures).read(node_pb2.MemorySample())
    assert not sample.HasField("disk_total_bytes")
    assert failures.counts == {"disk": 1}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lo", node_pb2.INTERFACE_KIND_LOOPBACK),
        ("eth0", node_pb2.INTERFACE_KIND_ETHERNET),
        ("enp3s0", node_pb2.INTERFACE_KIND_ETHERNET),
        ("wlp2s0", node_pb2.INTERFACE_KIND_WIFI),
        ("wg0", node_pb2.INTERFACE_KIND_TUNNEL),
        ("utun4", node_pb2.INTERFACE_KIND_TUNNEL),
        ("thunderbolt0", node_pb2.INTERFACE_KIND_THUNDERBOLT),
        ("docker0", node_pb2.INTERFACE_KIND_OTHER),
        # Windows has names for people.
        ("Ethernet 2", node_pb2.INTERFACE_KIND_ETHERNET),
        ("vEthernet (WSL)", node_pb2.INTERFACE_KIND_OTHER),
        ("Wi-Fi", node_pb2.INTERFACE_KIND_WIFI),
        ("WLAN", node_pb2.INTERFACE_KIND_WIFI),
        ("Tailscale", node_pb2.INTERFACE_KIND_TUNNEL),
        ("Loopback Pseudo-Interface 1", node_pb2.INTERFACE_KIND_LOOPBACK),
        ("Local Area Connection* 1", node_pb2.INTERFACE_KIND_OTHER),
    ],
)
def test_an_interface_is_known_by_its_name(tmp_path: Path, name: str, expected: int) -> None:
    assert kind(name, tmp_path) == expected


def test_linux_says_which_interfaces_are_wireless(tmp_path: Path) -> None:
    (tmp_path / "sys/class/net/eth1/wireless").mkdir(parents=True)
    assert kind("eth1", tmp_path) == node_pb2.INTERFACE_KIND_WIFI


def test_a_programs_interface_is_a_tunnel_whatever_it_carries_and_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "sys/class/net/ztks54inm2"
    folder.mkdir(parents=True)
    (folder / "type").write_text("1\n")  # Ethernet
    (folder / "tun_flags").write_text("0x1002\n")
    assert kind("ztks54inm2", tmp_path) == node_pb2.INTERFACE_KIND_TUNNEL


def test_psutil_gives_a_reading_within_its_bounds() -> None:
    failures = Failures()
    reading = PsutilSampler(failures).read()
    assert reading.source == node_pb2.MEMORY_SOURCE_PSUTIL
    assert reading.total_bytes is not None
    assert reading.available_bytes is not None
    assert 0 < reading.available_bytes <= reading.total_bytes
    assert reading.host_stall is None
    assert not failures.counts


def test_what_psutil_says_nothing_of_is_unknown() -> None:
    reading = conclude(SimpleNamespace(total=8 << 30, available=None, free=-5), SimpleNamespace(total=None, free=1))
    assert (reading.ram_total_bytes, reading.ram_available_bytes, reading.ram_free_bytes) == (8 << 30, None, 0)
    assert reading.swap_total_bytes is None
    assert reading.clamped
    nothing = Reading(node_pb2.MEMORY_SOURCE_PSUTIL)
    assert conclude(SimpleNamespace(total=None, available=1, free=1), None) == conclude(None, None) == nothing


def test_a_reader_that_fails_in_any_way_is_none_and_counted() -> None:
    failures = Failures()

    def fails() -> int:
        raise RuntimeError("array not large enough")

    assert [failures.guard("psutil", fails) for _ in range(3)] == [None, None, None]
    assert failures.counts == {"psutil": 3}


@pytest.mark.parametrize("number", ["65534", "778"])
def test_linux_says_which_interfaces_are_tunnels(tmp_path: Path, number: str) -> None:
    (tmp_path / "sys/class/net/home").mkdir(parents=True)
    (tmp_path / "sys/class/net/home/type").write_text(f"{number}\n")
    assert kind("home", tmp_path) == node_pb2.INTERFACE_KIND_TUNNEL
