"""The log is the truth: a master that is killed comes back with the same state, and what runs goes on running."""

from __future__ import annotations

import json
import random
import socket
from collections import defaultdict
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.integration.cluster import Cluster, eventually
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.model

NAMES = ("node-1", "node-2")


def shard_pids(cluster: Cluster) -> dict[str, list[int]]:
    """The processes that hold shards, by runner."""
    return {
        name: sorted(child.pid for child in psutil.Process(cluster.processes[f"{name}-runner"].pid).children())
        for name in NAMES
    }


def instance_states(cluster: Cluster) -> list[str]:
    return [instance["state"] for instance in cluster.state()["state"]["instances"]]


def source_sequences(events: list[dict[str, Any]]) -> dict[str, list[int]]:
    by_source: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event["source"] != "master":
            by_source[event["source"]].append(int(event["source_sequence"]))
    return by_source


def kept_port() -> int:
    """A free port that nobody is given who asks for any: it is still free when the master is back."""
    for port in random.sample(range(20_000, 30_000), 100):
        with socket.socket() as tried, suppress(OSError):
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def test_a_master_killed_while_an_instance_runs_comes_back_as_it_was(own: Cluster) -> None:
    own.start_master(listen=f"127.0.0.1:{kept_port()}")
    own.ullage("models", "add", MODEL)
    own.start_nodes(NAMES, memory="1500MiB")
    own.ullage("place", MODEL, "--context", "256", "--min-nodes", "2")
    before = own.generate(MODEL, "The sea is", "--raw", "--max-tokens", "8")
    pids = shard_pids(own)
    assert [len(of_runner) for of_runner in pids.values()] == [1, 1]
    known = own.state()
    sequence = known["state"]["sequence"]

    own.kill("master")
    own.start_master(listen=own.address)

    assert own.ask("state", "--at", sequence)["state_hash"] == known["state_hash"]
    assert instance_states(own) == ["INSTANCE_STATE_RUNNING"]
    last = int(own.state()["head_sequence"])
    eventually("both nodes are heard again", lambda: _samples_after(own, last) >= set(NAMES))

    after = own.generate(MODEL, "The sea is", "--raw", "--max-tokens", "8")
    assert after["token_ids"] == before["token_ids"]
    assert (shard_pids(own), instance_states(own)) == (pids, ["INSTANCE_STATE_RUNNING"])

    everything = [json.loads(line) for line in own.ullage("events", "--from", "1", "--json").stdout.splitlines()]
    assert [int(event["sequence"]) for event in everything] == list(range(1, len(everything) + 1))
    for source, said in source_sequences(everything).items():
        assert said == list(range(1, len(said) + 1)), f"{source} has a gap or a double"


def _samples_after(cluster: Cluster, sequence: int) -> set[str]:
    """The names of the nodes whose memory was sampled after `sequence`."""
    said = cluster.ullage("events", "--from", str(sequence + 1), "--kind", "memory_sampled").stdout
    return {line.split()[3] for line in said.splitlines()}


def test_a_second_master_on_the_same_log_is_refused_and_harms_nothing(own: Cluster) -> None:
    own.start_master()
    state_dir = str(own.folder / "master")
    said = own.ullage("master", "--listen", "127.0.0.1:0", "--state-dir", state_dir, code=1)
    [line] = said.stderr.splitlines()
    assert "another master" in line
    assert own.state()["state"]["sequence"] == "1"


def test_a_port_in_use_is_one_clear_line(own: Cluster) -> None:
    own.start_master()
    other = str(own.folder / "other")
    said = own.ullage("master", "--listen", own.address, "--state-dir", other, code=1)
    [line] = said.stderr.splitlines()
    assert f"cannot listen on {own.address}: it is in use" in line


def test_a_node_whose_id_was_copied_to_another_machine_is_refused_by_name(own: Cluster) -> None:
    own.start_master()
    own.start_probe("node-1")
    eventually("node-1 is heard", lambda: own.state()["state"]["nodes"])
    clone = own.folder / "clone"
    clone.mkdir()
    (clone / "node_id").write_text((own.folder / "node-1" / "node_id").read_text())
    own.start_probe("clone")

    def refused() -> bool:
        return "two machines share one node_id" in own.log_of("clone-probe").read_text()

    eventually("the clone is told", refused)
    assert [node["identity"]["friendly_name"] for node in own.state()["state"]["nodes"]] == ["node-1"]
