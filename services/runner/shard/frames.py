"""What travels between ranks, and what of it is believed.

Activations travel as they were computed, raw and never narrowed; the receiver says what it makes of them.
Everything a neighbour sends is checked before it reaches the model: a wrong frame ends the stream it came
on, with INVALID_ARGUMENT, and changes nothing.
"""

from __future__ import annotations

from typing import Any, Final

import grpc
import mlx.core as mx

from services.rpc import RpcError
from services.runner.shard.sampling import Sampled
from ullage.v1 import dispatch_service_pb2, runner_service_pb2

PROTOCOL_VERSION: Final = 3
"""Raised when ranks of this release cannot work with those of an older one."""

CHUNK_TOKENS_MAX: Final = 128
"""Tokens of a prompt computed and sent at once: few enough for the stages to overlap, enough for a matrix product."""

CHUNK_BYTES_MAX: Final = 1024 * 1024
"""The most a frame of several tokens weighs: behind a larger one a slow link would not pass a heartbeat in time."""

_DTYPES: Final = {
    runner_service_pb2.ELEMENT_TYPE_FLOAT32: mx.float32,
    runner_service_pb2.ELEMENT_TYPE_FLOAT16: mx.float16,
    runner_service_pb2.ELEMENT_TYPE_BFLOAT16: mx.bfloat16,
}
_ELEMENT_TYPES: Final = {dtype: element_type for element_type, dtype in _DTYPES.items()}
_VIEW_FORMATS: Final = {4: "f", 2: "H"}

Activation = runner_service_pb2.Activation
ActivationBatch = runner_service_pb2.ActivationBatch
BatchRow = runner_service_pb2.BatchRow
ForwardRequest = runner_service_pb2.ForwardRequest


def chunk_tokens(hidden_size: int) -> int:
    """How many tokens of a prompt go into one frame."""
    return max(1, min(CHUNK_TOKENS_MAX, CHUNK_BYTES_MAX // (hidden_size * 4)))


def rank_name(assignment: dispatch_service_pb2.Assignment, rank: int) -> str:
    """A rank as people read it, e.g. "rank 1 on node b"."""
    nodes = [peer.node_id for peer in assignment.peers if peer.rank == rank]
    return f"rank {rank} on node {nodes[0]}" if nodes else f"rank {rank}"


def packed(hidden: mx.array) -> tuple[runner_service_pb2.ElementType.ValueType, bytes]:
    """An evaluated hidden state as it travels: its element type and its rows."""
    element_type = _ELEMENT_TYPES[hidden.dtype]
    # The buffer protocol knows no bfloat16; MLX's types know no buffer protocol.
    raw: Any = hidden.view(mx.uint16) if hidden.dtype == mx.bfloat16 else hidden
    return element_type, bytes(memoryview(raw))


def unpacked(activation: Activation) -> mx.array:
    """The hidden state in a frame that was checked, in the type it travelled in."""
    return _array(activation.data, activation.element_type, [activation.tokens, activation.hidden_size])


def unpacked_batch(batch: ActivationBatch) -> mx.array:
    """The hidden states in a batch that was checked, a row for each of its sequences."""
    return _array(batch.data, batch.element_type, [len(batch.rows), batch.hidden_size])


def _array(data: bytes, element_type: runner_service_pb2.ElementType.ValueType, shape: list[int]) -> mx.array:
    dtype = _DTYPES[element_type]
    raw: Any = memoryview(data)
    flat = mx.array(raw.cast(_VIEW_FORMATS[dtype.size]))
    return (flat if dtype == mx.float32 else flat.view(dtype)).reshape(shape)


def token(generation_id: str, position: int, sampled: Sampled) -> runner_service_pb2.SampledToken:
    """A sampled token, to be at `position`, as it travels."""
    likeliest = [
        runner_service_pb2.TokenCandidate(token_id=token_id, logprob=logprob) for token_id, logprob in sampled.likeliest
    ]
    return runner_service_pb2.SampledToken(
        generation_id=generation_id,
        position=position,
        token_id=sampled.token_id,
        logprob=sampled.logprob,
        likeliest=likeliest,
    )


def sampled(token: runner_service_pb2.SampledToken) -> Sampled:
    """A token that travelled, as it was sampled."""
    return Sampled(token.token_id, token.logprob, [(each.token_id, each.logprob) for each in token.likeliest])


def hello(assignment: dispatch_service_pb2.Assignment, to_rank: int) -> ForwardRequest:
    """How this rank introduces itself to `to_rank`."""
    return ForwardRequest(
        hello=runner_service_pb2.ForwardHello(
            instance_id=assignment.instance_id,
            from_rank=assignment.rank,
            to_rank=to_rank,
            digest=assignment.model.digest,
            protocol_version=PROTOCOL_VERSION,
        )
    )


def check_hello(frame: ForwardRequest, assignment: dispatch_service_pb2.Assignment) -> None:
    """Raise RpcError unless `frame` introduces the rank before this one, of the same instance, model and protocol."""
    if frame.WhichOneof("frame") != "hello":
        raise _invalid("the first frame of a stream must be hello")
    said = frame.hello
    if said.protocol_version != PROTOCOL_VERSION:
        raise RpcError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{rank_name(assignment, said.from_rank)} speaks version {said.protocol_version} of the protocol between "
            f"ranks and {rank_name(assignment, assignment.rank)} version {PROTOCOL_VERSION}: run the same release of "
            "Ullage on both nodes",
            reason="PROTOCOL_VERSION",
        )
    before = (assignment.rank - 1) % len(assignment.peers)
    wanted = (assignment.instance_id, before, assignment.rank)
    if (said.instance_id, said.from_rank, said.to_rank) != wanted:
        raise _invalid(
            f"instance {said.instance_id} from rank {said.from_rank} to rank {said.to_rank} is not expected here; "
            f"this is rank {assignment.rank} of {assignment.instance_id}, which hears from rank {before}"
        )
    if said.digest != assignment.model.digest:
        raise RpcError(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{rank_name(assignment, said.from_rank)} holds another model (digest {said.digest[:12]}, not "
            f"{assignment.model.digest[:12]}): run `ullage models add` there with the same source",
            reason="OTHER_MODEL",
        )


class Inspector:
    """Checks the activations of one stream, each against those before it."""

    def __init__(self, assignment: dispatch_service_pb2.Assignment) -> None:
        self._hidden_size = assignment.model.hidden_size
        self._context_tokens = assignment.context_tokens
        self._sequences_max = max(1, assignment.concurrent_sequences)
        self._next_positions: dict[str, int] = {}

    def check(self, activation: Activation) -> None:
        """Raise RpcError INVALID_ARGUMENT unless the model can take `activation` next; then remember it."""
        _check_shape(activation, self._hidden_size)
        generation_id = activation.generation_id
        if activation.begins_with:
            self._begin_with(activation.begins_with, generation_id, activation.position)
        if generation_id not in self._next_positions and len(self._next_positions) >= self._sequences_max:
            raise _invalid(f"sequence {generation_id} would be one more than the {self._sequences_max} placed for")
        self._advance(generation_id, activation.position, activation.tokens)

    def check_batch(self, batch: ActivationBatch) -> None:
        """As `check`, for one token each of several sequences, all of them open."""
        _check_rows(batch, self._hidden_size)
        ids = [row.generation_id for row in batch.rows]
        if len(set(ids)) != len(ids) or not self._next_positions.keys() >= set(ids):
            raise _invalid(f"a batch of {len(ids)} sequences names one twice, or one that was not begun")
        for row in batch.rows:
            self._advance(row.generation_id, row.position, 1)

    def _begin_with(self, other: str, generation_id: str, position: int) -> None:
        there = self._next_positions.get(other, 0)
        if generation_id in self._next_positions or not 1 <= position <= there:
            raise _invalid(
                f"sequence {generation_id} cannot begin with {position} tokens of {other}, which has {there}"
            )
        self.closed(other)
        self._next_positions[generation_id] = position

    def _advance(self, generation_id: str, position: int, tokens: int) -> None:
        expected = self._next_positions.get(generation_id, 0)
        if position != expected:
            raise _invalid(
                f"tokens of sequence {generation_id} start at {position}, not at {expected}: "
                "a frame was lost or repeated"
            )
        end = position + tokens
        if end > self._context_tokens:
            raise _invalid(f"sequence {generation_id} reaches {end} tokens, the context holds {self._context_tokens}")
        self._next_positions[generation_id] = end

    def closed(self, generation_id: str) -> None:
        """Forget a sequence that is over."""
        self._next_positions.pop(generation_id, None)


def _check_shape(activation: Activation, hidden_size: int) -> None:
    if not 1 <= activation.tokens <= CHUNK_TOKENS_MAX:
        raise _invalid(f"{activation.tokens} tokens in one frame: 1 to {CHUNK_TOKENS_MAX} are taken")
    if len(activation.token_ids) not in {0, activation.tokens}:
        raise _invalid(f"{len(activation.token_ids)} token ids beside {activation.tokens} tokens")
    _check_data(activation, activation.tokens, hidden_size)


def _check_rows(batch: ActivationBatch, hidden_size: int) -> None:
    if not batch.rows:
        raise _invalid("a batch without rows")
    _check_data(batch, len(batch.rows), hidden_size)


def _check_data(frame: Activation | ActivationBatch, rows: int, hidden_size: int) -> None:
    if frame.hidden_size != hidden_size:
        raise _invalid(f"rows of {frame.hidden_size} elements; the model's have {hidden_size}")
    dtype = _DTYPES.get(frame.element_type)
    if dtype is None:
        raise _invalid(f"element type {frame.element_type} is not one of float32, float16, bfloat16")
    wanted_bytes = rows * hidden_size * dtype.size
    if len(frame.data) != wanted_bytes:
        raise _invalid(f"{len(frame.data)} bytes for {rows} x {hidden_size} elements: {wanted_bytes} expected")


def _invalid(message: str) -> RpcError:
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, reason="BAD_FRAME")
