"""What `ullage place` says of a decision besides its table: the time predicted, and the ways it could have gone."""

from __future__ import annotations

from google.protobuf import duration_pb2

from services.cli import tables
from tests.cli.canned import CannedMaster
from tests.cli.conftest import Ullage
from ullage.v1 import model_pb2


def milliseconds(count: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(count * 1e6))
    return duration


def shard(rank: int, node_id: str, layers: tuple[int, int], stage: float, hop: float | None) -> model_pb2.Shard:
    return model_pb2.Shard(
        rank=rank,
        node_id=node_id,
        first_layer=layers[0],
        end_layer=layers[1],
        stage_time=milliseconds(stage),
        hop_time=None if hop is None else milliseconds(hop),
    )


def decided() -> model_pb2.Placement:
    """Two ranks, one of them on a node without a name, and two other ways."""
    return model_pb2.Placement(
        shards=[shard(0, "aaaa-1", (0, 12), 8.25, 0.3), shard(1, "bbbb-2", (12, 20), 5.0, 0.04)],
        nodes=[model_pb2.NodeBudget(node_id="aaaa-1", friendly_name="desk"), model_pb2.NodeBudget(node_id="bbbb-2")],
        time_per_token=milliseconds(13.59),
        alternatives=[
            model_pb2.Alternative(shards=[shard(0, "aaaa-1", (0, 20), 16, None)], reason="2.4 ms more for each token"),
            model_pb2.Alternative(
                shards=[shard(0, "bbbb-2", (0, 9), 9, 1), shard(1, "cccc-3", (9, 20), 9, 1)],
                reason="6.4 ms more for each token",
            ),
        ],
    )


def test_the_predicted_time_is_told_with_its_parts_which_add_up() -> None:
    assert tables.prediction(decided()) == [
        "predicted for a token: 13.6 ms = rank 0 8.2 ms + 0.3 ms on, rank 1 5.0 ms + 0.0 ms on"
    ]


def test_a_single_rank_hands_nothing_on() -> None:
    alone = model_pb2.Placement(shards=[shard(0, "aaaa-1", (0, 20), 16, None)], time_per_token=milliseconds(16))

    assert tables.prediction(alone) == ["predicted for a token: 16.0 ms = rank 0 16.0 ms"]


def test_nothing_is_predicted_where_speeds_are_not_known() -> None:
    placement = decided()
    placement.ClearField("time_per_token")

    assert tables.prediction(placement) == []


def test_each_other_way_is_told_with_its_layers_and_what_it_lacked() -> None:
    assert tables.runners_up(decided()) == [
        "or desk 0-19: 2.4 ms more for each token",
        "or bbbb-2 0-8, cccc-3 9-19: 6.4 ms more for each token",
    ]


def test_place_and_its_dry_run_say_both(ullage: Ullage, master: CannedMaster) -> None:
    master.instance.placement.MergeFrom(decided())

    for said in (ullage("place", "m", "--no-wait").out, ullage("place", "m", "--dry-run").out):
        assert "predicted for a token: 13.6 ms = rank 0 " in said
        assert "or desk 0-19: 2.4 ms more for each token\n" in said
