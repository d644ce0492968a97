"""What an operator can set about the master."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.master.liveness import Bounds

DEFAULT_ADDRESS: Final = "127.0.0.1:50500"

LOG_NAME: Final = Path("master") / "events.db"
"""The log, in the folder for state."""


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

    def listened(self, port: int) -> str:
        """Where clients dial this master, which listens on `port`."""
        return self.address if self.address.startswith("unix:") else f"{self.address.rpartition(':')[0]}:{port}"
