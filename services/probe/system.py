"""The SystemSample: load, temperature, disk and interfaces, through psutil on every system.

It is slower than the memory reading by a factor of ten and taken more seldom. What the OS does not give is
absent; a recorded root says nothing of these, so they are always the machine's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from services.probe.failures import Failures
from services.probe.interfaces import interfaces
from services.probe.sampler import SystemSource
from ullage.v1 import node_pb2

_CPU_SENSORS: Final = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "soc_thermal", "acpitz")
"""The drivers that know the processor's temperature, the nearest to it first."""

_READINGS_PER_SLOW_PART: Final = 10
"""The disk and the interfaces hardly change, and take longer than everything else together."""


class SystemSampler:
    """Reads what is there beside memory."""

    def __init__(self, disk: Path, root: Path, failures: Failures, sources: Sequence[SystemSource] = ()) -> None:
        """`disk` is a folder on the disk to report; what `sources` know counts before what psutil says."""
        self._disk = disk
        self._root = root
        self._failures = failures
        self._sources = sources
        self._slow_part = node_pb2.SystemSample()
        self._readings_until_slow_part = 0
        self._has_sensors = True
        self._logical_cores = psutil.cpu_count()
        # psutil compares with its last call; the first has nothing to compare with and says 0.
        failures.guard("cpu", psutil.cpu_percent)

    def read(self, memory: node_pb2.MemorySample) -> node_pb2.SystemSample:
        """The system now, around the memory sample of the same moment. Never raises."""
        guard = self._failures.guard
        sample = node_pb2.SystemSample(
            taken_at=memory.taken_at,
            cpu_pct=guard("cpu", psutil.cpu_percent),
            logical_cores=self._logical_cores,
            load_1m=guard("load", _load_1m),
            temperature_celsius=self._temperature_celsius(),
            memory=memory,
        )
        sample.MergeFrom(self._known_slow_part())
        for source in self._sources:
            source.fill(sample)
        return sample

    def _temperature_celsius(self) -> float | None:
        """The processor's temperature; a machine that has no sensor is asked once, since looking takes a while."""
        if not self._has_sensors:
            return None
        found = self._failures.guard("temperature", _temperature_celsius)
        self._has_sensors = found is not None
        return found

    def _known_slow_part(self) -> node_pb2.SystemSample:
        """The disk and the interfaces, as they were lately."""
        if self._readings_until_slow_part == 0:
            self._readings_until_slow_part = _READINGS_PER_SLOW_PART
            disk = self._failures.guard("disk", lambda: psutil.disk_usage(str(self._disk)))
            self._slow_part = node_pb2.SystemSample(
                disk_total_bytes=None if disk is None else disk.total,
                disk_available_bytes=None if disk is None else disk.free,
                interfaces=self._failures.guard("interfaces", lambda: interfaces(self._root)) or (),
            )
        self._readings_until_slow_part -= 1
        return self._slow_part


def _load_1m() -> float | None:
    """The load average, None where the OS keeps none: psutil's own of Windows says 0 at first, and counts otherwise."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _temperature_celsius() -> float | None:
    """The processor's hottest sensor, None where there is none or the OS does not tell."""
    if not hasattr(psutil, "sensors_temperatures"):
        return None
    sensors = psutil.sensors_temperatures()
    for name in _CPU_SENSORS:
        if name in sensors:
            return max((float(sensor.current) for sensor in sensors[name]), default=None)
    return None
