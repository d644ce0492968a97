"""Which models the cluster knows: checked for completeness when they come, kept while they are placed."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final

from services.master import errors
from services.master.cluster import Cluster
from services.master.servicers import pages
from services.master.servicers.errors import translated
from services.master.state import State
from ullage.v1 import event_pb2, model_pb2, model_service_pb2, model_service_pb2_grpc

_MODEL_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What may name a folder on every system; runners look for a model in one of its id."""

_NEEDED: Final = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "vocabulary_size",
    "attention_heads",
    "kv_heads",
    "kv_allocation_step_tokens",
    "context_tokens_max",
    "digest",
)


class ModelServicer(model_service_pb2_grpc.ModelServiceServicer):
    """ModelService over the one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def RegisterModel(
        self, request: model_service_pb2.RegisterModelRequest, context: Any
    ) -> model_service_pb2.RegisterModelResponse:
        with translated():
            model = request.model
            if missing := list(_missing(model)):
                raise errors.InvalidRequest(f"the model is incomplete: {', '.join(missing)}")
            # Nothing is placed between the look at the state and the commit.
            async with self._cluster.placing:
                known = self._cluster.state.models.get(model.model_id)
                if known is not None and model.computed_from_config and not known.computed_from_config:
                    raise errors.NotNow(
                        f"model {model.model_id!r} is known from its files: what its config.json says adds nothing"
                    )
                if known != model:
                    _refuse_placed(self._cluster.state, model.model_id, "registered in another shape")
                    await self._cluster.append(event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=model)))
            return model_service_pb2.RegisterModelResponse(model=model)

    async def RemoveModel(
        self, request: model_service_pb2.RemoveModelRequest, context: Any
    ) -> model_service_pb2.RemoveModelResponse:
        with translated():
            async with self._cluster.placing:
                if request.model_id not in self._cluster.state.models:
                    raise errors.UnknownModel(request.model_id)
                _refuse_placed(self._cluster.state, request.model_id, "removed")
                await self._cluster.append(
                    event_pb2.Fact(model_removed=event_pb2.ModelRemoved(model_id=request.model_id))
                )
            return model_service_pb2.RemoveModelResponse()

    async def GetModel(
        self, request: model_service_pb2.GetModelRequest, context: Any
    ) -> model_service_pb2.GetModelResponse:
        with translated():
            model = self._cluster.state.models.get(request.model_id)
            if model is None:
                raise errors.UnknownModel(request.model_id)
            return model_service_pb2.GetModelResponse(model=model)

    async def ListModels(
        self, request: model_service_pb2.ListModelsRequest, context: Any
    ) -> model_service_pb2.ListModelsResponse:
        with translated():
            size = pages.page_size(request.page_size)
            models = self._cluster.state.models
            ids = sorted(models)
            start = bisect_left(ids, pages.position(request.page_token))
            following = ids[start + size : start + size + 1]
            return model_service_pb2.ListModelsResponse(
                models=[models[id_] for id_ in ids[start : start + size]],
                next_page_token=pages.page_token(following[0]) if following else "",
            )


def _missing(model: model_pb2.Model) -> Iterator[str]:
    """What a model lacks to be placed and loaded, in words."""
    if not _MODEL_ID.fullmatch(model.model_id):
        yield f"model_id {model.model_id!r} is not made of letters, digits, '.', '_' and '-', 128 at most"
    yield from (f"{name} is missing" for name in _NEEDED if not getattr(model, name))
    if not model.layers:
        yield "layers are missing"
    for index, layer in enumerate(model.layers):
        if not _weighs(layer.weight):
            yield f"the weight of layer {index} is missing"
    if not _weighs(model.embedding):
        yield "the weight of the embedding is missing"
    if not _weighs(model.head):
        yield "the weight of the head is missing (of its norm alone where it is tied)"


def _weighs(weight: model_pb2.Weight) -> bool:
    return weight.stored_bytes > 0 and weight.parameters > 0


def _refuse_placed(state: State, model_id: str, done: str) -> None:
    """Raise NotNow when a shard of the model is wanted, or its process may still be there."""
    holders = sorted(
        record.instance_id
        for record in state.instances.values()
        if record.spec.model_id == model_id and (record.wanted or not all(shard.gone for shard in record.shards))
    )
    if holders:
        raise errors.NotNow(
            f"model {model_id!r} cannot be {done} while it is placed as {', '.join(holders)}: "
            f"release it first with `ullage release {holders[0]}`"
        )
