"""Calls for a shard, handed to its process and back as the bytes they came as.

Rules this module lives by:
- What passes between ranks is never parsed here: a token's path must not pay for two more decodings.
- Each side feels the other: a slow reader slows the writer, a half-closed stream is half-closed, a caller that
  goes away cancels the process's call at once.
- An error of the process arrives as it left. When the process itself is lost, the caller is told which rank it was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from services import rpc
from services.rpc import RpcError
from services.runner.shards import Shards
from services.runner.supervisor import ShardSupervisor
from ullage.v1 import model_pb2, runner_service_pb2

SERVICE: Final = "ullage.v1.RunnerService"
INSTANCE_KEY: Final = "ullage-instance"
RANK_KEY: Final = "ullage-rank"
ECHO_KEY: Final = "ullage-echo"

_EMPTY_RESPONSE: Final = b""
_DETAILS_KEY: Final = "grpc-status-details-bin"
_GRPCS_OWN: Final = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""What a call ends with when the process behind it does."""


class Relay:
    """The streaming calls of RunnerService, on raw bytes, over the shards that live here."""

    def __init__(self, node_id: str, shards: Shards) -> None:
        self._node_id = node_id
        self._shards = shards

    async def forward(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Forward, to the shard that the metadata name; or an echo, for whoever measures the path."""
        metadata = dict(context.invocation_metadata() or ())
        if ECHO_KEY in metadata:
            async for _ in requests:
                yield _EMPTY_RESPONSE
            return
        shard = self._addressed(metadata)
        method: Any = self._channel(shard).stream_stream(f"/{SERVICE}/Forward")
        call = rpc.keep_status(method(requests, metadata=_metadata(shard)))
        async for response in self._passed_on(shard, call, context):
            yield response

    async def generate(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        """Generate, to the first rank of the instance the request names."""
        shard = self._first_rank(runner_service_pb2.GenerateRequest.FromString(request).instance_id)
        method: Any = self._channel(shard).unary_stream(f"/{SERVICE}/Generate")
        call = method(request, metadata=_metadata(shard))
        async for response in self._passed_on(shard, call, context):
            yield response

    async def _passed_on(self, shard: ShardSupervisor, call: Any, context: Any) -> AsyncIterator[bytes]:
        """What the process answers, until it or the caller ends the call."""
        # Not in a `finally`: one who leaves while a write to him waits leaves this generator where it is.
        context.add_done_callback(lambda _: call.cancel())
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            details = tuple(pair for pair in error.trailing_metadata() or () if pair[0] == _DETAILS_KEY)
            if error.code() in _GRPCS_OWN and not details:
                # gRPC's own word, not the process's, whose errors have details.
                raise self._lost(shard) from error
            await context.abort(error.code(), error.details() or "", details)

    def _addressed(self, metadata: dict[str, str | bytes]) -> ShardSupervisor:
        instance_id, rank = str(metadata.get(INSTANCE_KEY, "")), str(metadata.get(RANK_KEY, ""))
        if not instance_id or not rank.isdecimal():
            raise RpcError(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"Forward needs the metadata {INSTANCE_KEY} and {RANK_KEY} (a number) to know whom it is for",
                reason="NOT_ADDRESSED",
            )
        shard = self._shards.find(instance_id, int(rank))
        if shard is None:
            raise RpcError(
                grpc.StatusCode.NOT_FOUND,
                f"rank {rank} of instance {instance_id} is not on node {self._node_id}",
                reason="UNKNOWN_SHARD",
            )
        return shard

    def _first_rank(self, instance_id: str) -> ShardSupervisor:
        here = self._shards.of_instance(instance_id)
        if not here:
            raise RpcError(
                grpc.StatusCode.NOT_FOUND,
                f"no rank of instance {instance_id!r} is on node {self._node_id}: see `ullage status`",
                reason="UNKNOWN_INSTANCE",
            )
        if here[0].assignment.rank != 0:
            first = here[0].assignment.peers[0]
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"node {self._node_id} holds rank {here[0].assignment.rank} of instance {instance_id}: "
                f"ask its first rank's runner, node {first.node_id} at {first.address}",
                reason="NOT_FIRST_RANK",
                metadata={"address": first.address, "node_id": first.node_id},
            )
        if here[0].status.phase != model_pb2.SHARD_PHASE_RUNNING:
            phase = model_pb2.ShardPhase.Name(here[0].status.phase).removeprefix("SHARD_PHASE_")
            raise RpcError(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"instance {instance_id} is not running yet: its first rank is {phase}; follow it with `ullage status`",
                reason="NOT_RUNNING",
            )
        if (overdrawn := self._shards.overdrawn(instance_id)) is not None:
            raise _overdrawn(overdrawn)
        return here[0]

    def _channel(self, shard: ShardSupervisor) -> grpc.aio.Channel:
        if shard.channel is None:
            raise RpcError(
                grpc.StatusCode.UNAVAILABLE,
                f"rank {shard.assignment.rank} of instance {shard.assignment.instance_id} on node {self._node_id} "
                "is starting or ending: try again",
                reason="SHARD_NOT_READY",
            )
        return shard.channel

    def _lost(self, shard: ShardSupervisor) -> RpcError:
        if shard.ends_because:
            return RpcError(
                grpc.StatusCode.UNAVAILABLE,
                f"instance {shard.assignment.instance_id} ended during the call: {shard.ends_because}",
                reason="INSTANCE_ENDED",
                metadata={"node_id": self._node_id},
            )
        return RpcError(
            grpc.StatusCode.UNAVAILABLE,
            f"rank {shard.assignment.rank} of instance {shard.assignment.instance_id} on node {self._node_id} "
            "was lost during the call; `ullage status` says why",
            reason="RANK_LOST",
            metadata={"node_id": self._node_id, "rank": str(shard.assignment.rank)},
        )


def _overdrawn(status: model_pb2.ShardStatus) -> RpcError:
    granted_bytes = status.resident_bytes - status.over_grant_bytes
    return RpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"rank {status.rank} of instance {status.instance_id} on node {status.node_id} holds "
        f"{status.resident_bytes:,} bytes and was promised {granted_bytes:,}: it takes no new requests until it holds "
        "less; place the model again with more --context or --sequences, so that it is promised more",
        reason="OVER_GRANT",
        metadata={
            "node_id": status.node_id,
            "rank": str(status.rank),
            "resident_bytes": str(status.resident_bytes),
            "granted_bytes": str(granted_bytes),
        },
    )


def _metadata(shard: ShardSupervisor) -> tuple[tuple[str, str], ...]:
    return (INSTANCE_KEY, shard.assignment.instance_id), (RANK_KEY, str(shard.assignment.rank))
