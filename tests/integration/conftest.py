"""Real processes: the small model, and a cluster of three nodes that tests share when they leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.integration.cluster import Cluster, eventually

MODEL = "smollm2-135m"
LONG_AGO = datetime.min.replace(tzinfo=UTC)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Iterator[Cluster]:
    """A master and three nodes with room for the whole model on each; the model is registered."""
    cluster = Cluster(tmp_path_factory.mktemp("shared"), smollm2_folder.parent)
    try:
        cluster.start_master()
        cluster.ullage("models", "add", MODEL)
        cluster.start_nodes(["node-1", "node-2", "node-3"], memory="1500MiB")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def own(tmp_path: Path, smollm2_folder: Path) -> Iterator[Cluster]:
    """A cluster that a test starts and breaks as it likes."""
    cluster = Cluster(tmp_path, smollm2_folder.parent)
    yield cluster
    cluster.stop()


@pytest.fixture
def released(shared: Cluster) -> Iterator[Cluster]:
    """The shared cluster, without an instance of the model or its memory on any node, before and after."""
    eventually("every node has looked for shards", lambda: _hold_nothing(shared))
    yield shared
    _release(shared)


def _release(cluster: Cluster) -> None:
    gone = {"INSTANCE_STATE_RELEASED", "INSTANCE_STATE_RELEASING"}
    for instance in cluster.state()["state"]["instances"]:
        if instance["state"] not in gone:
            cluster.ullage("release", instance["instance_id"])
    eventually("every instance is released", lambda: _all_released(cluster))
    # What a shard held is in its node's samples until the probe has looked again; one taken before may be on its way.
    released_at = datetime.now(tz=UTC)
    eventually("no node holds a shard", lambda: _hold_nothing(cluster, released_at))


def _all_released(cluster: Cluster) -> bool:
    return all(one["state"] == "INSTANCE_STATE_RELEASED" for one in cluster.state()["state"]["instances"])


def _hold_nothing(cluster: Cluster, since: datetime = LONG_AGO) -> bool:
    """Whether every node has looked since then, and found nothing."""
    samples = [node["memory"] for node in cluster.state()["state"]["nodes"]]
    return all(datetime.fromisoformat(one["taken_at"]) > since and one.get("own_bytes") == "0" for one in samples)
