"""What an operator can set about the master."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.config import Setting
from services.master.liveness import DEFAULT_RUNNER_BOUNDS, Bounds, RunnerBounds
from services.master.retention import DEFAULT, Policy

DEFAULT_ADDRESS: Final = "127.0.0.1:50500"

LOG_NAME: Final = Path("master") / "events.db"
"""The log, in the folder for state."""


_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class SettingsError(Exception):
    """Options that contradict each other; the message says which."""


def seconds(text: str) -> float:
    """A length of time as people type it, e.g. "90s", "15m", "2h" or "7d". Raises SettingsError for another text."""
    number, unit = text[:-1], _UNIT_SECONDS.get(text[-1:])
    if unit is None or not number.isdecimal():
        raise SettingsError(f"{text!r} is no length of time: write e.g. 90s, 15m, 2h or 7d")
    return float(int(number) * unit)


@dataclass(frozen=True, slots=True)
class Settings:
    """The master's options, checked."""

    address: str
    log_path: Path
    bounds: Bounds
    ready_file: Path | None
    read_only: bool
    retention: Policy = DEFAULT
    runner_bounds: RunnerBounds = DEFAULT_RUNNER_BOUNDS
    options: tuple[Setting, ...] = ()
    """All of it as it was said, for people."""

    def __post_init__(self) -> None:
        if not 0 < self.bounds.suspect_after_seconds <= self.bounds.lost_after_seconds:
            raise SettingsError("--suspect-after-ms must be above 0, and not above --lost-after-ms")

        if self.runner_bounds.stalled_after_seconds <= self.bounds.suspect_after_seconds:
            raise SettingsError("--runner-stalled-after-ms must be above --suspect-after-ms")

        if not 0 < self.retention.samples_seconds <= self.retention.minutes_seconds:
            raise SettingsError("--keep-samples must be above 0, and not above --keep-minutes")

    def listened(self, port: int) -> str:
        """Where clients dial this master, which listens on `port`."""
        return self.address if self.address.startswith("unix:") else f"{self.address.rpartition(':')[0]}:{port}"
