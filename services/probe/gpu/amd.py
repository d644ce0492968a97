"""AMD's GPUs, as the driver shows them in /sys/class/drm.

A processor's own graphics set a part of the RAM aside and take the rest as they need it ("gtt"), so they are
unified: their part is small and fixed, and gtt is RAM that nobody may count twice. A card has memory of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from services.probe.failures import Failures
from services.probe.gpu import node_figures
from services.probe.gpu.memory import gpu
from ullage.v1 import node_pb2

_DIGITS_MAX: Final = 19
_VENDOR: Final = "0x1002"


class AmdGpus:
    """The GPUs of this machine that AMD's driver runs."""

    def __init__(self, root: Path, failures: Failures) -> None:
        """`root` holds sys: "/", or a recorded tree. Cards are found once."""
        self._failures = failures
        devices = sorted((root / "sys/class/drm").glob("card[0-9]*/device"))
        self._devices = [device for device in devices if _text(device / "vendor") == _VENDOR and _is_card(device)]

    def fill(self, sample: node_pb2.SystemSample) -> None:
        """Add each GPU, and what of them is the node's."""
        for device in self._devices:
            found = self._failures.guard(str(device), lambda device=device: read(device))  # type: ignore[misc]  # mypy infers no lambda with a default
            if found is not None:
                sample.gpus.append(found)
        node_figures.fill(sample)


def read(device: Path) -> node_pb2.Gpu:
    """What the driver shows in the folder `device`; what is missing or no number is absent. Never raises."""
    vram, gtt = _number(device / "mem_info_vram_total"), _number(device / "mem_info_gtt_total")
    used = _number(device / "mem_info_vram_used")
    # Cards have more memory than they borrow; a processor's graphics borrow more than they have. But a small card in
    # a large machine borrows more too: it has chips that somebody made, whom the driver names.
    has_chips = _text(device / "mem_info_vram_vendor") not in {"", "unknown"}
    borrows = vram is not None and gtt is not None and vram < gtt and _is_small(vram)
    own = vram if has_chips or not borrows else None
    name = _text(device / "product_name") or f"AMD {_text(device / 'device')}".strip()
    if vram is None:
        found = node_pb2.Gpu(name=name)
    else:
        found = gpu(name, own, None if own is None or used is None else own - used)
    usage = _number(device / "gpu_busy_percent")
    if usage is not None and usage <= 100:
        found.usage_pct = usage
    for sensors in sorted(device.glob("hwmon/hwmon*")):
        if (temperature := _number(sensors / "temp1_input")) is not None:
            found.temperature_celsius = temperature / 1000
        if (power := _number(sensors / "power1_average")) is not None:
            found.power_watts = power / 1_000_000
    return found


def _is_small(vram_bytes: int) -> bool:
    return vram_bytes <= 4 << 30


def _is_card(device: Path) -> bool:
    return (device / "mem_info_vram_total").exists()


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX else None
