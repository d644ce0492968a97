"""The facts on their way to the master."""

from __future__ import annotations

from services.runner import outbox as outbox_module
from services.runner.outbox import Outbox
from ullage.v1 import event_pb2, model_pb2


def status(rank: int, phase: model_pb2.ShardPhase.ValueType) -> event_pb2.Fact:
    shard = model_pb2.ShardStatus(instance_id="i", rank=rank, node_id="n", phase=phase)
    return event_pb2.Fact(shard_status_changed=event_pb2.ShardStatusChanged(status=shard))


def generation(number: int) -> event_pb2.Fact:
    return event_pb2.Fact(generation_started=event_pb2.GenerationStarted(generation_id=str(number), instance_id="i"))


LOADING = model_pb2.SHARD_PHASE_LOADING
RUNNING = model_pb2.SHARD_PHASE_RUNNING


def sequences(outbox: Outbox) -> list[int]:
    return [observation.source_sequence for observation in outbox.batch()]


def test_facts_are_numbered_after_the_hello_in_the_order_they_came() -> None:
    outbox = Outbox()
    outbox.add(generation(1))
    outbox.add(generation(2))

    assert [(o.source_sequence, o.fact.generation_started.generation_id) for o in outbox.batch()] == [
        (2, "1"),
        (3, "2"),
    ]


def test_what_was_sent_is_not_sent_again_on_the_same_connection() -> None:
    outbox = Outbox()
    outbox.add(generation(1))
    outbox.batch()
    outbox.add(generation(2))

    assert sequences(outbox) == [3]


def test_after_a_lost_connection_only_what_is_newer_than_the_acknowledged_is_sent() -> None:
    outbox = Outbox()
    for number in range(4):
        outbox.add(generation(number))
    outbox.batch()
    outbox.rewind()
    outbox.acknowledge(3)

    assert sequences(outbox) == [4, 5]
    assert sequences(outbox) == []


def test_what_is_acknowledged_is_forgotten() -> None:
    outbox = Outbox()
    outbox.add(generation(1))
    outbox.batch()
    assert not outbox.empty

    outbox.acknowledge(2)

    assert outbox.empty


def test_of_a_shard_only_the_newest_waiting_status_is_sent_in_the_place_of_the_newest() -> None:
    outbox = Outbox()
    outbox.add(status(0, LOADING))
    outbox.add(status(1, LOADING))
    outbox.add(status(0, RUNNING))

    sent = [o.fact.shard_status_changed.status for o in outbox.batch()]

    assert [(s.rank, s.phase) for s in sent] == [(1, LOADING), (0, RUNNING)]


def test_a_status_that_was_sent_already_keeps_its_number_beside_the_newer_one() -> None:
    outbox = Outbox()
    outbox.add(status(0, LOADING))
    outbox.batch()
    outbox.add(status(0, RUNNING))
    outbox.rewind()

    assert [(o.source_sequence, o.fact.shard_status_changed.status.phase) for o in outbox.batch()] == [
        (2, LOADING),
        (3, RUNNING),
    ]


def test_no_more_than_the_bound_is_under_way_and_the_rest_follows_the_acknowledgement() -> None:
    outbox = Outbox()
    bound = outbox_module.UNACKNOWLEDGED_MAX
    for number in range(bound + 1):
        outbox.add(generation(number))
    assert len(outbox.batch()) == bound
    assert not outbox.arrived.is_set()

    outbox.acknowledge(bound + 1)

    assert outbox.arrived.is_set()
    assert sequences(outbox) == [bound + 2]


def test_when_too_many_wait_the_oldest_generation_is_given_up_and_no_status() -> None:
    outbox = Outbox()
    outbox.add(status(0, RUNNING))
    for number in range(outbox_module.WAITING_MAX):
        outbox.add(generation(number))

    first, second, *_ = outbox.batch()

    assert first.fact.HasField("shard_status_changed")
    assert second.fact.generation_started.generation_id == "1"
