"""A disk that is full where the log is: what cannot be kept is refused, and what happened meanwhile is told later."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from tests.integration.cluster import HANG_SECONDS, Cluster
from tests.integration.pace import Moment
from tests.integration.ring import BOUND_SECONDS, LONG_ANSWER_TOKENS, MODEL, Ring

pytestmark = pytest.mark.model


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of some mebibytes."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True, timeout=HANG_SECONDS).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=HANG_SECONDS)


@pytest.fixture
def ring(small_disk: Path, smollm2_folder: Path) -> Iterator[Ring]:
    cluster = Cluster(small_disk, smollm2_folder.parent)
    try:
        cluster.start_master()
        cluster.ullage("models", "add", MODEL)
        cluster.start_probe("node-1", "--memory", "1500MiB")
        address = cluster.start_runner("node-1")
        cluster.wait_until_known(["node-1"])
        ring = Ring(cluster, {"node-1": address})
        yield ring
        ring.close()
    finally:
        cluster.stop()


def fill(folder: Path) -> Path:
    """Leave not one page."""
    filling = folder / "filling"
    with filling.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return filling


def test_with_a_full_disk_nothing_hangs_and_all_is_told_once_there_is_room(ring: Ring, small_disk: Path) -> None:
    ring.place_and_run({"node-1": 30})
    answer = ring.ask(tokens=LONG_ANSWER_TOKENS)
    answer.has_tokens(3)
    filling = fill(small_disk)
    since = Moment()
    ring.shard(0).kill()

    answer.ended_by(since)
    assert "rank 0" in answer.details
    with pytest.raises(grpc.RpcError) as refused:
        ring.place_once({"node-1": 30})
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert since.age_seconds < 2 * BOUND_SECONDS

    since = Moment()
    filling.unlink()
    failure = ring.failed(since)
    # Another test may have had the kernel kill a process of its own meanwhile, which is said where there is a doubt.
    assert failure.removesuffix(": memory ran out, and the kernel killed a process then") == (
        "rank 0 on node-1 failed while RUNNING: its process ended: killed by SIGKILL"
    )
    ring.everything_is_gone()
    ring.place_and_run({"node-1": 30})
    ring.answers()
