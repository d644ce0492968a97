"""What this machine is to the probe: where its memory and the rest are read, and what has to run beside."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from services.clock import Clock
from services.probe.bandwidth import Bandwidth
from services.probe.darwin.commands import Commands
from services.probe.darwin.hardware_ports import HardwarePorts
from services.probe.darwin.helper import MacmonHelper
from services.probe.darwin.sampler import DarwinSampler, Library, system_library
from services.probe.failures import Failures
from services.probe.gpu import nvidia
from services.probe.gpu.amd import AmdGpus
from services.probe.linux.alarms import Alarms
from services.probe.linux.core_kinds import CoreKinds
from services.probe.linux.pinned import pin
from services.probe.linux.power import ProcessorPower
from services.probe.linux.sampler import LinuxSampler
from services.probe.own_memory import OwnMemory
from services.probe.psutil_sampler import PsutilSampler
from services.probe.reading import Reading
from services.probe.sampler import Sampler, SystemSource
from services.probe.windows import sampler as windows

MACHINE_ROOT: Final = Path("/")


@dataclass(frozen=True)
class Machine:
    """One machine, or one recorded as a tree of files."""

    sampler: Sampler
    own_memory: OwnMemory
    sources: Sequence[SystemSource] = ()
    """What is told of its parts, beside what psutil says."""
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """What runs as long as the probe does."""
    alarms: Alarms | None = None
    pin: Callable[[], bool] | None = None
    """Keeps this process's own pages in memory, where that is allowed."""

    def read(self) -> Reading:
        """The memory now, with what the node's own shards hold of it. Never raises."""
        reading, own_bytes = self.sampler.read(), self.own_memory.read()
        return reading if own_bytes is None else reading._replace(own_bytes=own_bytes)


def find(root: Path, state_dir: Path, clock: Clock, failures: Failures) -> Machine:
    """The machine itself, or the recorded tree at `root`, which any machine can read."""
    own_memory = OwnMemory(state_dir)
    if root != MACHINE_ROOT or sys.platform == "linux":
        return _linux(root, own_memory, clock, failures)
    if sys.platform == "darwin":
        return _mac(own_memory, clock, failures)
    bandwidth = Bandwidth(failures)
    sampler = failures.guard("kernel32", lambda: windows.sampler(failures)) if sys.platform == "win32" else None
    return Machine(sampler or PsutilSampler(failures), own_memory, (bandwidth,), (bandwidth.run,))


def _linux(root: Path, own_memory: OwnMemory, clock: Clock, failures: Failures) -> Machine:
    sampler = LinuxSampler(root, failures)
    sources: list[SystemSource] = [
        ProcessorPower(root, clock, failures),
        CoreKinds(root, failures),
        AmdGpus(root, failures),
    ]
    if root != MACHINE_ROOT:
        return Machine(sampler, own_memory, sources)  # A recorded tree rings no alarms and runs nothing.
    if (nvidia_gpus := nvidia.find(failures)) is not None:
        sources.append(nvidia_gpus)
    bandwidth = Bandwidth(failures)
    return Machine(sampler, own_memory, (*sources, bandwidth), (bandwidth.run,), sampler.alarms, pin)


def _mac(own_memory: OwnMemory, clock: Clock, failures: Failures) -> Machine:
    library = failures.guard("libSystem", lambda: Library(system_library(), failures))
    commands, helper = Commands(clock, failures), MacmonHelper(clock, failures)
    if library is None:
        commands.ask()  # So that the first reading says something; nobody waits for the probe yet.
    bandwidth = Bandwidth(failures)
    sampler = DarwinSampler(library, commands, helper)
    ports = HardwarePorts(clock, failures)
    return Machine(sampler, own_memory, (helper, ports, bandwidth), (helper.run, ports.run, bandwidth.run))
