"""Clusters on real logs, with a clock that the test owns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.master.cluster import Cluster, opened
from tests.clocks import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "master" / "events.db"


@pytest.fixture
async def cluster(log_path: Path, clock: FakeClock) -> AsyncIterator[Cluster]:
    async with opened(log_path, clock) as cluster:
        yield cluster
