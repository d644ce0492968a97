"""Calls through a runner's server to a shard's process and back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from services import rpc
from services.runner import servicer
from services.runner.relay import SERVICE
from services.runner.shards import Shards
from tests.runner.told import WAIT_SECONDS, MakeAssignment, MakeWorkshop, Told, shard_processes, until
from ullage.v1 import dispatch_service_pb2, model_pb2, node_pb2, runner_service_pb2, runner_service_pb2_grpc

HERE = (("ullage-instance", "i1"), ("ullage-rank", "0"))


@pytest.fixture
async def shards(workshop: MakeWorkshop, assignment: MakeAssignment, told: Told) -> AsyncIterator[Shards]:
    """Rank 0 of i1 and rank 1 of i2, both running."""
    shards = Shards(workshop("runs"), threads=2)
    shards.reconcile({("i1", 0): assignment("i1", 0), ("i2", 1): assignment("i2", 1)}, {})
    await told.until_true(lambda: [phase_of(shards, "i1", 0), phase_of(shards, "i2", 1)] == [5, 5])
    yield shards
    await shards.close("the test is over")


def phase_of(shards: Shards, instance_id: str, rank: int) -> int:
    shard = shards.find(instance_id, rank)
    return 0 if shard is None else int(shard.status.phase)


@pytest.fixture
async def channel(shards: Shards) -> AsyncIterator[grpc.aio.Channel]:
    server = rpc.Server()
    profile = node_pb2.RunnerProfile(node_id="n1", boot_id="b1")
    server.add(SERVICE, servicer.add_to_server, servicer.RunnerServicer(lambda: profile, shards, lambda: True))
    port = await server.start("127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


def generate(channel: grpc.aio.Channel, prompt: str, instance_id: str = "i1") -> Any:
    request = runner_service_pb2.GenerateRequest(instance_id=instance_id, text=prompt)
    return runner_service_pb2_grpc.RunnerServiceStub(channel).Generate(request)


async def error_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def test_frames_pass_unread_in_both_directions_and_the_end_of_one_half_is_passed_on(
    channel: grpc.aio.Channel,
) -> None:
    frames = [b"", b"\xff\x00 no protobuf", os.urandom(3_000_000)]
    forward: Any = channel.stream_stream(f"/{SERVICE}/Forward")
    call = rpc.keep_status(forward(metadata=HERE))
    answers = [await call.read()]
    for frame in frames:
        await call.write(frame)
        answers.append(await call.read())
    await call.done_writing()
    answers.append(await call.read())

    assert answers == [b"i1/0", *frames, b"3 frames"]
    assert await call.read() is grpc.aio.EOF


async def test_text_is_streamed_as_the_process_says_it(channel: grpc.aio.Channel) -> None:
    assert [response.text async for response in generate(channel, "one two three")] == ["one", "two", "three"]


@pytest.mark.parametrize("pause_seconds", ["0.05", "0"], ids=["while it waits", "while it writes more than is read"])
async def test_a_caller_that_goes_away_ends_the_call_in_the_process_at_once(
    channel: grpc.aio.Channel, tmp_path: Path, pause_seconds: str
) -> None:
    ended = tmp_path / "ended"
    call = generate(channel, f"for ever {pause_seconds} {ended}")
    assert (await call.read()).text.startswith("on ")
    await asyncio.sleep(0.3)
    call.cancel()

    await until(ended.exists)


async def test_an_error_of_the_process_arrives_as_it_left(channel: grpc.aio.Channel) -> None:
    error = await error_of(generate(channel, "fail"))

    assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "the prompt is bad")
    assert rpc.error_reason(error) == "BAD_PROMPT"


async def test_a_process_that_is_lost_ends_its_calls_with_the_name_of_node_and_rank(
    channel: grpc.aio.Channel,
) -> None:
    error = await error_of(generate(channel, "crash"))

    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error.details() == ("rank 0 of instance i1 on node n1 was lost during the call; `ullage status` says why")


async def test_a_killed_process_ends_an_open_stream(channel: grpc.aio.Channel) -> None:
    forward: Any = channel.stream_stream(f"/{SERVICE}/Forward")
    call = rpc.keep_status(forward(metadata=HERE))
    assert await call.read() == b"i1/0"
    for child in shard_processes():
        os.kill(child.pid, signal.SIGKILL)

    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


async def test_an_instance_that_is_not_here_is_not_found(channel: grpc.aio.Channel) -> None:
    error = await error_of(generate(channel, "hello", "i9"))

    assert error.code() == grpc.StatusCode.NOT_FOUND
    assert error.details() == "no rank of instance 'i9' is on node n1: see `ullage status`"


async def test_a_later_rank_names_the_runner_of_the_first(workshop: MakeWorkshop, channel: grpc.aio.Channel) -> None:
    error = await error_of(generate(channel, "hello", "i2"))

    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == (
        "node n1 holds rank 1 of instance i2: ask its first rank's runner, node n1 at 127.0.0.1:1"
    )


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        ((), grpc.StatusCode.INVALID_ARGUMENT),
        ((("ullage-instance", "i1"), ("ullage-rank", "first")), grpc.StatusCode.INVALID_ARGUMENT),
        ((("ullage-instance", "i1"), ("ullage-rank", "1")), grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_a_stream_has_to_name_a_shard_that_is_here(
    channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], code: grpc.StatusCode
) -> None:
    forward: Any = channel.stream_stream(f"/{SERVICE}/Forward")

    assert (await error_of(forward(metadata=metadata))).code() == code


async def test_the_status_tells_of_the_runner_and_its_shards(channel: grpc.aio.Channel) -> None:
    status = await runner_service_pb2_grpc.RunnerServiceStub(channel).GetStatus(runner_service_pb2.GetStatusRequest())

    assert status.profile.node_id == "n1"
    assert [(shard.instance_id, shard.rank) for shard in status.shards] == [("i1", 0), ("i2", 1)]
    assert status.connected_to_master


async def test_an_instance_with_a_rank_over_its_promise_takes_no_new_requests_until_that_is_over(
    shards: Shards, channel: grpc.aio.Channel
) -> None:
    over = model_pb2.ShardStatus(
        instance_id="i1", rank=1, node_id="n2", resident_bytes=3_000_000, over_grant_bytes=1_000_000
    )
    shards.note_overdrawn(dispatch_service_pb2.OverdrawnShards(shards=[over]))

    error = await error_of(generate(channel, "hello"))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rpc.error_reason(error) == "OVER_GRANT"
    assert (error.details() or "").startswith(
        "rank 1 of instance i1 on node n2 holds 3,000,000 bytes and was promised 2,000,000: "
    )

    shards.note_overdrawn(dispatch_service_pb2.OverdrawnShards())
    assert [response.text async for response in generate(channel, "hello")] == ["hello"]


async def test_whoever_is_being_answered_is_told_why_the_instance_ends(
    shards: Shards, channel: grpc.aio.Channel, tmp_path: Path
) -> None:
    call = generate(channel, f"for ever 0.01 {tmp_path / 'cancelled'}")
    await anext(aiter(call))
    shards.reconcile({}, {("i1", 0): "rank 1 on b failed while RUNNING: its process ended"})

    error = await error_of(call)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert error.details() == "instance i1 ended during the call: rank 1 on b failed while RUNNING: its process ended"


async def test_frames_with_the_echo_key_are_answered_by_the_runner_itself(channel: grpc.aio.Channel) -> None:
    forward: Any = channel.stream_stream(f"/{SERVICE}/Forward")
    call = rpc.keep_status(forward(metadata=(("ullage-echo", "1"),)))
    for size_bytes in (1, 1_000_000):
        await call.write(b"\0" * size_bytes)
        assert await call.read() == b""
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
