"""Which models the cluster knows, over a real gRPC server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

import grpc
import pytest

from services import rpc
from services.master.cluster import Cluster
from services.master.servicers.models import ModelServicer
from tests.master.facts import instance_placed, instance_released, model, model_registered, shard_status
from ullage.v1 import model_pb2, model_service_pb2, model_service_pb2_grpc

Stub: TypeAlias = "model_service_pb2_grpc.ModelServiceAsyncStub"


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[Stub]:
    server = rpc.Server()
    server.add(
        "ullage.v1.ModelService", model_service_pb2_grpc.add_ModelServiceServicer_to_server, ModelServicer(cluster)
    )
    port = await server.start("127.0.0.1:0")
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        yield model_service_pb2_grpc.ModelServiceStub(channel)
    await server.stop(0)


async def test_a_registered_model_is_known_and_registering_it_again_changes_nothing(
    stub: Stub, cluster: Cluster
) -> None:
    request = model_service_pb2.RegisterModelRequest(model=model())
    assert (await stub.RegisterModel(request)).model == model()
    assert (await stub.RegisterModel(request)).model == model()
    assert cluster.state.sequence == 1
    assert (await stub.GetModel(model_service_pb2.GetModelRequest(model_id="m"))).model == model()


def _without(field: str) -> Callable[[model_pb2.Model], None]:
    return lambda shape: shape.ClearField(field)  # type: ignore[arg-type]  # the names are below


def _third_layer_empty(shape: model_pb2.Model) -> None:
    shape.layers[2].ClearField("weight")


def _climbing(shape: model_pb2.Model) -> None:
    shape.model_id = "../m"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("layers"), "layers are missing"),
        (_without("embedding"), "the weight of the embedding is missing"),
        (_without("head"), "the weight of the head is missing"),
        (_without("digest"), "digest is missing"),
        (_without("hidden_size"), "hidden_size is missing"),
        (_without("model_id"), "model_id '' is not made of letters"),
        (_climbing, "model_id '../m' is not made of letters"),
        (_third_layer_empty, "the weight of layer 2 is missing"),
    ],
)
async def test_an_incomplete_model_is_refused_with_what_is_missing(
    stub: Stub, cluster: Cluster, spoil: Callable[[model_pb2.Model], None], message: str
) -> None:
    spoiled = model()
    spoil(spoiled)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.RegisterModel(model_service_pb2.RegisterModelRequest(model=spoiled))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert message in str(refused.value.details())
    assert cluster.state.sequence == 0


async def test_an_estimate_gives_way_to_a_model_with_files_and_never_takes_its_place(
    stub: Stub, cluster: Cluster
) -> None:
    estimate = model(digest="of its config.json")
    estimate.computed_from_config = True
    await stub.RegisterModel(model_service_pb2.RegisterModelRequest(model=estimate))
    await stub.RegisterModel(model_service_pb2.RegisterModelRequest(model=model()))

    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.RegisterModel(model_service_pb2.RegisterModelRequest(model=estimate))

    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "is known from its files" in str(refused.value.details())
    assert cluster.state.models["m"] == model()


async def test_a_placed_model_is_neither_replaced_nor_removed_until_its_shards_are_gone(
    stub: Stub, cluster: Cluster
) -> None:
    running = shard_status(model_pb2.SHARD_PHASE_RUNNING)
    await cluster.append(model_registered(), instance_placed("i"), running)
    replace = model_service_pb2.RegisterModelRequest(model=model(digest="d2"))
    remove = model_service_pb2.RemoveModelRequest(model_id="m")
    for attempt in (stub.RegisterModel(replace), stub.RemoveModel(remove)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attempt
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "while it is placed as i: release it first" in str(refused.value.details())
    await stub.RegisterModel(model_service_pb2.RegisterModelRequest(model=model()))
    await cluster.append(instance_released("i"))
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.RegisterModel(replace)
    await cluster.append(shard_status(model_pb2.SHARD_PHASE_UNLOADED))
    await stub.RegisterModel(replace)
    assert cluster.state.models["m"].digest == "d2"
    await stub.RemoveModel(remove)
    assert cluster.state.models == {}


async def test_an_unknown_model_is_not_found(stub: Stub) -> None:
    for attempt in (
        stub.GetModel(model_service_pb2.GetModelRequest(model_id="none")),
        stub.RemoveModel(model_service_pb2.RemoveModelRequest(model_id="none")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attempt
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        assert "`ullage models list`" in str(refused.value.details())


async def test_models_are_listed_by_id_page_after_page(stub: Stub, cluster: Cluster) -> None:
    await cluster.append(*[model_registered(f"m{n}") for n in (3, 1, 2, 0)])
    first = await stub.ListModels(model_service_pb2.ListModelsRequest(page_size=3))
    assert [shape.model_id for shape in first.models] == ["m0", "m1", "m2"]
    await cluster.append(model_registered("m00"))
    rest = await stub.ListModels(model_service_pb2.ListModelsRequest(page_size=3, page_token=first.next_page_token))
    assert [shape.model_id for shape in rest.models] == ["m3"]
    assert rest.next_page_token == ""
