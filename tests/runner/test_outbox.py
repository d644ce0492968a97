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
UNLOADED = model_pb2.SHARD_PHASE_UNLOADED


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


def phases(outbox: Outbox) -> list[tuple[int, int, model_pb2.ShardPhase.ValueType]]:
    """Of every shard's status to be sent: its number, the rank and the phase."""
    said = [(o.source_sequence, o.fact.shard_status_changed.status) for o in outbox.batch()]
    return [(sequence, status.rank, status.phase) for sequence, status in said]


def test_a_master_with_an_older_copy_of_its_log_is_told_the_newest_of_each_shard_again() -> None:
    outbox = Outbox()
    for fact in (status(0, LOADING), status(1, LOADING)):
        outbox.add(fact)
    assert phases(outbox) == [(2, 0, LOADING), (3, 1, LOADING)]
    for fact in (status(0, RUNNING), status(1, UNLOADED)):
        outbox.add(fact)
    assert phases(outbox) == [(4, 0, RUNNING), (5, 1, UNLOADED)]
    outbox.acknowledge(5)

    outbox.rewind()
    outbox.acknowledge(3)

    assert phases(outbox) == [(6, 0, RUNNING), (7, 1, UNLOADED)]
    outbox.acknowledge(7)
    outbox.rewind()
    outbox.acknowledge(7)
    assert phases(outbox) == []


def test_what_waits_of_a_shard_is_newer_than_what_an_older_log_lacks() -> None:
    outbox = Outbox()
    outbox.add(status(0, LOADING))
    outbox.batch()
    outbox.acknowledge(2)
    outbox.add(status(0, RUNNING))

    outbox.acknowledge(1)

    assert phases(outbox) == [(3, 0, RUNNING)]


def test_of_many_shards_those_that_ended_are_forgotten_before_one_that_runs() -> None:
    outbox = Outbox()
    outbox.add(status(0, RUNNING))
    for rank in range(1, outbox_module.KEPT_MAX + 10):
        outbox.add(status(rank, UNLOADED))
    while sent := sequences(outbox):
        outbox.acknowledge(sent[-1])

    outbox.acknowledge(1)

    told = phases(outbox)
    assert len(told) == outbox_module.KEPT_MAX
    assert (0, RUNNING) in [(rank, phase) for _, rank, phase in told]
