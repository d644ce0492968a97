"""Clusters on real logs, with a clock that the test owns."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.master import log_file
from services.master.cluster import Cluster, opened
from tests.clocks import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "master" / "events.db"


@pytest.fixture(scope="session")
def empty_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log without events, to be copied: to take every migration costs more than most tests do."""
    path = tmp_path_factory.mktemp("empty") / "events.db"
    log_file.prepare(path)
    return path


@pytest.fixture
async def cluster(log_path: Path, clock: FakeClock, empty_log: Path) -> AsyncIterator[Cluster]:
    log_path.parent.mkdir(exist_ok=True)
    shutil.copyfile(empty_log, log_path)
    async with opened(log_path, clock) as cluster:
        yield cluster
