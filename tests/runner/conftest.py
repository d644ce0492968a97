"""A workshop whose shards are the fake ones, and a way to wait for what they tell."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from services import model_folder
from services.clock import Clock, SystemClock
from services.runner.model_fetch import Fetcher
from services.runner.supervisor import Bounds, Workshop
from tests import tiny_models
from tests.runner.told import MakeAssignment, MakeWorkshop, Told
from ullage.v1 import dispatch_service_pb2, model_pb2

FAKE_SHARD = Path(__file__).with_name("fake_shard.py")

PATIENT = Bounds(stuck_seconds=60.0, answer_seconds=60.0, explain_seconds=60.0)
"""For all tests but those of a bound: a shard that is kept from the processor for long is no news to them."""


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A private folder with a path that a unix socket can have."""
    with tempfile.TemporaryDirectory(prefix="ullage-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tiny_models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model "tiny" is."""
    models_dir = tmp_path_factory.mktemp("models")
    folder = tiny_models.write(models_dir / "tiny")
    model_folder.write_manifest(folder, model_folder.describe(folder, model_id="tiny", source="a test"))
    return models_dir


@pytest.fixture(scope="session")
def tiny_model(tiny_models_dir: Path) -> model_pb2.Model:
    return model_folder.read_manifest(tiny_models_dir / "tiny")


@pytest.fixture
def workshop(told: Told, short_folder: Path, tiny_models_dir: Path) -> MakeWorkshop:
    """Makes a workshop whose shards behave as asked."""

    def make(behaviour: str, bounds: Bounds | None = None, clock: Clock | None = None) -> Workshop:
        return Workshop(
            node_id="n1",
            command=(sys.executable, str(FAKE_SHARD), behaviour),
            weights="float32",
            folder=short_folder,
            models_dir=tiny_models_dir,
            fetcher=Fetcher("n1", tiny_models_dir, SystemClock()),
            clock=clock or SystemClock(),
            tell=told,
            bounds=bounds or PATIENT,
        )

    return make


@pytest.fixture
def assignment(tiny_model: model_pb2.Model) -> MakeAssignment:
    """Makes an assignment of one rank, of an instance whose two ranks are on n1 and n2."""

    def make(instance_id: str = "i1", rank: int = 0) -> dispatch_service_pb2.Assignment:
        return dispatch_service_pb2.Assignment(
            instance_id=instance_id,
            rank=rank,
            shard=model_pb2.Shard(rank=rank, node_id="n1"),
            model=tiny_model,
            peers=[
                dispatch_service_pb2.Peer(rank=0, node_id="n1", address="127.0.0.1:1"),
                dispatch_service_pb2.Peer(rank=1, node_id="n2", address="127.0.0.1:2"),
            ],
        )

    return make
