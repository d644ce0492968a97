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


def placed(cluster: Cluster) -> str:
    """One more instance, all of it on node-1, running."""
    instance_id: str = cluster.ask("place", MODEL, "--context", "256", "--layers", "node-1=30")["instance_id"]
    eventually("it runs", lambda: cluster.runs(instance_id), seconds=120)
    return instance_id


def test_two_instances_on_a_node_answer_alike_and_its_probe_tells_them_from_other_memory(released: Cluster) -> None:
    assert own_bytes(released, "node-1") == 0
    first = placed(released)
    held = eventually("the probe sees the shard", lambda: own_bytes(released, "node-1"))
    assert held is not None
    assert 200 * MIB < held < 1500 * MIB
    assert own_bytes(released, "node-2") == 0

    second = placed(released)
    eventually("the probe sees both", lambda: (own_bytes(released, "node-1") or 0) > held + 200 * MIB)
    answers = [released.generate(each, "Hello", "--raw", "--max-tokens", "4")["token_ids"] for each in (first, second)]
    assert answers[0] == answers[1]

    released.ullage("release", first)
    eventually("the probe sees it go", lambda: (own_bytes(released, "node-1") or 0) < held + 200 * MIB)
    assert released.generate(second, "Hello", "--raw", "--max-tokens", "4")["token_ids"] == answers[1]
    released.ullage("release", second)
    eventually("the probe sees none", lambda: own_bytes(released, "node-1") == 0)
