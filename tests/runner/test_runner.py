"""A whole runner against a real master, with shards that hold no model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

import grpc
import pytest

from services import rpc
from services.clock import SystemClock
from services.master.cluster import Cluster
from services.master.liveness import Bounds, RunnerBounds
from services.master.server import Master
from services.master.server import running as master_running
from services.master.settings import Settings as MasterSettings
from services.runner.description import DescriptionError
from services.runner.runner import Runner, running
from services.runner.settings import Settings
from tests import tiny_models
from tests.runner.conftest import FAKE_SHARD
from tests.runner.told import WAIT_SECONDS, shard_processes, until
from ullage.v1 import (
    dispatch_service_pb2,
    dispatch_service_pb2_grpc,
    event_pb2,
    model_pb2,
    node_pb2,
    runner_service_pb2,
    runner_service_pb2_grpc,
)

PATIENT = Bounds(suspect_after_seconds=60.0, lost_after_seconds=600.0)
PATIENT_WITH_RUNNERS = RunnerBounds(stalled_after_seconds=61.0, lost_after_seconds=600.0, take_up_seconds=600.0)
"""No test here is about silence, and runners share their processor with all else that runs on the machine."""


def start_master(folder: Path, address: str = "127.0.0.1:0") -> AbstractAsyncContextManager[Master]:
    settings = MasterSettings(
        address=address,
        log_path=folder / "events.db",
        bounds=PATIENT,
        runner_bounds=PATIENT_WITH_RUNNERS,
        ready_file=None,
        read_only=False,
    )
    return master_running(settings, SystemClock())


@asynccontextmanager
async def start_runner(
    master: str, state_dir: Path, models_dir: Path, behaviour: str = "runs"
) -> AsyncIterator[Runner]:
    settings = Settings(
        master=master,
        address="127.0.0.1:0",
        advertise=None,
        state_dir=state_dir,
        models_dir=models_dir,
        threads=2,
        weights="auto",
        ready_file=None,
    )
    async with running(settings, (sys.executable, str(FAKE_SHARD), behaviour), SystemClock()) as (runner, work):
        yield runner
        assert not work.done()


@pytest.fixture
def kept_address() -> Iterator[str]:
    """Where one master after another can listen: between two of them, the port is given to nobody else."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{keeper.getsockname()[1]}"


@pytest.fixture
async def master(tmp_path: Path) -> AsyncIterator[Master]:
    async with start_master(tmp_path) as master:
        yield master


async def place(cluster: Cluster, instance_id: str, model: model_pb2.Model, *node_ids: str) -> None:
    shards = [model_pb2.Shard(rank=rank, node_id=node_id) for rank, node_id in enumerate(node_ids)]
    placed = event_pb2.InstancePlaced(
        instance_id=instance_id,
        spec=model_pb2.PlacementSpec(model_id=model.model_id),
        placement=model_pb2.Placement(shards=shards),
    )
    await cluster.append(
        event_pb2.Fact(model_registered=event_pb2.ModelRegistered(model=model)),
        event_pb2.Fact(instance_placed=placed),
    )


async def run_one(cluster: Cluster, runner: Runner, model: model_pb2.Model, instance_id: str = "i1") -> None:
    """Have the runner run an instance by itself."""
    await until(lambda: runner.profile.node_id in cluster.state.nodes)
    await place(cluster, instance_id, model, runner.profile.node_id)
    await until(lambda: cluster.state.instances[instance_id].state == model_pb2.INSTANCE_STATE_RUNNING)


async def generate(runner: Runner, prompt: str) -> str:
    async with rpc.channel(runner.profile.address) as channel:
        request = runner_service_pb2.GenerateRequest(instance_id="i1", text=prompt)
        answer = runner_service_pb2_grpc.RunnerServiceStub(channel).Generate(request)
        return "".join([response.text async for response in answer])


async def test_a_placement_becomes_a_running_shard_that_answers_and_a_release_ends_it(
    master: Master, tmp_path: Path, tiny_models_dir: Path, tiny_model: model_pb2.Model
) -> None:
    cluster = master.cluster
    async with start_runner(master.address, tmp_path / "n1", tiny_models_dir) as runner:
        await run_one(cluster, runner, tiny_model)
        assert await generate(runner, "one two") == "onetwo"

        released = event_pb2.InstanceReleased(instance_id="i1")
        await cluster.append(event_pb2.Fact(instance_released=released))
        await until(lambda: cluster.state.instances["i1"].state == model_pb2.INSTANCE_STATE_RELEASED)
        assert shard_processes() == []


async def test_the_master_knows_what_the_runner_is(master: Master, tmp_path: Path, tiny_models_dir: Path) -> None:
    async with start_runner(master.address, tmp_path / "n1", tiny_models_dir) as runner:
        await until(lambda: runner.profile.node_id in master.cluster.state.nodes)
        profile = master.cluster.state.nodes[runner.profile.node_id].runner
        assert profile == runner.profile
        assert profile.node_id == (tmp_path / "n1" / "node_id").read_text().strip()
        assert (profile.device, profile.weight_form) == ("cpu", node_pb2.WEIGHT_FORM_FLOAT32)
        assert list(profile.model_ids) == ["tiny"]


async def test_a_master_that_was_away_finds_the_shard_running_and_nothing_is_started_again(
    tmp_path: Path, tiny_models_dir: Path, tiny_model: model_pb2.Model, kept_address: str
) -> None:
    async with AsyncExitStack() as runners:
        async with start_master(tmp_path, kept_address) as before:
            starting = start_runner(before.address, tmp_path / "n1", tiny_models_dir)
            runner = await runners.enter_async_context(starting)
            await run_one(before.cluster, runner, tiny_model)
        await until(lambda: not runner.session.connected)
        pids = [child.pid for child in shard_processes()]
        assert await generate(runner, "while away") == "whileaway"

        async with start_master(tmp_path, kept_address) as after:
            await until(lambda: runner.session.connected)
            assert after.cluster.state.instances["i1"].state == model_pb2.INSTANCE_STATE_RUNNING
            assert [child.pid for child in shard_processes()] == pids
            assert await generate(runner, "and again") == "andagain"


async def test_a_shard_that_ends_while_the_master_is_away_is_told_later_and_not_started_again(
    tmp_path: Path, tiny_models_dir: Path, tiny_model: model_pb2.Model, kept_address: str
) -> None:
    async with AsyncExitStack() as runners:
        async with start_master(tmp_path, kept_address) as before:
            starting = start_runner(before.address, tmp_path / "n1", tiny_models_dir)
            runner = await runners.enter_async_context(starting)
            await run_one(before.cluster, runner, tiny_model)
        os.kill(shard_processes()[0].pid, signal.SIGKILL)
        await until(lambda: runner.shards.find("i1", 0) is None)

        async with start_master(tmp_path, kept_address) as after:
            await until(lambda: after.cluster.state.instances["i1"].failure != "")
            assert after.cluster.state.instances["i1"].failure.endswith(
                "failed while RUNNING: its process ended: killed by SIGKILL"
            )
            assert shard_processes() == []


async def test_a_master_with_an_older_copy_of_its_log_gets_what_that_wants_and_hears_what_it_lacks(
    tmp_path: Path, tiny_models_dir: Path, tiny_model: model_pb2.Model, kept_address: str
) -> None:
    log_path, older = tmp_path / "events.db", tmp_path / "older.db"
    async with AsyncExitStack() as runners:
        async with start_master(tmp_path, kept_address) as before:
            starting = start_runner(before.address, tmp_path / "n1", tiny_models_dir)
            runner = await runners.enter_async_context(starting)
            await run_one(before.cluster, runner, tiny_model)
            await place(before.cluster, "i2", tiny_model, runner.profile.node_id)
            with closing(sqlite3.connect(log_path)) as log, closing(sqlite3.connect(older)) as copy:
                log.backup(copy)
            await until(lambda: before.cluster.state.instances["i2"].state == model_pb2.INSTANCE_STATE_RUNNING)
            await before.cluster.append(event_pb2.Fact(instance_released=event_pb2.InstanceReleased(instance_id="i1")))
            await until(lambda: before.cluster.state.instances["i1"].state == model_pb2.INSTANCE_STATE_RELEASED)
            await until(lambda: runner.outbox.empty)
        for path in tmp_path.glob("events.db*"):  # noqa: ASYNC240 - nothing else runs here
            path.unlink()
        older.rename(log_path)

        async with start_master(tmp_path, kept_address) as after:
            await until(lambda: runner.session.connected)
            # That one loads is known to nobody but the log: what runs says so again.
            await until(lambda: after.cluster.state.instances["i2"].state == model_pb2.INSTANCE_STATE_RUNNING)
            # That one was released is known to nobody any more: it is started again.
            await until(
                lambda: (
                    (shard := runner.shards.find("i1", 0)) is not None
                    and shard.status.phase == model_pb2.SHARD_PHASE_RUNNING
                )
            )
            assert after.cluster.state.instances["i1"].state == model_pb2.INSTANCE_STATE_RUNNING
            assert await generate(runner, "and again") == "andagain"


async def test_a_runner_that_is_stopped_says_so_of_its_shards(
    master: Master, tmp_path: Path, tiny_models_dir: Path, tiny_model: model_pb2.Model
) -> None:
    async with start_runner(master.address, tmp_path / "n1", tiny_models_dir) as runner:
        await run_one(master.cluster, runner, tiny_model)

    await until(lambda: master.cluster.state.instances["i1"].failure != "")
    assert master.cluster.state.instances["i1"].failure.endswith("failed while RUNNING: its runner was stopped")
    assert shard_processes() == []


async def test_runners_dial_each_other_when_asked_and_when_one_joins(
    master: Master, tmp_path: Path, tiny_models_dir: Path
) -> None:
    nodes = master.cluster.state.nodes
    async with (
        start_runner(master.address, tmp_path / "n1", tiny_models_dir),
        start_runner(master.address, tmp_path / "n2", tiny_models_dir),
        rpc.channel(master.address) as channel,
    ):
        await until(lambda: [len(node.links) for node in nodes.values()] == [1, 1])
        stub = dispatch_service_pb2_grpc.DispatchServiceStub(channel)
        async with asyncio.timeout(WAIT_SECONDS):
            answer = await stub.CheckConnectivity(dispatch_service_pb2.CheckConnectivityRequest())
            while not all(link.reachable for link in answer.links):
                # Who was kept from the processor for as long as a dial may take is asked again.
                answer = await stub.CheckConnectivity(dispatch_service_pb2.CheckConnectivityRequest())

    assert [(link.from_node_id, link.to_node_id) for link in answer.links] == [
        tuple(sorted(nodes)),
        tuple(sorted(nodes, reverse=True)),
    ]
    assert all(link.reachable and link.HasField("latency") for link in answer.links)


async def test_a_model_that_is_added_is_announced(master: Master, tmp_path: Path) -> None:
    def known() -> list[str]:
        runners = [node.runner for node in master.cluster.state.nodes.values() if node.runner is not None]
        return [model_id for runner in runners for model_id in runner.model_ids]

    async with start_runner(master.address, tmp_path / "n1", tmp_path / "models"):
        await until(lambda: len(master.cluster.state.nodes) == 1)
        assert known() == []
        tiny_models.write(tmp_path / "models" / "tiny")
        (tmp_path / "models" / "tiny" / "ullage.json").write_text("{}")
        await until(lambda: known() == ["tiny"])


async def test_two_runners_with_one_node_id_do_not_both_serve(
    master: Master, tmp_path: Path, tiny_models_dir: Path
) -> None:
    async with (
        start_runner(master.address, tmp_path / "n1", tiny_models_dir) as first,
        start_runner(master.address, tmp_path / "n1", tiny_models_dir) as second,
    ):
        await until(lambda: first.session.connected or second.session.connected)
        await asyncio.sleep(1)
        assert [first.session.connected, second.session.connected].count(True) == 1


async def test_a_runner_whose_shards_cannot_run_says_why_at_its_start(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import sys; sys.exit('no BLAS here')")
    settings = Settings(
        master="127.0.0.1:1",
        address="127.0.0.1:0",
        advertise=None,
        state_dir=tmp_path,
        models_dir=tmp_path,
        threads=1,
        weights="auto",
        ready_file=None,
    )
    with pytest.raises(DescriptionError, match=r"^shards cannot run here \(exit code 1\): no BLAS here$"):
        async with running(settings, (sys.executable, str(script)), SystemClock()):
            pass


async def test_a_port_in_use_is_named(tmp_path: Path, tiny_models_dir: Path, master: Master) -> None:
    settings = Settings(
        master=master.address,
        address=master.address,
        advertise=None,
        state_dir=tmp_path,
        models_dir=tiny_models_dir,
        threads=1,
        weights="auto",
        ready_file=None,
    )
    with pytest.raises(rpc.AddressError, match="in use"):
        async with running(settings, (sys.executable, str(FAKE_SHARD), "runs"), SystemClock()):
            pass


async def test_a_caller_is_told_when_nothing_runs_here(master: Master, tmp_path: Path, tiny_models_dir: Path) -> None:
    async with start_runner(master.address, tmp_path / "n1", tiny_models_dir) as runner:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(runner, "hello")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
