"""What an operator can set about a runner."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from services import rpc
from services.config import Setting
from services.runner.supervisor import DEFAULT_BOUNDS, Bounds

DEFAULT_MASTER: Final = "127.0.0.1:50500"
DEFAULT_ADDRESS: Final = "127.0.0.1:50502"

_EVERYWHERE: Final = frozenset({"0.0.0.0", "[::]", "*", ""})  # noqa: S104 - recognised, not listened on


class SettingsError(Exception):
    """Options that contradict each other; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The runner's options, checked."""

    master: str
    address: str
    advertise: str | None
    """Where others dial this runner; None: where it listens."""
    state_dir: Path
    models_dir: Path
    threads: int
    """For all shards together."""
    weights: Literal["auto", "float32", "stored"]
    ready_file: Path | None
    bounds: Bounds = DEFAULT_BOUNDS
    options: tuple[Setting, ...] = ()
    """All of it as it was said, for people."""

    def __post_init__(self) -> None:
        host = self.address.rpartition(":")[0]
        if self.advertise is None and host in _EVERYWHERE:
            raise SettingsError(
                f"nobody can dial {self.address}: say --advertise HOST:PORT, as other machines know this one"
            )

        if self.advertise is not None and not _can_be_dialled(self.advertise):
            raise SettingsError(
                f"nobody can dial --advertise {self.advertise!r}: write HOST:PORT, as other machines know this one"
            )

    def advertised(self, port: int) -> str:
        """Where others dial this runner, which listens on `port`."""
        return self.advertise or f"{self.address.rpartition(':')[0]}:{port}"


def _can_be_dialled(address: str) -> bool:
    """Whether `address` names one machine and one port, and nothing else: no URL, and no "everywhere"."""
    host, _, port = address.rpartition(":")
    is_name = "/" not in host and (":" not in host or host.startswith("["))
    return is_name and host not in _EVERYWHERE and port.isdecimal() and 0 < int(port) <= rpc.PORT_MAX
