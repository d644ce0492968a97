"""A node without the model's files runs its part of the model all the same: the bytes come from the other node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.model_folder import read_manifest
from tests.integration.cluster import Cluster
from tests.integration.ring import MODEL, Ring

pytestmark = pytest.mark.model


@pytest.fixture
def ring(tmp_path: Path, smollm2_folder: Path) -> Iterator[Ring]:
    """Two nodes; only the first has the model."""
    cluster = Cluster(tmp_path, smollm2_folder.parent)
    try:
        cluster.start_master()
        cluster.ullage("models", "add", MODEL)
        (tmp_path / "bare").mkdir()
        addresses = {}
        for name, options in (("node-1", ()), ("node-2", ("--models-dir", str(tmp_path / "bare")))):
            cluster.start_probe(name, "--memory", "1500MiB")
            addresses[name] = cluster.start_runner(name, *options)
        cluster.wait_until_known(list(addresses))
        ring = Ring(cluster, addresses)
        yield ring
        ring.close()
    finally:
        cluster.stop()


def test_a_node_without_the_files_fetches_its_part_and_the_answer_is_the_same(
    ring: Ring, tmp_path: Path, smollm2_folder: Path
) -> None:
    ring.place_and_run({"node-1": 30})
    whole = ring.ask(tokens=16)
    whole.wait()
    ring.release()

    ring.place_and_run({"node-1": 20, "node-2": 10})
    split = ring.ask(tokens=16)
    split.wait()

    assert split.error is None
    assert split.token_ids == whole.token_ids
    partial = next((tmp_path / "bare" / ".partial").iterdir())
    layer_bytes = sum(layer.weight.stored_bytes for layer in read_manifest(smollm2_folder).layers[:10])
    rest_bytes = sum(path.stat().st_size for path in smollm2_folder.iterdir() if path.suffix != ".safetensors")
    embedding_bytes = read_manifest(smollm2_folder).embedding.stored_bytes
    on_disk_bytes = sum(path.stat().st_blocks * 512 for path in partial.iterdir())
    assert on_disk_bytes == pytest.approx(layer_bytes + embedding_bytes + rest_bytes, rel=0.1)
