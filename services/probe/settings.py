"""What a probe was told at its start."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from services.config import Setting
from services.probe.estimator import Override

_UNITS: Final = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}

_BYTES_MAX: Final = 2**63


class SettingsError(Exception):
    """An option cannot be used; the message says why and what would do."""


@dataclass(frozen=True)
class Settings:
    """The options of one probe."""

    master: str
    listen: str
    insecure: bool
    state_dir: Path
    override: Override | None
    period_ms: int
    system_period_ms: int
    name: str | None
    version: str
    """This release, told since whoever knows it need not run on."""
    root: Path
    ready_file: Path | None
    options: tuple[Setting, ...] = ()
    """All of it as it was said, for people."""

    def to_json(self) -> str:
        """All of it, for `from_json`."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """What `to_json` wrote."""
        given = json.loads(text)
        override, ready_file = given["override"], given["ready_file"]
        return cls(
            **{
                **given,
                "state_dir": Path(given["state_dir"]),
                "root": Path(given["root"]),
                "ready_file": None if ready_file is None else Path(ready_file),
                "override": None if override is None else Override(**override),
                "options": tuple(Setting(*option) for option in given["options"]),
            }
        )


def override(memory: str | None, override_memory: str | None) -> Override | None:
    """The operator's figure: `--memory`, or else the environment's OVERRIDE_MEMORY in GiB. Raises SettingsError."""
    if memory is not None:
        return parse_memory(memory)
    if not override_memory:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", override_memory.strip()):
        raise SettingsError(f"OVERRIDE_MEMORY={override_memory!r} is no whole number of GiB: write for example 16")
    return parse_memory(f"{override_memory.strip()}GiB")


def parse_memory(text: str) -> Override:
    """`450MiB`, `4GB`, `512000000` or `50%` as an override. Raises SettingsError."""
    found = re.fullmatch(r"\s*([0-9]{1,19}(?:\.[0-9]{1,9})?)\s*(%|[A-Za-z]*)\s*", text)
    unit = found[2].lower() if found else ""
    if found is None or (unit != "%" and unit not in _UNITS):
        raise SettingsError(f"{text!r} is no amount of memory: write for example 450MiB, 4GiB, 512000000 or 50%")
    number = float(found[1])
    if unit == "%":
        if number > 100:
            raise SettingsError(f"{text!r} is more than the whole memory: write at most 100%")
        return Override(fraction=number / 100)
    size_bytes = int(number * _UNITS[unit]) if "." in found[1] else int(found[1]) * _UNITS[unit]
    if size_bytes >= _BYTES_MAX:
        raise SettingsError(f"{text!r} is more memory than any machine has: write for example 64GiB")
    return Override(size_bytes=size_bytes)
