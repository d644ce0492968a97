"""PlacementService over real gRPC, on a real log: what is decided is durable, reserved once, and told as it is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import grpc
import pytest

from services import log_format, rpc
from services.master import allocator
from services.master.cluster import Cluster
from services.master.replay import state_at
from services.master.servicers.placement import PlacementServicer
from tests.clocks import FakeClock
from tests.master.facts import shard_status
from tests.master.given_nodes import GIB, Node, even, facts_of, layers_by_node, model, spec
from ullage.v1 import event_pb2, model_pb2, placement_service_pb2, placement_service_pb2_grpc

if TYPE_CHECKING:
    Stub = placement_service_pb2_grpc.PlacementServiceAsyncStub

RUNNING = model_pb2.SHARD_PHASE_RUNNING


@pytest.fixture
async def address(cluster: Cluster) -> AsyncIterator[str]:
    server = rpc.Server()
    server.add(
        "ullage.v1.PlacementService",
        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server,
        PlacementServicer(cluster),
    )
    port = await server.start("127.0.0.1:0")
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def stub(address: str) -> AsyncIterator[Stub]:
    async with rpc.channel(address) as channel:
        yield placement_service_pb2_grpc.PlacementServiceStub(channel)


async def given(cluster: Cluster, nodes: Sequence[Node], shape: model_pb2.Model) -> None:
    """Nodes that are heard, and a model."""
    facts = [fact for node in nodes for fact in facts_of(node)]
    await cluster.append(*facts, event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=shape)))
    for node in nodes:
        cluster.hear_runner(node.node_id)


async def place(stub: Stub, *, validate_only: bool = False, **asked: Any) -> model_pb2.Instance:
    request = placement_service_pb2.PlaceRequest(spec=spec(**asked), validate_only=validate_only)
    return (await stub.Place(request)).instance


async def refused(stub: Stub, **asked: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await place(stub, **asked)
    return failed.value


async def heard(stub: Stub) -> None:
    """Return when the server has seen what was sent before on the same connection."""
    await stub.ListInstances(placement_service_pb2.ListInstancesRequest())


async def recorded(cluster: Cluster, kind: str) -> list[event_pb2.Fact]:
    """The facts of a kind that are in the log."""
    rows = await asyncio.to_thread(cluster.log.read, 1, cluster.state.sequence, kinds=[log_format.KIND_NUMBERS[kind]])
    return [log_format.event(row).fact for row in rows]


async def test_a_placement_is_recorded_with_the_request_and_the_silent_nodes(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 8 * GIB), Node("b", 8 * GIB)], model(even(12 * GIB, 12)))
    before = cluster.state.sequence

    instance = await place(stub, requested_by="me")

    assert re.fullmatch(r"m-[0-9a-f]{6}", instance.instance_id)
    assert instance.state == model_pb2.INSTANCE_STATE_PLACED
    assert layers_by_node(instance.placement) == {"a": 6, "b": 6}
    assert instance.placement.decided_at_sequence == before
    assert instance.placed_at_sequence == before + 1
    (fact,) = await recorded(cluster, "instance_placed")
    assert fact.instance_placed.spec == spec(requested_by="me")
    assert fact.instance_placed.placement == instance.placement
    assert fact.instance_placed.rules_version == allocator.RULES_VERSION


async def test_a_node_that_fell_silent_gets_nothing(cluster: Cluster, stub: Stub, clock: FakeClock) -> None:
    await given(cluster, [Node("a", 8 * GIB), Node("b", 9 * GIB)], model(even(4 * GIB, 4)))
    clock.advance(10)
    cluster.hear_runner("a")

    instance = await place(stub)

    assert layers_by_node(instance.placement) == {"a": 4}
    (fact,) = await recorded(cluster, "instance_placed")
    assert list(fact.instance_placed.silent_node_ids) == ["b"]


async def test_a_refusal_is_an_error_with_its_proof_and_is_recorded(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 8 * GIB, name="anna")], model(even(12 * GIB, 12)))

    error = await refused(stub)

    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert rpc.error_reason(error) == "INSUFFICIENT_MEMORY"
    proof = rpc.error_detail(error, model_pb2.Refusal)
    assert proof is not None
    assert proof.message == error.details()
    assert "anna: NORMAL x1, 8.00 GiB available" in proof.message
    (fact,) = await recorded(cluster, "placement_refused")
    assert fact.placement_refused.refusal == proof
    assert not cluster.state.instances


@pytest.mark.parametrize(("count", "shown"), [(4, 4), (40, 11), (400, 11)])
async def test_a_refusal_of_many_nodes_reaches_the_client_in_part_and_the_log_as_a_whole(
    cluster: Cluster, stub: Stub, count: int, shown: int
) -> None:
    await given(cluster, [Node(f"node-{i:04}", GIB) for i in range(count)], model([2**40]))

    error = await refused(stub)

    assert rpc.error_reason(error) == "INSUFFICIENT_MEMORY"
    proof = rpc.error_detail(error, model_pb2.Refusal)
    assert proof is not None
    assert len(proof.nodes) == shown
    left_out = f"  and {count - shown} more: `ullage place --dry-run` shows every node"
    assert (left_out in proof.message.splitlines()) is (shown < count)
    assert proof.message.splitlines()[-1] == "  Force it, and risk swapping or a killed process"
    (fact,) = await recorded(cluster, "placement_refused")
    assert len(fact.placement_refused.refusal.nodes) == count


async def test_what_is_asked_to_be_validated_only_is_neither_reserved_nor_recorded(
    cluster: Cluster, stub: Stub
) -> None:
    await given(cluster, [Node("a", 8 * GIB)], model(even(4 * GIB, 4)))
    before = cluster.state.sequence

    instance = await place(stub, validate_only=True)
    error = await refused(stub, validate_only=True, concurrent_sequences=0)

    assert (instance.instance_id, layers_by_node(instance.placement)) == ("", {"a": 4})
    assert rpc.error_reason(error) == "INVALID_REQUEST"
    assert cluster.state.sequence == before


async def test_a_preview_answers_with_the_refusal(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 8 * GIB)], model(even(4 * GIB, 4)))
    fitting = await stub.PreviewPlacement(placement_service_pb2.PreviewPlacementRequest(spec=spec()))
    endless = await stub.PreviewPlacement(placement_service_pb2.PreviewPlacementRequest(spec=spec(min_nodes=2)))

    assert layers_by_node(fitting.placement) == {"a": 4}
    assert endless.refusal.reason == model_pb2.REFUSAL_REASON_TOO_FEW_NODES


async def test_a_model_known_by_its_config_alone_is_previewed_and_not_placed(cluster: Cluster, stub: Stub) -> None:
    estimate = model(even(12 * GIB, 12), computed_from_config=True)
    await given(cluster, [Node("a", 8 * GIB, models=()), Node("b", 8 * GIB, models=())], estimate)

    request = placement_service_pb2.PreviewPlacementRequest(spec=spec())
    shown = (await stub.PreviewPlacement(request)).placement
    error = await refused(stub)

    assert layers_by_node(shown) == {"a": 6, "b": 6}
    assert shown.explanation.startswith("12 layers, computed from config.json, on a and b because ")
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "until then only a preview can be had" in str(error.details())
    assert not cluster.state.instances


async def test_names_that_are_not_there_are_not_found(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 8 * GIB)], model(even(4 * GIB, 4)))
    no_model = await refused(stub, model_id="nothing")
    no_instance = await refused(stub, replace_instance_id="nothing")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.GetInstance(placement_service_pb2.GetInstanceRequest(instance_id="nothing"))
    with pytest.raises(grpc.aio.AioRpcError) as not_released:
        await stub.Release(placement_service_pb2.ReleaseRequest(instance_id="nothing"))

    found = [
        (error.code(), rpc.error_reason(error)) for error in (no_model, no_instance, failed.value, not_released.value)
    ]
    assert found == [
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_MODEL"),
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_INSTANCE"),
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_INSTANCE"),
        (grpc.StatusCode.NOT_FOUND, "UNKNOWN_INSTANCE"),
    ]


async def test_placements_at_once_never_promise_the_same_bytes(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 20 * GIB), Node("b", 20 * GIB)], model(even(12 * GIB, 12)))

    outcomes = await asyncio.gather(*(place(stub) for _ in range(8)), return_exceptions=True)

    errors = [each for each in outcomes if isinstance(each, grpc.aio.AioRpcError)]
    assert len(outcomes) - len(errors) == 3
    assert {rpc.error_reason(error) for error in errors} == {"BLOCKED_BY_PROMISES"}
    assert all(record.promised_bytes <= 20 * GIB for record in cluster.state.nodes.values())


async def test_placements_from_many_threads_over_many_nodes_that_change_meanwhile_never_over_commit(
    cluster: Cluster, stub: Stub, address: str
) -> None:
    nodes = [Node(f"n{i:03}", (8 + i % 5) * GIB) for i in range(160)]
    await given(cluster, nodes, model(even(9 * GIB, 9)))
    whole = {node.node_id: int(node.available or 0) for node in nodes}

    def client(_: int) -> int:
        with grpc.insecure_channel(address) as channel:
            service = placement_service_pb2_grpc.PlacementServiceStub(channel)
            request = placement_service_pb2.PlaceRequest(spec=spec())
            return sum(bool(service.Place(request).instance.instance_id) for _ in range(5))

    async def samples() -> None:
        while True:
            for node in nodes[::7]:
                await cluster.append(facts_of(node)[-1])
                cluster.hear_runner(node.node_id)

    changing = asyncio.create_task(samples())
    with ThreadPoolExecutor(6) as threads:
        placed = await asyncio.gather(
            *(asyncio.get_running_loop().run_in_executor(threads, client, number) for number in range(6))
        )
    changing.cancel()

    assert sum(placed) == 30
    assert all(record.promised_bytes <= whole[node_id] for node_id, record in cluster.state.nodes.items())


async def test_decisions_made_while_nodes_change_can_be_made_again_from_the_log_and_promise_no_byte_twice(
    cluster: Cluster, stub: Stub
) -> None:
    """Also where a reading was queued between the last look and the commit: it is as one that comes right after."""
    nodes = [Node(f"n{i}", 20 * GIB) for i in range(6)]
    await given(cluster, nodes, model(even(3 * GIB, 9)))

    async def samples() -> None:
        for available in (20, 9, 12, 5) * 100:
            facts = [facts_of(replace(node, available=available * GIB))[-1] for node in nodes]
            await asyncio.gather(*(cluster.append(fact) for fact in facts))

    changing = asyncio.create_task(samples())
    outcomes = await asyncio.gather(*(place(stub) for _ in range(24)), return_exceptions=True)
    changing.cancel()

    placements = [fact.instance_placed for fact in await recorded(cluster, "instance_placed")]
    assert len(placements) == sum(isinstance(outcome, model_pb2.Instance) for outcome in outcomes) > 0
    for made in placements:
        then = await asyncio.to_thread(state_at, cluster.log, made.placement.decided_at_sequence)
        assert allocator.place(then, made.spec, made.silent_node_ids) == made.placement
    assert all(record.promised_bytes <= 20 * GIB for record in cluster.state.nodes.values())


async def test_the_same_request_at_once_and_again_gets_one_instance(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 60 * GIB)], model(even(12 * GIB, 12)))

    instances = await asyncio.gather(*(place(stub, request_id="r1") for _ in range(4)))
    again = await place(stub, request_id="r1")

    assert {instance.instance_id for instance in instances} == {again.instance_id}
    assert len(cluster.state.instances) == 1


async def test_a_request_id_is_good_for_one_request(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 60 * GIB)], model(even(12 * GIB, 12)))
    first = await place(stub, request_id="r1")

    error = await refused(stub, request_id="r1", context_tokens=2)

    assert error.code() == grpc.StatusCode.ALREADY_EXISTS
    assert first.instance_id in (error.details() or "")


async def test_a_refused_request_may_be_sent_again(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 8 * GIB)], model(even(12 * GIB, 12)))
    await refused(stub, request_id="r1")
    await given(cluster, [Node("b", 8 * GIB)], model(even(12 * GIB, 12)))

    assert layers_by_node((await place(stub, request_id="r1")).placement) == {"a": 6, "b": 6}


class Door(asyncio.Lock):
    """A lock that tells when somebody asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.knocked = asyncio.Event()

    async def acquire(self) -> Literal[True]:
        self.knocked.set()
        return await super().acquire()


async def test_a_client_that_goes_away_leaves_no_bytes_to_be_promised_twice(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 20 * GIB)], model(even(12 * GIB, 12)))
    cluster.placing = door = Door()
    async with door, asyncio.timeout(60):
        door.knocked.clear()
        impatient = stub.Place(placement_service_pb2.PlaceRequest(spec=spec()))
        await door.knocked.wait()
        impatient.cancel()
        await heard(stub)

    error = await refused(stub)

    assert rpc.error_reason(error) == "BLOCKED_BY_PROMISES"
    assert len(cluster.state.instances) == 1


async def test_a_replacement_and_the_release_of_what_it_replaces_are_recorded_together(
    cluster: Cluster, stub: Stub
) -> None:
    await given(cluster, [Node("a", 20 * GIB)], model(even(12 * GIB, 12)))
    first = await place(stub)

    second = await place(stub, replace_instance_id=first.instance_id)

    (fact,) = await recorded(cluster, "instance_released")
    assert fact.instance_released.reason == f"replaced by {second.instance_id}"
    assert cluster.state.instances[first.instance_id].released
    assert cluster.state.nodes["a"].promised_bytes == 12 * GIB


async def test_releasing_twice_records_it_once(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 20 * GIB)], model(even(12 * GIB, 12)))
    instance = await place(stub)
    request = placement_service_pb2.ReleaseRequest(instance_id=instance.instance_id, reason="done", requested_by="me")

    first = await stub.Release(request)
    second = await stub.Release(request)

    assert first.instance.state == second.instance.state == model_pb2.INSTANCE_STATE_RELEASED
    (fact,) = await recorded(cluster, "instance_released")
    assert (fact.instance_released.reason, fact.instance_released.requested_by) == ("done", "me")


async def test_instances_are_listed_page_by_page_in_the_order_they_were_placed(cluster: Cluster, stub: Stub) -> None:
    await given(cluster, [Node("a", 60 * GIB)], model(even(GIB, 1)))
    ids = [(await place(stub)).instance_id for _ in range(5)]
    await stub.Release(placement_service_pb2.ReleaseRequest(instance_id=ids[1]))

    async def listed(**fields: Any) -> list[list[str]]:
        pages = []
        token = ""
        while True:
            request = placement_service_pb2.ListInstancesRequest(page_size=2, page_token=token, **fields)
            response = await stub.ListInstances(request)
            pages.append([instance.instance_id for instance in response.instances])
            token = response.next_page_token
            if not token:
                return pages

    assert await listed() == [[ids[0], ids[2]], [ids[3], ids[4]]]
    assert await listed(include_released=True) == [[ids[0], ids[1]], [ids[2], ids[3]], [ids[4]]]


@pytest.mark.parametrize("token", ["§", "bm9kZS1i"])
async def test_a_page_token_of_nobodys_is_refused(stub: Stub, token: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.ListInstances(placement_service_pb2.ListInstancesRequest(page_token=token))

    assert failed.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watch_shows_the_instance_now_at_each_change_and_ends_when_it_failed(
    cluster: Cluster, stub: Stub
) -> None:
    await given(cluster, [Node("a", 60 * GIB)], model(even(GIB, 1)))
    other = (await place(stub)).instance_id
    watched = (await place(stub)).instance_id
    call = stub.WatchInstance(placement_service_pb2.WatchInstanceRequest(instance_id=watched))
    states = [(await anext(aiter(call))).instance.state]

    await cluster.append(shard_status(model_pb2.SHARD_PHASE_LOADING, other))
    for fact in (
        shard_status(model_pb2.SHARD_PHASE_LOADING, watched),
        shard_status(RUNNING, watched, resident_bytes=GIB),
        shard_status(model_pb2.SHARD_PHASE_FAILED, watched, failure="exit code 134"),
    ):
        await cluster.append(fact)
        # A watch that is behind shows the instance as it then is, and not what it was before.
        states.append((await anext(aiter(call))).instance.state)
    states += [response.instance.state async for response in call]

    assert states == [
        model_pb2.INSTANCE_STATE_PLACED,
        model_pb2.INSTANCE_STATE_LOADING,
        model_pb2.INSTANCE_STATE_RUNNING,
        model_pb2.INSTANCE_STATE_FAILED,
    ]


async def test_a_watch_of_a_released_instance_ends_when_the_last_shard_is_unloaded(
    cluster: Cluster, stub: Stub
) -> None:
    await given(cluster, [Node("a", 60 * GIB)], model(even(GIB, 1)))
    watched = (await place(stub)).instance_id
    await cluster.append(shard_status(RUNNING, watched, resident_bytes=GIB))
    call = stub.WatchInstance(placement_service_pb2.WatchInstanceRequest(instance_id=watched))
    states = [(await anext(aiter(call))).instance.state]

    await stub.Release(placement_service_pb2.ReleaseRequest(instance_id=watched))
    states.append((await anext(aiter(call))).instance.state)
    await cluster.append(shard_status(model_pb2.SHARD_PHASE_UNLOADED, watched))
    states += [response.instance.state async for response in call]

    assert states == [
        model_pb2.INSTANCE_STATE_RUNNING,
        model_pb2.INSTANCE_STATE_RELEASING,
        model_pb2.INSTANCE_STATE_RELEASED,
    ]
