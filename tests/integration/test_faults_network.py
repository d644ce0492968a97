"""A machine whose cable is cut, or through which only one direction works: found, named, and got over."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import pytest

from tests.integration.cluster import HANG_SECONDS, IMPATIENT, Cluster, eventually
from tests.integration.network import FarMachine, far_machine
from tests.integration.pace import Moment
from tests.integration.ring import MODEL, PHASES, Ring, dial
from ullage.v1 import dispatch_service_pb2, dispatch_service_pb2_grpc, node_pb2

pytestmark = pytest.mark.model

LAYERS: Final = {"near": 15, "far": 15}


@pytest.fixture(scope="module")
def machine() -> Iterator[FarMachine]:
    with far_machine() as machine:
        yield machine


@pytest.fixture(scope="module")
def ring(machine: FarMachine, tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Iterator[Ring]:
    """A master and a node here, and a node on the far machine."""
    cluster = Cluster(tmp_path_factory.mktemp("network"), smollm2_folder.parent, IMPATIENT)
    try:
        cluster.start_master("--insecure", listen=f"{machine.near_address}:0")
        cluster.ullage("models", "add", MODEL)
        near, far = (
            ("--insecure", "--listen", f"{machine.near_address}:0"),
            ("--insecure", "--listen", f"{machine.far_address}:0"),
        )
        cluster.start_probe("near", "--memory", "1500MiB", *near)
        cluster.start_probe("far", "--memory", "1500MiB", *far, prefix=machine.command)
        addresses = {
            "near": cluster.start_runner("near", *near),
            "far": cluster.start_runner("far", *far, prefix=machine.command),
        }
        cluster.wait_until_known(list(LAYERS))
        ring = Ring(cluster, addresses)
        yield ring
        ring.close()
    finally:
        cluster.stop()


def hold(ring: Ring, machine: FarMachine, phase: str) -> None:
    if phase == "load":
        ring.place_and_see_loading(LAYERS, lambda: ring.rank_on("far"))
    elif not ring.is_running:
        ring.place_and_run(LAYERS)
    far_rank = ring.rank_on("far")
    answer = None
    if phase != "load" and far_rank == 1:
        # From here a request can only be followed to the near runner.
        answer = ring.reach(phase, far_rank, LAYERS)
    since = Moment()
    machine.cut()
    try:
        failure = ring.failed(since)
        assert f"rank {far_rank} on node {ring.node_id('far')}" in failure
        if answer is not None:
            answer.ended_by(since)
            assert f"rank {far_rank}" in answer.details
        eventually("every shard's process is gone, on both sides", lambda: not ring.processes())
    finally:
        machine.mend()
    ring.everything_is_gone()
    ring.place_and_run(LAYERS)
    if far_rank == 1:
        ring.answers()


def test_a_cable_cut_in_the_middle_of_an_answer_is_told_within_five_seconds_and_got_over(
    ring: Ring, machine: FarMachine
) -> None:
    hold(ring, machine, "decode")


@pytest.mark.faults
@pytest.mark.parametrize("phase", [phase for phase in PHASES if phase != "decode"])
def test_a_cable_cut_in_any_phase_is_told_within_five_seconds_and_got_over(
    ring: Ring, machine: FarMachine, phase: str
) -> None:
    hold(ring, machine, phase)


def test_a_direction_that_is_blocked_is_named_before_anything_is_loaded(ring: Ring, machine: FarMachine) -> None:
    port = ring.addresses["near"].rpartition(":")[2]
    rule = ("OUTPUT", "-p", "tcp", "-d", machine.near_address, "--dport", port, "-j", "DROP")
    blocked = subprocess.run(
        [*machine.command, "iptables", "-A", *rule], check=False, capture_output=True, timeout=HANG_SECONDS
    )
    if blocked.returncode != 0:
        pytest.skip("packets cannot be dropped here: no iptables")
    try:
        near, far = ring.node_id("near"), ring.node_id("far")
        # A dial has seconds of the clock, and one that this machine held up is made again.
        links = eventually("near reaches far", lambda: open_from(near, far, links_between(ring)))
        assert not links[far, near].reachable
        assert links[far, near].failure.startswith(f"{ring.addresses['near']} does not answer: ")
    finally:
        subprocess.run([*machine.command, "iptables", "-D", *rule], check=True, timeout=HANG_SECONDS)


Links: TypeAlias = dict[tuple[str, str], node_pb2.Link]


def links_between(ring: Ring) -> Links:
    """Every direction, dialled now."""
    with dial(ring.cluster.address) as channel:
        stub = dispatch_service_pb2_grpc.DispatchServiceStub(channel)
        answer = stub.CheckConnectivity(dispatch_service_pb2.CheckConnectivityRequest(), timeout=HANG_SECONDS)
    return {(link.from_node_id, link.to_node_id): link for link in answer.links}


def open_from(near: str, far: str, links: Links) -> Links | None:
    return links if links[near, far].reachable else None
