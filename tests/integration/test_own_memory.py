"""A node knows what of its memory its own shards hold, from their start to their end."""

from __future__ import annotations

import pytest

from tests.integration.cluster import Cluster, eventually
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.model

MIB = 1 << 20


def own_bytes(cluster: Cluster, name: str) -> int | None:
    nodes = cluster.state()["state"]["nodes"]
    memory = next(one["memory"] for one in nodes if one["identity"]["friendly_name"] == name)
    return int(memory["own_bytes"]) if "own_bytes" in memory else None


def test_the_probe_tells_its_nodes_shards_from_other_memory(released: Cluster) -> None:
    assert own_bytes(released, "node-1") == 0
    placed = released.ask("place", MODEL, "--context", "256", "--layers", "node-1=30")
    instance_id = placed["instance_id"]
    eventually("it runs", lambda: released.runs(instance_id), seconds=120)
    held = eventually("the probe sees the shard", lambda: own_bytes(released, "node-1"))
    assert held is not None
    assert 200 * MIB < held < 1500 * MIB
    assert own_bytes(released, "node-2") == 0
    released.ullage("release", instance_id)
    eventually("the probe sees it go", lambda: own_bytes(released, "node-1") == 0)
