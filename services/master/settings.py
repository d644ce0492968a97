"""What an operator can set about the master."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.master.liveness import Bounds

DEFAULT_ADDRESS: Final = "127.0.0.1:50500"


class SettingsError(Exception):
    """Options that contradict each other; the message says which."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The master's options, checked."""

    address: str
    log_path: Path
    bounds: Bounds
    ready_file: Path | None
    read_only: bool

    def __post_init__(self) -> None:
        if not 0 < self.bounds.suspect_after_seconds <= self.bounds.lost_after_seconds:
            raise SettingsError("--suspect-after-ms must be above 0, and not above --lost-after-ms")
