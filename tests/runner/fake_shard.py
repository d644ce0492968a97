"""A shard's process without a model: it speaks ShardService and RunnerService, and misbehaves as told.

`python fake_shard.py BEHAVIOUR --socket PATH --instance ID --rank N ...`, or with --describe instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from services import rpc
from ullage.v1 import event_pb2, model_pb2, runner_service_pb2, shard_service_pb2, shard_service_pb2_grpc

DESCRIPTION = {
    "device": "cpu",
    "device_name": "fake",
    "weight_form": "float32",
    "compute_element_bytes": 4,
    "shard_overhead_bytes": 50_000_000,
    "blas": "none",
}
TOTAL_BYTES = 1000
STEPS = 5

GROWN_BYTES = 200 << 20


class FakeShard(shard_service_pb2_grpc.ShardServiceServicer):
    def __init__(self, behaviour: str, instance_id: str, rank: int) -> None:
        self.behaviour = behaviour
        self.instance_id = instance_id
        self.rank = rank
        self.held = b""
        self.cues = asyncio.Semaphore(0)
        """One for each SIGUSR1 that came, by which a test says that it has seen enough."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.cues.release)

    def status(self, phase: model_pb2.ShardPhase.ValueType, done_bytes: int | None = None) -> model_pb2.ShardStatus:
        status = model_pb2.ShardStatus(instance_id=self.instance_id, rank=self.rank, phase=phase)
        if done_bytes is not None:
            status.done_bytes, status.total_bytes = done_bytes, TOTAL_BYTES
        return status

    async def Load(
        self, request: shard_service_pb2.LoadRequest, context: Any
    ) -> AsyncIterator[shard_service_pb2.LoadResponse]:
        yield shard_service_pb2.LoadResponse(status=self.status(model_pb2.SHARD_PHASE_CONNECTING))
        await self.misbehave_in("connecting")
        for done_bytes in range(0, TOTAL_BYTES + 1, TOTAL_BYTES // STEPS):
            yield shard_service_pb2.LoadResponse(status=self.status(model_pb2.SHARD_PHASE_LOADING, done_bytes))
            if self.behaviour == "slow":
                await self.cues.acquire()
        await self.misbehave_in("loading")
        if self.behaviour == "fails":
            failed = self.status(model_pb2.SHARD_PHASE_FAILED)
            failed.failure.message = "rank 1 does not answer"
            failed.failure.blamed_rank = 1
            yield shard_service_pb2.LoadResponse(status=failed)
            return
        yield shard_service_pb2.LoadResponse(status=self.status(model_pb2.SHARD_PHASE_RUNNING))

    async def misbehave_in(self, phase: str) -> None:
        if self.behaviour == f"stalls-{phase}":
            await asyncio.Event().wait()
        if self.behaviour == f"crashes-{phase}":
            # What was said before shall have arrived.
            await self.cues.acquire()
            crash()
        match phase, self.behaviour:
            case "running", "deaf":
                time.sleep(60)  # noqa: ASYNC251 - which is the point
            case "running", "deaf-at-work":
                while True:
                    pass
            case "running", "grows":
                self.held = b"\1" * GROWN_BYTES
            case _:
                pass

    async def Watch(
        self, request: shard_service_pb2.WatchRequest, context: Any
    ) -> AsyncIterator[shard_service_pb2.WatchResponse]:
        yield shard_service_pb2.WatchResponse(status=self.status(model_pb2.SHARD_PHASE_RUNNING))
        if self.behaviour == "generates":
            started = event_pb2.GenerationStarted(generation_id="g1", instance_id=self.instance_id, prompt_tokens=3)
            yield shard_service_pb2.WatchResponse(generation_started=started)
            finished = event_pb2.GenerationFinished(
                generation_id="g1", instance_id=self.instance_id, prompt_tokens=3, generated_tokens=5
            )
            yield shard_service_pb2.WatchResponse(generation_finished=finished)
        await self.misbehave_in("running")
        await asyncio.Event().wait()


async def generate(request: runner_service_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
    """Does what the prompt says; FILE is made when the call is cancelled."""
    match request.text.split(" "):
        case ["fail"]:
            raise rpc.RpcError(
                grpc.StatusCode.INVALID_ARGUMENT, "the prompt is bad", reason="BAD_PROMPT", metadata={"why": "fake"}
            )
        case ["crash"]:
            yield runner_service_pb2.GenerateResponse(text="almost")
            await asyncio.sleep(0.1)
            crash()
        case ["for", "ever", pause_seconds, file]:
            try:
                while True:
                    yield runner_service_pb2.GenerateResponse(text="on " * 1000)
                    await asyncio.sleep(float(pause_seconds))
            finally:
                Path(file).touch()  # noqa: ASYNC240 - nothing else runs here
        case words:
            for word in words:
                yield runner_service_pb2.GenerateResponse(text=word)


async def forward(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    """Every frame back as it came, then, when the other side has closed its half, how many there were."""
    metadata = dict(context.invocation_metadata())
    yield f"{metadata['ullage-instance']}/{metadata['ullage-rank']}".encode()
    frames = 0
    async for frame in requests:
        frames += 1
        yield frame
    yield f"{frames} frames".encode()


def add_runner_service(_: object, server: grpc.aio.Server) -> None:
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            generate,
            request_deserializer=runner_service_pb2.GenerateRequest.FromString,
            response_serializer=runner_service_pb2.GenerateResponse.SerializeToString,
        ),
        "Forward": grpc.stream_stream_rpc_method_handler(forward),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ullage.v1.RunnerService", handlers),))


def crash() -> None:
    for line in ("loading layer 7", "check failed: status", "aborted"):
        print(line, file=sys.stderr, flush=True)
    os._exit(134)


async def serve(arguments: argparse.Namespace) -> None:
    server = rpc.Server()
    shard = FakeShard(arguments.behaviour, arguments.instance, arguments.rank)
    server.add("ullage.v1.ShardService", shard_service_pb2_grpc.add_ShardServiceServicer_to_server, shard)
    server.add("ullage.v1.RunnerService", add_runner_service, shard)
    await server.start(f"unix:{arguments.socket}")
    await server.set_serving(serving=True)
    await asyncio.to_thread(sys.stdin.buffer.read)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--socket")
    parser.add_argument("--instance")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--weights")
    parser.add_argument("--describe", action="store_true")
    arguments = parser.parse_args()
    if arguments.describe:
        print(json.dumps(DESCRIPTION))
        return
    match arguments.behaviour:
        case "dies-at-start":
            crash()
        case "never-listens":
            sys.stdin.buffer.read()
        case "will-not-end":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "noisy":
            sys.stdout.buffer.write(b"\xff\xfe\x00" * 100_000)
            sys.stdout.flush()
            sys.stderr.buffer.write(b"\xff" * 100_000 + b"\nlast words\n")
            sys.stderr.flush()
        case _:
            pass
    asyncio.run(serve(arguments))


if __name__ == "__main__":
    main()
