"""The processor's power on Linux, from its energy counters (powercap, RAPL). Most systems show them to root only.

A counter goes up in microjoules and wraps; the power is its rise over the time since the reading before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from services.clock import Clock
from services.probe.failures import Failures
from services.probe.linux.open_file import OpenFile, whole_text
from ullage.v1 import node_pb2

_DIGITS_MAX: Final = 19
_PACKAGES: Final = "intel-rapl:[0-9]*"
_SECONDS_MIN: Final = 0.1

_PLATFORM: Final = "psys"
"""Laptops count everything on the board beside the package, and the package in it once more."""


class ProcessorPower:
    """The power of all processor packages together."""

    def __init__(self, root: Path, clock: Clock, failures: Failures) -> None:
        """`root` holds sys: "/", or a recorded tree. Packages are found once."""
        # intel-rapl:0 is a package; intel-rapl:0:0 is a part of one, and counted with it.
        folders = [path for path in sorted((root / "sys/class/powercap").glob(_PACKAGES)) if path.name.count(":") == 1]
        packages = [path for path in folders if whole_text(path / "name", failures).strip() != _PLATFORM]
        self._counters = [OpenFile(package / "energy_uj", failures) for package in packages]
        self._ranges = [OpenFile(package / "max_energy_range_uj", failures) for package in packages]
        self._clock = clock
        self._before: tuple[float, list[int]] | None = None

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Set the processor's power, from the second time on."""
        energies = [_number(counter.read()) for counter in self._counters]
        known = [energy for energy in energies if energy is not None]
        if not known or len(known) < len(energies):
            self._before = None
            return
        now_s, before = self._clock.monotonic(), self._before
        self._before = (now_s, known)
        if before is not None and now_s - before[0] >= _SECONDS_MIN:
            spent = sum(map(self._spent_microjoules, range(len(known)), before[1], known))
            sample.cpu_power_watts = spent / (now_s - before[0]) / 1e6

    def _spent_microjoules(self, index: int, old: int, new: int) -> int:
        return new - old if new >= old else new - old + (_number(self._ranges[index].read()) or old - new)


def _number(text: bytes | None) -> int | None:
    digits = (text or b"").strip()
    return int(digits) if digits.isdigit() and len(digits) <= _DIGITS_MAX else None
