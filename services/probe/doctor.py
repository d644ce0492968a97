"""What this node's probe cannot read, why, and what to do about it.

Rules this module lives by:
- `findings` is a pure function of what was read and what failed; reading it is somebody else's.
- A fault keeps the node from being placed on: the doctor then exits with 1. A gap leaves a figure unknown, and
  everything goes on without it.
- What this kind of machine never tells is no finding.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from services.clock import Clock
from services.probe.estimator import Override, estimate
from services.probe.failures import Failures
from services.probe.machine import find
from services.probe.memory_sample import memory_sample
from services.probe.pressure import Verdict, judge
from services.probe.system import SystemSampler
from ullage.v1 import node_pb2

READINGS: Final = 4
READING_SECONDS: Final = 0.7
"""Together longer than a command may take, and than the windows of the stalls."""


class Finding(NamedTuple):
    """One thing that is not read."""

    is_fault: bool
    what: str
    why: str
    remedy: str


def _fault(what: str, why: str, remedy: str) -> Finding:
    return Finding(is_fault=True, what=what, why=why, remedy=remedy)


def _gap(what: str, why: str, remedy: str) -> Finding:
    return Finding(is_fault=False, what=what, why=why, remedy=remedy)


_REMEDIES: Final = (
    ("macmon", "install it (brew install macmon) for power, temperatures and the use of the cores"),
    ("alarm", "run the probe as a user who may write the file, or as root: rises are then told at once"),
    ("nvml", "install the package (pip install 'ullage[nvidia]'), and see that nvidia-smi works"),
    ("energy_uj", "let the probe's user read it (a udev rule, or root), or do without the processor's power"),
    ("psutil", "upgrade psutil; on macOS 26 and later it needs release 8"),
    ("pressure", "boot the kernel with psi=1 for stall information"),
    ("memory bandwidth", "start the probe anew when the machine is idle"),
    ("/sys/fs/cgroup", "mount the cgroup hierarchy into the container, read-only is enough"),
    ("MemAvailable", "run a kernel of 3.14 or later; in a container, a lxcfs that tells it"),
    ("host_statistics64", "report this with the macOS version; the vm_stat command is used meanwhile"),
)
"""By a part of what failed."""


def findings(memory: node_pb2.MemorySample, system: node_pb2.SystemSample, failed: Mapping[str, str]) -> list[Finding]:
    """What is wrong with the reading, faults first; `failed` has the errors by what was read."""
    found = [*_memory_findings(memory), *_system_findings(system)]
    found += [_gap(what, why, _remedy(what)) for what, why in sorted(failed.items())]
    return sorted(found, key=lambda finding: not finding.is_fault)


def _memory_findings(memory: node_pb2.MemorySample) -> list[Finding]:
    found = []
    if not memory.HasField("ram_total_bytes") or not memory.HasField("balanced_available_bytes"):
        why = "the total or the available memory is unknown"
        remedy = "see the failures below; `--memory 16GiB` stands in meanwhile"
        found.append(_fault("memory", why, remedy))
    if memory.pressure_level == node_pb2.PRESSURE_LEVEL_UNKNOWN:
        why = "; ".join(reason.detail for reason in memory.pressure_reasons)
        remedy = "nothing is placed here unless a request includes nodes of unknown pressure"
        found.append(_fault("pressure level", why, remedy))
    if node_pb2.MEMORY_FLAG_PSI_MISSING in memory.flags and memory.source == node_pb2.MEMORY_SOURCE_PROCFS:
        why = "this kernel keeps no stall information, or has it switched off"
        remedy = "boot with psi=1; until then the level rests on the room left, swap and the cgroup's events"
        found.append(_gap("stall information", why, remedy))
    if node_pb2.MEMORY_FLAG_DEVICE_LIMIT_ASSUMED in memory.flags:
        why = "85 % of the memory is assumed; Metal's own limit is 67 to 87 %"
        remedy = "start the runner on this node, which asks Metal; or set iogpu.wired_limit_mb"
        found.append(_gap("device limit", why, remedy))
    if node_pb2.MEMORY_FLAG_CLAMPED in memory.flags:
        why = "the system contradicts itself: more available than there is, or the like"
        remedy = "in a container, check lxcfs; the figures were brought within their bounds"
        found.append(_gap("memory", why, remedy))
    return found


def _system_findings(system: node_pb2.SystemSample) -> list[Finding]:
    found = []
    if not system.HasField("temperature_celsius"):
        remedy = "nothing, on a virtual machine; else load the sensors' driver (sensors-detect), or install macmon"
        found.append(_gap("temperature", "no sensor of the processor", remedy))
    if not system.HasField("cpu_power_watts") and not system.HasField("system_power_watts"):
        remedy = "nothing, on a virtual machine; else let the probe's user read /sys/class/powercap"
        found.append(_gap("power", "no energy counter can be read", remedy))
    if not any(not interface.link_local for interface in system.interfaces if interface.kind not in _PRIVATE):
        remedy = "connect the machine; other nodes have nowhere to send to"
        found.append(_gap("network", "no interface with an address others can reach", remedy))
    return found


_PRIVATE: Final = frozenset({node_pb2.INTERFACE_KIND_LOOPBACK})


def _remedy(what: str) -> str:
    return next((remedy for part, remedy in _REMEDIES if part in what), "see that the probe's user may read it")


def examine(root: Path, state_dir: Path, override: Override | None, clock: Clock, failures: Failures) -> list[Finding]:
    """Read this machine for some seconds, with all that runs beside a probe, and say what is missing."""
    return asyncio.run(_examined(root, state_dir, override, clock, failures))


async def _examined(
    root: Path, state_dir: Path, override: Override | None, clock: Clock, failures: Failures
) -> list[Finding]:
    machine = find(root, state_dir, clock, failures)
    system = SystemSampler(Path.cwd(), root, failures, machine.sources)
    beside = [asyncio.create_task(run()) for run in machine.tasks]
    if machine.alarms is not None:
        machine.alarms.watch(lambda: None)
    verdict: Verdict | None = None
    try:
        for _ in range(READINGS):
            reading = machine.read()
            verdict = judge(verdict, reading, clock.monotonic())
            memory = memory_sample(reading, verdict, estimate(reading, verdict.level, override), clock.now_ns())
            parts = system.read(memory)
            await clock.sleep(READING_SECONDS)
    finally:
        if machine.alarms is not None:
            machine.alarms.close()
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
    return findings(memory, parts, failures.errors)


def as_text(found: list[Finding]) -> str:
    """The findings for a person."""
    if not found:
        return "everything this machine tells is read"
    return "\n".join(
        f"{'FAULT' if finding.is_fault else 'gap':<7}{finding.what}: {finding.why}\n       to do: {finding.remedy}"
        for finding in found
    )


def as_json(found: list[Finding]) -> str:
    """The findings for a program."""
    return json.dumps({"findings": [finding._asdict() for finding in found]}, indent=2, ensure_ascii=False)
