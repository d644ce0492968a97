"""NVIDIA's GPUs through its management library, where the package nvidia-ml-py and the driver are there.

Boards that share the machine's memory (GB10, Jetson) answer that they cannot say how much there is. Not run on
hardware: what was tested is what becomes of the answers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from services.probe.failures import Failures
from services.probe.gpu.memory import gpu
from ullage.v1 import node_pb2

T = TypeVar("T")

_DRIVER: Final = Path("/proc/driver/nvidia")
_MILLIWATTS: Final = 1000
_CORE_TEMPERATURE: Final = 0


class NvidiaGpus:
    """The GPUs the library knows."""

    def __init__(self, library: Any, failures: Failures) -> None:
        """`library` is pynvml, initialised. Raises its errors where a board cannot be had."""
        self._library = library
        self._failures = failures
        count = failures.guard("nvml", library.nvmlDeviceGetCount) or 0
        self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Add each GPU, and the first one's figures as the node's."""
        for handle in self._handles:
            found = self._failures.guard("nvml", lambda handle=handle: self._read(handle))  # type: ignore[misc]  # mypy infers no lambda with a default
            if found is not None:
                sample.gpus.append(found)
        for first in sample.gpus[:1]:
            if first.HasField("usage_pct"):
                sample.gpu_pct = first.usage_pct
            if first.HasField("temperature_celsius"):
                sample.gpu_temperature_celsius = first.temperature_celsius
            if first.HasField("power_watts"):
                sample.gpu_power_watts = first.power_watts

    def _read(self, handle: object) -> node_pb2.Gpu:
        library = self._library
        name = self._known(lambda: library.nvmlDeviceGetName(handle)) or "NVIDIA"
        memory = self._known(lambda: library.nvmlDeviceGetMemoryInfo(handle))
        found = gpu(
            name.decode() if isinstance(name, bytes) else name,
            None if memory is None else int(memory.total),
            None if memory is None else int(memory.free),
        )
        usage = self._known(lambda: float(library.nvmlDeviceGetUtilizationRates(handle).gpu))
        temperature = self._known(lambda: float(library.nvmlDeviceGetTemperature(handle, _CORE_TEMPERATURE)))
        power = self._known(lambda: library.nvmlDeviceGetPowerUsage(handle) / _MILLIWATTS)
        for field, value in (("usage_pct", usage), ("temperature_celsius", temperature), ("power_watts", power)):
            if value is not None:
                setattr(found, field, value)
        return found

    def _known(self, ask: Callable[[], T]) -> T | None:
        """What `ask` answers, None for a figure this board does not have: that is no failure."""
        try:
            return ask()
        except self._library.NVMLError_NotSupported:
            return None


def find(failures: Failures) -> NvidiaGpus | None:
    """The GPUs of this machine, None without the package or the driver; one without the other is counted."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError as error:
        if _DRIVER.exists():
            failures.add("nvml", error)
        return None

    def started() -> NvidiaGpus:
        library.nvmlInit()
        return NvidiaGpus(library, failures)

    return failures.guard("nvml", started)
