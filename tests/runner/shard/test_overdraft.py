"""A real shard that holds more than it was promised: seen from outside, told, and asked for nothing more."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from services.clock import SystemClock
from services.runner.model_fetch import Fetcher
from services.runner.shards import Shards
from tests.runner.shard import tiny_weights
from tests.runner.told import MakeWorkshop, Told
from ullage.v1 import dispatch_service_pb2, model_pb2


async def test_a_shard_over_its_promise_is_told_with_the_bytes_it_holds_too_many(
    workshop: MakeWorkshop, told: Told, tmp_path: Path
) -> None:
    # Some 32 MiB of weights, promised as nothing.
    folder = tiny_weights.write(tmp_path / "wide", hidden_size=384, intermediate_size=1024)
    model = tiny_weights.prepared(folder, "wide")
    shop = dataclasses.replace(
        workshop("is not asked"),
        command=(sys.executable, "-m", "services.runner.shard"),
        models_dir=tmp_path,
        fetcher=Fetcher("n1", tmp_path, SystemClock()),
    )
    granted_bytes = 1 << 20
    assignment = dispatch_service_pb2.Assignment(
        instance_id="i1",
        shard=model_pb2.Shard(
            node_id="n1", end_layer=len(model.layers), bytes=model_pb2.ShardBytes(total_bytes=granted_bytes)
        ),
        model=model,
        peers=[dispatch_service_pb2.Peer(node_id="n1", address="127.0.0.1:1")],
        context_tokens=64,
    )
    shards = Shards(shop, threads=1)
    try:
        shards.reconcile({("i1", 0): assignment}, {})
        running = await told.until("RUNNING")

        assert running.over_grant_bytes == running.resident_bytes - granted_bytes
        assert running.over_grant_bytes > 64 << 20
        overdrawn = shards.overdrawn("i1")
        assert overdrawn is not None
        assert overdrawn.over_grant_bytes > 64 << 20
    finally:
        await shards.close("the test is over")
    assert shards.overdrawn("i1") is None
    assert told.statuses[-1].returned_bytes > 64 << 20
