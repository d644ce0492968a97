"""How services speak: addresses, errors, health, reflection; over real servers on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from services import rpc
from ullage.v1 import model_pb2, model_service_pb2, model_service_pb2_grpc

SERVICE = "ullage.v1.ModelService"


class Refusing(model_service_pb2_grpc.ModelServiceServicer):
    """Fails each call in another way."""

    async def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: object
    ) -> model_service_pb2.GetModelResponse:
        raise rpc.RpcError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "0.31 GiB short",
            reason="INSUFFICIENT_MEMORY",
            metadata={"node": "n1"},
            details=[model_pb2.Refusal(message="0.31 GiB short", needed_bytes=7)],
        )

    async def ListModels(
        self, request: model_service_pb2.ListModelsRequest, context: object
    ) -> model_service_pb2.ListModelsResponse:
        raise ValueError("a path nobody should see")

    async def RegisterModel(
        self, request: model_service_pb2.RegisterModelRequest, context: object
    ) -> model_service_pb2.RegisterModelResponse:
        raise AssertionError("not called")

    async def RemoveModel(
        self, request: model_service_pb2.RemoveModelRequest, context: object
    ) -> model_service_pb2.RemoveModelResponse:
        raise AssertionError("not called")


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    answer: health_pb2.HealthCheckResponse = await check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = rpc.Server()
    server.add(SERVICE, model_service_pb2_grpc.add_ModelServiceServicer_to_server, Refusing())
    yield await server.start("127.0.0.1:0")
    await server.stop(0)


@pytest.mark.parametrize("address", ["127.0.0.1:50500", "127.3.2.1:0", "[::1]:50500", "localhost:1", "unix:/tmp/x"])
def test_loopback_may_be_listened_on(address: str) -> None:
    assert rpc.listen_address(address, insecure=False) == address


@pytest.mark.parametrize("address", ["0.0.0.0:50500", "[::]:50500", "192.168.1.4:50500", "node-a:50500"])
def test_any_other_address_needs_insecure_said_aloud(address: str) -> None:
    with pytest.raises(rpc.AddressError, match="--insecure"):
        rpc.listen_address(address, insecure=False)
    assert rpc.listen_address(address, insecure=True) == address


@pytest.mark.parametrize("address", ["", "50500", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:²", "127.0.0.1:65536"])
def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    with pytest.raises(rpc.AddressError, match=r"is no address: .*127\.0\.0\.1:50500"):
        rpc.listen_address(address, insecure=True)


def test_waits_double_up_to_the_last() -> None:
    assert list(itertools.islice(rpc.backoff_seconds(0.5, 3.0), 5)) == [0.5, 1.0, 2.0, 3.0, 3.0]


async def test_an_error_arrives_with_its_code_reason_and_details(port: int) -> None:
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub: model_service_pb2_grpc.ModelServiceAsyncStub = model_service_pb2_grpc.ModelServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetModel(model_service_pb2.GetModelRequest())

    error = raised.value
    assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "0.31 GiB short")
    assert rpc.error_reason(error) == "INSUFFICIENT_MEMORY"
    info = rpc.error_detail(error, error_details_pb2.ErrorInfo)
    assert info is not None
    assert (info.domain, dict(info.metadata)) == ("ullage", {"node": "n1"})
    refusal = rpc.error_detail(error, model_pb2.Refusal)
    assert refusal is not None
    assert refusal.needed_bytes == 7


async def test_an_unforeseen_exception_does_not_tell_the_caller_its_text(port: int) -> None:
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub: model_service_pb2_grpc.ModelServiceAsyncStub = model_service_pb2_grpc.ModelServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ListModels(model_service_pb2.ListModelsRequest())

    assert raised.value.code() == grpc.StatusCode.INTERNAL
    assert "nobody should see" not in (raised.value.details() or "")


async def test_a_port_in_use_is_refused_and_not_shared(port: int) -> None:
    with pytest.raises(rpc.AddressError, match="in use"):
        await rpc.Server().start(f"127.0.0.1:{port}")


async def test_health_is_not_serving_until_it_is_set(port: int) -> None:
    server = rpc.Server()
    server.add(SERVICE, model_service_pb2_grpc.add_ModelServiceServicer_to_server, Refusing())
    port = await server.start("127.0.0.1:0")
    statuses = []
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        for serving in (False, True):
            await server.set_serving(serving=serving)
            statuses += [await health_of(channel, name) for name in ("", SERVICE)]
    await server.stop(0)

    not_serving, serves = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
    assert statuses == [not_serving, not_serving, serves, serves]


@pytest.mark.parametrize("version", ["v1alpha", "v1"])
async def test_both_versions_of_reflection_list_the_services(port: int, version: str) -> None:
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answers = call(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = [service.name async for answer in answers for service in answer.list_services_response.service]

    assert SERVICE in names


async def test_a_client_that_goes_on_writing_is_told_why_its_call_has_ended() -> None:
    async def refuse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await anext(aiter(requests))
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "another is here")

    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    handlers: dict[str, Any] = {"Talk": grpc.stream_stream_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("ullage.v1.Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    said: set[str | None] = set()
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        for _ in range(20):  # Nine in ten of them would be told of an internal error.
            call: Any = rpc.keep_status(channel.stream_stream("/ullage.v1.Test/Talk")())
            with contextlib.suppress(asyncio.InvalidStateError):
                while True:
                    await call.write(bytes(1000))
            said.add(await call.details())
    await server.stop(0)
    assert said == {"another is here"}
