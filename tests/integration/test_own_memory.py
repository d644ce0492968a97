"""A node knows what of its memory its own shards hold, from their start to their end."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.integration.cluster import Cluster, eventually
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.model

MIB = 1 << 20


def sample(cluster: Cluster, name: str) -> dict[str, Any]:
    nodes = cluster.state()["state"]["nodes"]
    found: dict[str, Any] = next(one["memory"] for one in nodes if one["identity"]["friendly_name"] == name)
    return found


def own_bytes(cluster: Cluster, name: str) -> int | None:
    memory = sample(cluster, name)
    return int(memory["own_bytes"]) if "own_bytes" in memory else None


def held_since(cluster: Cluster, name: str, since: datetime) -> int:
    """What the node's shards hold, by a sample that was taken after that; 0 until there is one."""
    memory = sample(cluster, name)
    return int(memory["own_bytes"]) if datetime.fromisoformat(memory["taken_at"]) > since else 0


def placed(cluster: Cluster) -> str:
    """One more instance, all of it on node-1, running."""
    instance_id: str = cluster.ask("place", MODEL, "--context", "256", "--layers", "node-1=30")["instance_id"]
    eventually("it runs", lambda: cluster.runs(instance_id))
    return instance_id


def test_two_instances_on_a_node_answer_alike_and_its_probe_tells_them_from_other_memory(released: Cluster) -> None:
    assert own_bytes(released, "node-1") == 0
    first = placed(released)
    # While it was loaded it held less, and a sample of then may still be on its way.
    running_at = datetime.now(tz=UTC)
    held = eventually("the probe sees the shard", lambda: held_since(released, "node-1", running_at))
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
