"""NVIDIA's GPUs through its management library, where the package nvidia-ml-py and the driver are there.

Boards that share the machine's memory (GB10, Jetson) answer that they cannot say how much there is. Not run on
hardware: what was tested is what becomes of the answers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from services.probe.failures import Failures
from services.probe.gpu import node_figures
from services.probe.gpu.memory import gpu
from ullage.v1 import node_pb2

T = TypeVar("T")

_DRIVER: Final = Path("/proc/driver/nvidia")
_MILLIWATTS: Final = 1000
_CORE_TEMPERATURE: Final = 0


class NvidiaGpus:
    """The GPUs the library knows."""

    def __init__(self, library: Any, failures: Failures) -> None:
        """`library` is pynvml, initialised. A board that cannot be had is counted, and the others are told of."""
        self._library = library
        self._failures = failures
        count = failures.guard("nvml", library.nvmlDeviceGetCount) or 0
        found = [failures.guard("nvml", partial(library.nvmlDeviceGetHandleByIndex, index)) for index in range(count)]
        self._handles = [handle for handle in found if handle is not None]

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Add each GPU, and what of them is the node's."""
        for handle in self._handles:
            found = self._failures.guard("nvml", lambda handle=handle: self._read(handle))  # type: ignore[misc]  # mypy infers no lambda with a default
            if found is not None:
                sample.gpus.append(found)
        node_figures.fill(sample)

    def _read(self, handle: object) -> node_pb2.Gpu:
        library, guard = self._library, self._failures.guard
        named = self._known(lambda: library.nvmlDeviceGetName(handle)) or "NVIDIA"
        name = named.decode() if isinstance(named, bytes) else named
        # What one figure's error says of it, it says of no other.
        found = guard("nvml", lambda: self._with_memory(name, handle)) or node_pb2.Gpu(name=name)
        usage = guard("nvml", lambda: self._known(lambda: float(library.nvmlDeviceGetUtilizationRates(handle).gpu)))
        temperature = guard(
            "nvml", lambda: self._known(lambda: float(library.nvmlDeviceGetTemperature(handle, _CORE_TEMPERATURE)))
        )
        power = guard("nvml", lambda: self._known(lambda: library.nvmlDeviceGetPowerUsage(handle) / _MILLIWATTS))
        for field, value in (("usage_pct", usage), ("temperature_celsius", temperature), ("power_watts", power)):
            if value is not None:
                setattr(found, field, value)
        return found

    def _with_memory(self, name: str, handle: object) -> node_pb2.Gpu:
        """The board with the memory it tells of. Raises where that cannot be asked, which makes no board unified."""
        memory = self._known(lambda: self._library.nvmlDeviceGetMemoryInfo(handle))
        return gpu(name, None, None) if memory is None else gpu(name, int(memory.total), int(memory.free))

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
