"""A replay that leaves out what later samples replace ends with the state that all facts make."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services import log_format
from services.log_format import CorruptEventError
from services.master.event_log import ReadOnlyLog
from services.master.glimpse import glimpsed
from services.master.replay import fold
from services.master.state import State, apply, apply_fact, apply_facts, lasting
from services.master.view import state_hash
from tests.master.facts import instance_placed, memory_sampled, node_announced, shard_status, system_sampled
from tests.master.test_cluster import BYTES, FACTS, NODE_IDS
from tests.master.test_event_log import write
from ullage.v1 import event_pb2, model_pb2

RECORDED = Path(__file__).parents[1] / "recorded" / "logs"
NODE = "0123456789abcdef" * 2
MEMORY = event_pb2.Fact.MEMORY_SAMPLED_FIELD_NUMBER
SYSTEM = event_pb2.Fact.SYSTEM_SAMPLED_FIELD_NUMBER
LOADING = model_pb2.SHARD_PHASE_LOADING


def _within(kind: int, inner: bytes) -> bytes:
    """A fact of this kind, of these bytes."""
    return log_format.tag(kind) + log_format.varint(len(inner)) + inner


def _twice(one: event_pb2.Fact, other: event_pb2.Fact) -> bytes:
    """A sample that says twice what it holds; the last counts."""
    return _within(MEMORY, one.memory_sampled.SerializeToString() + other.memory_sampled.SerializeToString())


SAMPLES = st.builds(memory_sampled, NODE_IDS, BYTES)
WRITTEN = st.one_of(SAMPLES, FACTS).map(event_pb2.Fact.SerializeToString)
PAYLOADS = st.one_of(WRITTEN, st.builds(bytes.__add__, WRITTEN, WRITTEN), st.builds(_twice, SAMPLES, SAMPLES))
GROWN = st.builds(
    lambda rank, resident_bytes: shard_status(LOADING, "i", rank, "abc"[rank], resident_bytes),
    st.integers(0, 2),
    BYTES,
)
STRETCHES = st.one_of(
    st.lists(SAMPLES.map(event_pb2.Fact.SerializeToString), min_size=1, max_size=12),
    st.lists(GROWN.map(event_pb2.Fact.SerializeToString), min_size=1, max_size=2),
    st.lists(PAYLOADS, min_size=1, max_size=2),
)
PLACED = instance_placed("i", ["a", "b", "c"]).SerializeToString()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STRETCHES, max_size=8), st.integers(0, 8))
def test_what_is_not_read_leaves_nothing_behind(stretches: list[list[bytes]], placed_after: int) -> None:
    payloads = list(chain(*stretches[:placed_after], [PLACED], *stretches[placed_after:]))
    events = [(number, 10, event_pb2.Fact.FromString(payload)) for number, payload in enumerate(payloads, start=1)]
    whole, short = State(), State()
    for event in events:
        apply_fact(whole, *event)
    apply_facts(short, [events[index] for index in lasting(glimpsed(payloads))])
    assert short == whole
    assert state_hash(short) == state_hash(whole)


@settings(max_examples=150, deadline=None)
@given(PAYLOADS)
def test_what_is_told_is_what_the_bytes_hold(payload: bytes) -> None:
    (told,) = glimpsed([payload])
    fact = event_pb2.Fact.FromString(payload)
    sampled = fact.memory_sampled if fact.HasField("memory_sampled") else fact.system_sampled
    assert told in {None, (log_format.kind(fact), sampled.node_id)}


def test_a_sample_as_probes_send_them_is_told_without_reading_it() -> None:
    small, large = memory_sampled(NODE), system_sampled(NODE, cpu_pct=3.0)
    for number in range(100):
        large.system_sampled.sample.interfaces.add(name=f"eth{number}")
    assert glimpsed([each.SerializeToString() for each in (small, large)]) == [(MEMORY, NODE), (SYSTEM, NODE)]
    assert glimpsed([memory_sampled("desk-1").SerializeToString()]) == [(MEMORY, "desk-1")]


@pytest.mark.parametrize(
    "payload",
    [
        memory_sampled("n" * 128).SerializeToString(),
        memory_sampled("nœud").SerializeToString(),
        b"\x62\x01\x0a",
        node_announced(NODE).SerializeToString(),
        memory_sampled(NODE).SerializeToString() + node_announced(NODE).SerializeToString(),
        _twice(memory_sampled(NODE), memory_sampled(NODE)),
        _within(MEMORY, event_pb2.MemorySampled(node_id=NODE).SerializeToString()),
        b"",
    ],
)
def test_whatever_is_not_one_whole_sample_is_read(payload: bytes) -> None:
    assert glimpsed([payload]) == [None]


def test_of_a_nodes_samples_the_first_and_the_last_are_applied_between_other_facts() -> None:
    a, b, system = (MEMORY, "a"), (MEMORY, "b"), (SYSTEM, "a")
    assert lasting([a] * 100) == [0, 99]
    assert lasting([a, b] * 50) == [0, 1, 98, 99]
    assert lasting([a, a, a, system, a]) == [0, 3, 4]
    assert lasting([a, a, a, a, None, a, a, a, a, None, b]) == [0, 3, 4, 5, 8, 9, 10]


def test_a_flipped_bit_is_found_in_a_sample_that_is_not_read(log_path: Path) -> None:
    write(log_path, [memory_sampled(NODE, available=number) for number in range(10)])
    stored = memory_sampled(NODE, available=4).SerializeToString()
    content = log_path.read_bytes()
    assert content.count(stored) == 1
    log_path.write_bytes(content.replace(stored, stored[:-1] + bytes([stored[-1] ^ 1])))
    log = ReadOnlyLog(log_path)
    with pytest.raises(CorruptEventError, match="event 5 is corrupt: its bytes do not match its checksum"):
        list(fold(log, State(), log.head()))
    log.close()


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*.db")), ids=lambda path: path.stem)
def test_a_recorded_log_is_folded_to_what_each_of_its_facts_makes(path: Path) -> None:
    log = ReadOnlyLog(path)
    whole, folded = State(), State()
    for row in log.read(1, log.head()):
        apply(whole, log_format.event(row))
    list(fold(log, folded, log.head()))
    log.close()
    assert folded == whole
