"""What the program macmon prints: power, temperatures and use of a Mac's parts, and its memory besides.

Rules this module lives by:
- It renames fields between releases. Each is taken by whichever of its names is there, and is alone absent where
  none is; memory stands or falls by itself.
- Its memory is the last to be believed, after the kernel's own figures.
- A share is 0 to 1 in every release, also where its name says pct. Power and temperature of 0 are what it prints
  where it does not know.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NamedTuple

from services.probe.darwin.sampler import MacmonMemory
from services.probe.darwin.sysctl import Swap

LINE_BYTES_MAX: Final = 64 * 1024
"""The longest seen, with 32 cores, is near 8 KiB."""

_BYTES_MAX: Final = 2**63


class Macmon(NamedTuple):
    """One of its lines; what it did not say is None. Shares in per cent."""

    memory: MacmonMemory | None = None
    cpu_pct: float | None = None
    performance_cores_pct: float | None = None
    efficiency_cores_pct: float | None = None
    gpu_pct: float | None = None
    cpu_celsius: float | None = None
    gpu_celsius: float | None = None
    system_watts: float | None = None
    cpu_watts: float | None = None
    gpu_watts: float | None = None
    ane_watts: float | None = None


def parse(line: bytes) -> list[Macmon]:
    """The objects in `line`, one after the other, up to the first that is cut off. Never raises."""
    text = line.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    found: list[Macmon] = []
    at = text.find("{")
    while at >= 0:
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        found.append(_read(value))
        at = text.find("{", at)
    return found


def _read(line: dict[str, Any]) -> Macmon:
    temperatures = line.get("temp")
    return Macmon(
        memory=_memory(line.get("memory")),
        cpu_pct=_share(line, "cpu"),
        performance_cores_pct=_share(line, "pcpu"),
        efficiency_cores_pct=_share(line, "ecpu"),
        gpu_pct=_share(line, "gpu"),
        cpu_celsius=_measured(temperatures, "cpu_temp_avg"),
        gpu_celsius=_measured(temperatures, "gpu_temp_avg"),
        system_watts=_measured(line, "sys_power"),
        cpu_watts=_measured(line, "cpu_power"),
        gpu_watts=_measured(line, "gpu_power"),
        ane_watts=_float(line, "ane_power"),
    )


def _memory(block: object) -> MacmonMemory | None:
    """The memory, None where total or used is missing or they contradict each other."""
    total, used = _size(block, "ram_total"), _size(block, "ram_usage")
    if not total or used is None or used > total:
        return None
    swap, swap_used = _size(block, "swap_total"), _size(block, "swap_usage")
    if swap is None or swap_used is None:
        return MacmonMemory(total, used)
    return MacmonMemory(total, used, Swap(swap, max(0, swap - swap_used)))


def _share(line: dict[str, Any], part: str) -> float | None:
    """In per cent, under whichever name: 0.8 renamed it twice, and before 0.8 it was [MHz, share]."""
    names = (f"{part}_scaled_ratio", f"{part}_usage_ratio", f"{part}_usage_pct", f"{part}_usage")
    values = [value[1] if isinstance(value := line[name], list) and len(value) == 2 else value
              for name in names if name in line]  # fmt: skip
    known = [share for value in values if (share := _number(value)) is not None]
    return min(known[0], 1.0) * 100 if known else None


def _measured(block: object, name: str) -> float | None:
    """A figure that cannot be 0 on a running machine: 0 is what it prints for one it does not have."""
    return _float(block, name) or None


def _float(block: object, name: str) -> float | None:
    return _number(block.get(name)) if isinstance(block, dict) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        read = float(value)
    except OverflowError:
        return None
    return read if math.isfinite(read) and 0 <= read < 1e6 else None


def _size(block: object, name: str) -> int | None:
    value = block.get(name) if isinstance(block, dict) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # JSON knows one kind of number only.
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _BYTES_MAX else None
