"""Which processes are this node's shards, for the probe beside: in `<state-dir>/shards` an empty file for each,
named by its process id.

The probe tells their memory from that of other programs. A file that is left behind names a process that is gone
or is something else by now; the probe looks, and the next runner clears it away.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import structlog

FOLDER_NAME: Final = "shards"

log = structlog.get_logger()


class Roster:
    """The shards that run now. What it cannot write is logged: the node then looks fuller to itself than it is."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER_NAME

    def clear(self) -> None:
        """Begin anew: none of an earlier runner's shards outlived it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.iterdir():
                left.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the probe cannot be told which processes are shards", cause=str(error))

    def enter(self, pid: int) -> None:
        """The process `pid` is a shard from now on."""
        with contextlib.suppress(OSError):
            (self._folder / str(pid)).touch()

    def leave(self, pid: int) -> None:
        """The process `pid` is gone."""
        with contextlib.suppress(OSError):
            (self._folder / str(pid)).unlink(missing_ok=True)
