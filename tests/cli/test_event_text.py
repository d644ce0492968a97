from google.protobuf.message import Message

from services.cli.event_text import KINDS, line, node_id, summary
from ullage.v1 import event_pb2, model_pb2, node_pb2

NAMES = {"aaaa-1": "node-1", "bbbb-2": "node-2"}


def test_an_event_is_one_line_of_place_time_kind_node_and_substance() -> None:
    event = event_pb2.RecordedEvent(sequence=12)
    event.recorded_at.FromNanoseconds(1_700_000_000_123_000_000)
    sample = event.fact.memory_sampled.sample
    event.fact.memory_sampled.node_id = "aaaa-1"
    sample.pressure_level = node_pb2.PRESSURE_LEVEL_WARNING
    sample.balanced_available_bytes = 2**30
    assert line(event, NAMES) == (
        "     12  22:13:20.123  memory_sampled        node-1        WARNING, 1.00 GiB available"
    )


def test_a_placement_says_who_got_which_layers() -> None:
    shards = [
        model_pb2.Shard(rank=0, node_id="aaaa-1", first_layer=0, end_layer=12),
        model_pb2.Shard(rank=1, node_id="bbbb-2", first_layer=12, end_layer=30),
    ]
    fact = event_pb2.Fact()
    fact.instance_placed.instance_id = "i-1"
    fact.instance_placed.spec.model_id = "m"
    fact.instance_placed.placement.shards.extend(shards)
    assert summary(fact, NAMES) == "i-1: m on node-1 0-11, node-2 12-29"


def test_a_failed_shard_says_why() -> None:
    fact = event_pb2.Fact()
    status = fact.shard_status_changed.status
    status.instance_id, status.rank, status.phase = "i-1", 1, model_pb2.SHARD_PHASE_FAILED
    status.failure.message = "out of memory"
    assert summary(fact, NAMES) == "i-1 rank 1: FAILED: out of memory"


def test_every_kind_of_fact_has_a_line_and_none_fails_when_it_is_empty() -> None:
    for kind in KINDS:
        fact = event_pb2.Fact()
        body: Message = getattr(fact, kind)
        body.SetInParent()
        assert kind in line(event_pb2.RecordedEvent(fact=fact), NAMES)
        assert node_id(fact) == ""


def test_a_fact_of_a_later_release_is_shown_as_such() -> None:
    assert line(event_pb2.RecordedEvent(sequence=3), NAMES).endswith("a fact of a later release")
