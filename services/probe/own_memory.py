"""The memory of this node's own shards, so that a node that was filled on purpose does not look full to itself.

The runner keeps an empty file for each shard's process in `<state-dir>/shards`, named by its process id. The
folder is listed at every eighth reading; a process new in it is looked at once, since a file that a killed runner left
behind may name anything by now.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psutil

from services.probe.reading import added

FOLDER_NAME: Final = "shards"
_READINGS_PER_NAMES: Final = 8
_SHARD_MODULE: Final = "services.runner.shard"


def is_shard(pid: int) -> bool:
    """Whether the process runs a shard, as far as its command line tells."""
    try:
        return any(_SHARD_MODULE in argument for argument in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


class OwnMemory:
    """Knows which processes are shards, and what they hold."""

    def __init__(
        self,
        state_dir: Path,
        *,
        is_own: Callable[[int], bool] = is_shard,
        process: Callable[[int], psutil.Process] = psutil.Process,
    ) -> None:
        self._process = process
        self._folder = state_dir / FOLDER_NAME
        self._is_own = is_own
        self._shards: dict[str, psutil.Process] = {}
        self._strangers: set[str] = set()
        self._names: list[str] | None = None
        self._readings_until_names = 0

    def read(self) -> int | None:
        """Resident bytes of all shards that run, 0 where there are none. Never raises.

        None where no runner ever kept a folder, and where one of them cannot be looked at.
        """
        names = self._listed()
        if names is None:
            return None
        try:
            self._shards = {name: shard for name in names if (shard := self._shard(name)) is not None}
        except OSError:  # psutil lets through that no file can be opened any more.
            return None
        self._strangers.intersection_update(names)
        return added(*[self._resident_bytes(name) for name in names if name in self._shards])

    def _listed(self) -> list[str] | None:
        """The names in the folder, as they were at the last of every eighth reading."""
        if self._readings_until_names == 0:
            self._readings_until_names = _READINGS_PER_NAMES
            try:
                self._names = os.listdir(self._folder)  # noqa: PTH208 - names are all it takes
            except OSError:
                self._names = None
        self._readings_until_names -= 1
        return self._names

    def _shard(self, name: str) -> psutil.Process | None:
        """The process of that name, where it is a shard."""
        if name in self._shards or name in self._strangers or not (name.isdecimal() and len(name) < 11):
            return self._shards.get(name)
        if self._is_own(int(name)):
            try:
                return self._process(int(name))
            except psutil.Error:
                return None
        self._strangers.add(name)
        return None

    def _resident_bytes(self, name: str) -> int | None:
        try:
            return int(self._shards[name].memory_info().rss)
        except psutil.NoSuchProcess:
            # As long as its file stays behind, whoever gets the number next is a stranger.
            del self._shards[name]
            self._strangers.add(name)
            return 0
        except (psutil.Error, OSError):
            return None
