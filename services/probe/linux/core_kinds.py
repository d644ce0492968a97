"""The use of performance and efficiency cores apart, where a processor has both kinds.

Intel's driver lists them (/sys/devices/cpu_core/cpus and cpu_atom/cpus, as "0-7,12"); an ARM kernel gives each core
a capacity, of which the highest are performance cores. A processor with one kind of core has neither figure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import psutil

from services.probe.failures import Failures
from ullage.v1 import node_pb2

_CORES_MAX: Final = 4096
_RANGE: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class Kinds(NamedTuple):
    """The numbers of the cores of each kind; both empty where there is only one kind."""

    performance: frozenset[int] = frozenset()
    efficiency: frozenset[int] = frozenset()


def parse_list(text: str) -> frozenset[int]:
    """The numbers in a list such as "0-7,12"; what is no such thing in it is left out. Never raises."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        found = _RANGE.fullmatch(part)
        if found is not None:
            first, last = int(found[1]), int(found[2] or found[1])
            numbers.update(range(first, min(last, _CORES_MAX) + 1))
    return frozenset(numbers)


def find(root: Path) -> Kinds:
    """The kinds of this machine's cores; `root` holds sys: "/", or a recorded tree."""
    devices = root / "sys/devices"
    performance, efficiency = (parse_list(_text(devices / f"{name}/cpus")) for name in ("cpu_core", "cpu_atom"))
    if performance and efficiency:
        return Kinds(performance, efficiency)
    capacities = {
        int(path.parent.name.removeprefix("cpu")): int(text)
        for path in devices.glob("system/cpu/cpu[0-9]*/cpu_capacity")
        if (text := _text(path).strip()).isdecimal() and len(text) < 6
    }
    highest = max(capacities.values(), default=0)
    efficiency = frozenset(core for core, capacity in capacities.items() if capacity < highest)
    return Kinds(frozenset(capacities) - efficiency, efficiency) if efficiency else Kinds()


class CoreKinds:
    """Tells the use of each kind, as the mean of its cores since the time before."""

    def __init__(self, root: Path, failures: Failures) -> None:
        self._kinds = find(root)
        self._failures = failures
        self._read()

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Set the use of both kinds, where there are two."""
        shares = self._read()
        performance, efficiency = (_mean(shares, cores) for cores in self._kinds)
        if performance is not None and efficiency is not None:
            sample.performance_cores_pct = performance
            sample.efficiency_cores_pct = efficiency

    def _read(self) -> Sequence[float]:
        """Each core's use in per cent since the last call; nothing is asked where all cores are alike."""
        if not self._kinds.efficiency:
            return ()
        return self._failures.guard("cores", lambda: psutil.cpu_percent(percpu=True)) or ()


def _mean(shares: Sequence[float], cores: Iterable[int]) -> float | None:
    known = [shares[core] for core in cores if core < len(shares)]
    return sum(known) / len(known) if known else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
