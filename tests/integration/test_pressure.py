"""Pressure that a probe reads decides where layers go: from recorded readings to the placement, through every part."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.cluster import Cluster, eventually
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.model

NAMES = ("calm", "pressed")


def start(cluster: Cluster, recorded: str, *, memory: str) -> None:
    """A node under no pressure and one whose probe reads a recorded machine."""
    cluster.start_master()
    cluster.ullage("models", "add", MODEL)
    cluster.start_probe("calm", "--memory", memory)
    cluster.start_probe("pressed", "--memory", memory, recorded=recorded)
    for name in NAMES:
        cluster.start_runner(name)
    cluster.wait_until_known(NAMES)
    level = f"PRESSURE_LEVEL_{recorded.upper()}"
    eventually(f"the master knows of the level {level}", lambda: _levels(cluster)["pressed"] == level)


def _levels(cluster: Cluster) -> dict[str, str]:
    nodes = cluster.state()["state"]["nodes"]
    return {one["identity"]["friendly_name"]: one["memory"]["pressure_level"] for one in nodes if "memory" in one}


def budgets(placement: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {budget["friendly_name"]: budget for budget in placement["nodes"]}


def test_a_critical_node_is_left_out_and_the_answer_says_so(own: Cluster) -> None:
    start(own, "critical", memory="1500MiB")
    said = own.ullage("place", MODEL, "--context", "256", "--dry-run")
    assert "pressed is left out: its memory pressure is CRITICAL" in said.stdout
    placement = own.ask("place", MODEL, "--context", "256", "--dry-run")
    assert {shard["node_id"] for shard in placement["shards"]} == {own.node_id("calm")}
    assert budgets(placement)["pressed"]["exclusion"] == "EXCLUSION_CRITICAL"

    refusal = own.refused("place", MODEL, "--context", "256", "--require", "pressed", code=3)["refusal"]
    assert "pressed" in refusal["message"]
    assert "CRITICAL" in refusal["message"]


def test_a_node_under_warning_weighs_six_tenths(own: Cluster) -> None:
    start(own, "warning", memory="1500MiB")
    placement = own.ask(
        "place", MODEL, "--context", "256", "--dry-run", "--objective", "proportional", "--min-nodes", "2"
    )
    by_name = budgets(placement)
    assert (by_name["calm"]["pressure_factor"], by_name["pressed"]["pressure_factor"]) == (1.0, 0.6)
    assert by_name["calm"]["available_bytes"] == by_name["pressed"]["available_bytes"]
    assert by_name["calm"]["layers"] + by_name["pressed"]["layers"] == 30
    # 30 layers in the proportion 1 : 0.6, give or take one for the endpoints' bytes.
    assert abs(by_name["pressed"]["layers"] - 30 * 0.6 / 1.6) <= 1.5
