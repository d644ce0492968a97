"""What of a neighbour's frames is believed."""

from __future__ import annotations

from typing import Any

import grpc
import mlx.core as mx
import pytest

from services.rpc import RpcError
from services.runner.shard import frames
from ullage.v1 import dispatch_service_pb2, model_pb2, runner_service_pb2

HIDDEN = 4


def assignment(**changes: Any) -> dispatch_service_pb2.Assignment:
    values = {
        "instance_id": "i1",
        "rank": 1,
        "model": model_pb2.Model(hidden_size=HIDDEN, digest="d1"),
        "context_tokens": 16,
        "concurrent_sequences": 1,
        "peers": [dispatch_service_pb2.Peer(rank=rank, node_id=f"n{rank}") for rank in range(2)],
    }
    return dispatch_service_pb2.Assignment(**{**values, **changes})


def activation(**changes: Any) -> frames.Activation:
    tokens = changes.get("tokens", 2)
    values = {
        "generation_id": "g1",
        "tokens": tokens,
        "hidden_size": HIDDEN,
        "element_type": runner_service_pb2.ELEMENT_TYPE_FLOAT32,
        "data": bytes(4 * HIDDEN * tokens),
    }
    return frames.Activation(**{**values, **changes})


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_hidden_state_arrives_as_it_left(dtype: mx.Dtype) -> None:
    hidden = mx.random.normal((3, HIDDEN)).astype(dtype)
    mx.eval(hidden)
    element_type, data = frames.packed(hidden)
    arrived = frames.unpacked(activation(tokens=3, element_type=element_type, data=data))
    assert arrived.dtype == dtype
    assert bool(mx.array_equal(arrived, hidden))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 5}, "rows of 5 elements; the model's have 4"),
        ({"tokens": 0, "data": b""}, "0 tokens in one frame: 1 to 128 are taken"),
        ({"tokens": 129}, "129 tokens in one frame: 1 to 128 are taken"),
        ({"element_type": 0}, "element type 0 is not one of float32, float16, bfloat16"),
        ({"data": bytes(31)}, "31 bytes for 2 x 4 elements: 32 expected"),
        ({"position": 3}, "tokens of sequence g1 start at 3, not at 0: a frame was lost or repeated"),
        ({"tokens": 17}, "sequence g1 reaches 17 tokens, the context holds 16"),
    ],
)
def test_a_wrong_activation_is_refused_and_changes_nothing(changes: dict[str, Any], message: str) -> None:
    inspector = frames.Inspector(assignment())
    with pytest.raises(RpcError) as caught:
        inspector.check(activation(**changes))
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message == message
    inspector.check(activation())


def test_a_sequence_goes_on_where_it_was() -> None:
    inspector = frames.Inspector(assignment())
    inspector.check(activation())
    inspector.check(activation(position=2, tokens=1))
    with pytest.raises(RpcError, match="start at 2, not at 3"):
        inspector.check(activation(position=2, tokens=1))


def test_no_more_sequences_are_taken_than_were_placed_for_until_one_is_over() -> None:
    inspector = frames.Inspector(assignment())
    inspector.check(activation())
    with pytest.raises(RpcError, match="one more than the 1 placed for"):
        inspector.check(activation(generation_id="g2"))
    inspector.closed("g1")
    inspector.check(activation(generation_id="g2"))


def test_a_sequence_begins_with_tokens_of_an_open_one_and_takes_its_place() -> None:
    inspector = frames.Inspector(assignment())
    inspector.check(activation())
    for wrong in ({"position": 3}, {"position": 0}, {"generation_id": "g1", "position": 1}):
        with pytest.raises(RpcError, match="cannot begin with"):
            inspector.check(activation(**{"generation_id": "g2", "begins_with": "g1", **wrong}))
    inspector.check(activation(generation_id="g2", begins_with="g1", position=1))
    with pytest.raises(RpcError, match="cannot begin with 1 tokens of g1, which has 0"):
        inspector.check(activation(generation_id="g3", begins_with="g1", position=1))
    inspector.check(activation(generation_id="g2", position=3, tokens=1))


def said(**changes: Any) -> frames.ForwardRequest:
    frame = frames.hello(assignment(rank=0), 1)
    for name, value in changes.items():
        setattr(frame.hello, name, value)
    return frame


def test_the_rank_before_is_let_in() -> None:
    frames.check_hello(said(), assignment())


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (
            {"protocol_version": frames.PROTOCOL_VERSION + 1},
            grpc.StatusCode.FAILED_PRECONDITION,
            "run the same release of Ullage on both nodes",
        ),
        ({"digest": "d2"}, grpc.StatusCode.FAILED_PRECONDITION, "rank 0 on node n0 holds another model"),
        ({"instance_id": "i2"}, grpc.StatusCode.INVALID_ARGUMENT, "instance i2 from rank 0 to rank 1 is not expected"),
        ({"from_rank": 1}, grpc.StatusCode.INVALID_ARGUMENT, "which hears from rank 0"),
    ],
)
def test_a_wrong_neighbour_is_found_before_anything_is_computed(
    changes: dict[str, Any], code: grpc.StatusCode, message: str
) -> None:
    with pytest.raises(RpcError, match=message) as caught:
        frames.check_hello(said(**changes), assignment())
    assert caught.value.code == code


def test_a_stream_that_does_not_introduce_itself_is_refused() -> None:
    with pytest.raises(RpcError, match="the first frame of a stream must be hello"):
        frames.check_hello(frames.ForwardRequest(activation=activation()), assignment())


def test_chunks_of_wide_models_are_shorter() -> None:
    assert [frames.chunk_tokens(size) for size in (576, 2048, 4096, 16384, 10**7)] == [128, 128, 64, 16, 1]
