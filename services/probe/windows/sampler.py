"""The Windows sampler: two calls into kernel32, and psutil for nothing of memory. Not run on hardware.

psutil asks the performance counters for swap, which takes milliseconds and fails where they are switched off.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final

from services.probe.failures import Failures
from services.probe.reading import Reading
from services.probe.windows import memory

_LOW_MEMORY: Final = 0


class WindowsSampler:
    """Reads the memory of a Windows machine."""

    def __init__(self, kernel: Any, failures: Failures) -> None:
        """`kernel` is kernel32. Raises AttributeError where it has not these calls."""
        self._failures = failures
        self._buffer = ctypes.create_string_buffer(memory.SIZE_BYTES)
        self._information = kernel.K32GetPerformanceInfo
        self._query = kernel.QueryMemoryResourceNotification
        self._query.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        kernel.CreateMemoryResourceNotification.restype = ctypes.c_void_p
        self._low: int | None = kernel.CreateMemoryResourceNotification(_LOW_MEMORY)

    def read(self) -> Reading:
        """The memory now. Never raises: what cannot be read is absent, and was counted."""
        found = self._failures.guard("GetPerformanceInfo", self._performance)
        return memory.conclude(found, low=self._failures.guard("MemoryResourceNotification", self._is_low))

    def _performance(self) -> memory.Performance:
        if not self._information(self._buffer, memory.SIZE_BYTES):
            raise OSError("GetPerformanceInfo failed")
        found = memory.parse(self._buffer.raw)
        if found is None:
            raise ValueError("GetPerformanceInfo gave what is no PERFORMANCE_INFORMATION")
        return found

    def _is_low(self) -> bool:
        state = ctypes.c_int()
        if not self._low or not self._query(self._low, ctypes.byref(state)):
            raise OSError("QueryMemoryResourceNotification failed")
        return bool(state.value)


def sampler(failures: Failures) -> WindowsSampler:
    """The sampler of this Windows. Raises AttributeError or OSError elsewhere."""
    return WindowsSampler(getattr(ctypes, "WinDLL")("kernel32"), failures)  # noqa: B009 - only Windows has it
