"""What the doctor says of machines that do not tell everything."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from services.probe import doctor
from services.probe.doctor import Finding, findings
from ullage.v1 import node_pb2

RECORDED = Path(__file__).parents[1] / "recorded/proc"

WELL = node_pb2.MemorySample(
    ram_total_bytes=16,
    balanced_available_bytes=8,
    pressure_level=node_pb2.PRESSURE_LEVEL_NORMAL,
    source=node_pb2.MEMORY_SOURCE_PROCFS,
)
WHOLE = node_pb2.SystemSample(
    temperature_celsius=40,
    cpu_power_watts=15,
    interfaces=[node_pb2.NetworkInterface(name="eth0", kind=node_pb2.INTERFACE_KIND_ETHERNET)],
)


def changed(sample: node_pb2.MemorySample, **fields: object) -> node_pb2.MemorySample:
    made = node_pb2.MemorySample()
    made.CopyFrom(sample)
    made.MergeFrom(node_pb2.MemorySample(**fields))  # type: ignore[arg-type] # any field
    return made


def test_a_machine_that_tells_everything_is_well() -> None:
    assert findings(WELL, WHOLE, {}) == []
    assert doctor.as_text([]) == "everything this machine tells is read"


def test_unknown_memory_is_a_fault_and_comes_first() -> None:
    blind = node_pb2.MemorySample(
        pressure_level=node_pb2.PRESSURE_LEVEL_UNKNOWN,
        pressure_reasons=[node_pb2.PressureReason(detail="the total or the available memory could not be read")],
    )
    found = findings(blind, WHOLE, {"/proc/meminfo": "PermissionError: [Errno 13] Permission denied"})
    assert [(finding.is_fault, finding.what) for finding in found] == [
        (True, "memory"),
        (True, "pressure level"),
        (False, "/proc/meminfo"),
    ]
    assert found[1].why == "the total or the available memory could not be read"


def test_missing_stall_information_says_how_to_have_it() -> None:
    (finding,) = findings(changed(WELL, flags=[node_pb2.MEMORY_FLAG_PSI_MISSING]), WHOLE, {})
    assert finding == Finding(
        is_fault=False,
        what="stall information",
        why="this kernel keeps no stall information, or has it switched off",
        remedy="boot with psi=1; until then the level rests on the room left, swap and the cgroup's events",
    )


def test_an_assumed_limit_and_figures_that_were_clamped_are_told() -> None:
    flags = [node_pb2.MEMORY_FLAG_DEVICE_LIMIT_ASSUMED, node_pb2.MEMORY_FLAG_CLAMPED]
    assert [finding.what for finding in findings(changed(WELL, flags=flags), WHOLE, {})] == ["device limit", "memory"]


def test_what_failed_is_told_with_what_to_do() -> None:
    (macmon, energy) = findings(WELL, WHOLE, {"macmon": "FileNotFoundError: not installed", "x/energy_uj": "denied"})
    assert macmon.why == "FileNotFoundError: not installed"
    assert macmon.remedy.startswith("install it (brew install macmon)")
    assert "udev" in energy.remedy


def test_a_node_nobody_can_reach_is_told() -> None:
    alone = node_pb2.SystemSample(
        temperature_celsius=40,
        cpu_power_watts=15,
        interfaces=[
            node_pb2.NetworkInterface(name="lo", kind=node_pb2.INTERFACE_KIND_LOOPBACK),
            node_pb2.NetworkInterface(name="eth0", kind=node_pb2.INTERFACE_KIND_ETHERNET, link_local=True),
        ],
    )
    assert [finding.what for finding in findings(WELL, alone, {})] == ["network"]


async def examined(*options: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", "doctor", *options, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, output.decode()


async def test_the_command_exits_by_whether_there_is_a_fault(tmp_path: Path) -> None:
    (here, said), (nowhere, told) = await asyncio.gather(
        examined("--root", str(RECORDED / "normal"), "--state-dir", str(tmp_path)),
        examined("--root", str(tmp_path), "--state-dir", str(tmp_path), "--json"),
    )
    assert here == 0
    assert "FAULT" not in said
    assert nowhere == 1
    faults = [finding for finding in json.loads(told)["findings"] if finding["is_fault"]]
    assert [fault["what"] for fault in faults] == ["memory", "pressure level"]
