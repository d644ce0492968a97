"""`ullage up`: a master and some nodes on this machine, in one foreground command."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import grpc
import platformdirs
import typer

from services import rpc
from services.cli import connection, local_node, tables
from services.cli.failure import CommandError
from services.cli.output import JsonOption, console, message_json
from services.cli.processes import Processes, Service, run_until_asked_to_stop
from ullage.v1 import event_service_pb2, event_service_pb2_grpc, state_pb2

HEARD_SECONDS_MAX: Final = 60.0
POLL_SECONDS: Final = 0.1


@dataclass(frozen=True)
class _Cluster:
    nodes: int
    memory: str | None
    data_dir: Path
    models_dir: Path | None
    listen: str
    insecure: bool
    verbose: bool
    as_json: bool
    in_parts: bool = False
    """`memory` is each node's part of the machine's, and not what somebody asked for."""


def up(
    *,
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=64, help="How many nodes.")] = 3,
    memory: local_node.MemoryOption = None,
    data_dir: Annotated[
        Path | None,
        typer.Option("--data-dir", envvar="ULLAGE_STATE_DIR", help="Where the log and the nodes' identities are kept."),
    ] = None,
    models_dir: local_node.ModelsDirOption = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the master listens; port 0 takes a free one.")
    ] = connection.DEFAULT_MASTER,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on more than loopback, without TLS.")] = False,
    verbose: local_node.VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start a master and some nodes on this machine; Ctrl-C stops them all.

    --memory is what each node may give, so that a small machine can play a cluster; without it, several nodes give an
    equal part each of what is available when they start. When a process ends by itself, everything is stopped and its
    last lines are shown. With --json the first line on stdout tells that all is ready, and where the master listens.

    Example: `ullage up --nodes 3 --memory 450MiB`
    """
    kept = data_dir or platformdirs.user_state_path("ullage")
    run_until_asked_to_stop(_up(_Cluster(nodes, memory, kept, models_dir, listen, insecure, verbose, as_json)))


async def _up(cluster: _Cluster) -> None:
    if cluster.nodes > 1 and cluster.memory is None and not os.environ.get(local_node.OVERRIDE_VARIABLE):
        cluster = replace(cluster, memory=await local_node.equal_part(cluster.nodes), in_parts=True)
    async with Processes(verbose=cluster.verbose) as processes:
        [address] = await processes.start([_master(cluster)])
        started = await processes.start(
            [service for number in range(1, cluster.nodes + 1) for service in _node(cluster, address, number)]
        )
        state = await _heard(processes, address, runner_addresses=frozenset(started[1::2]))
        _welcome(cluster, address, state)
        await processes.watch()


def _master(cluster: _Cluster) -> Service:
    arguments = ("--listen", cluster.listen, "--state-dir", str(cluster.data_dir))
    return Service("master", "master", (*arguments, "--insecure") if cluster.insecure else arguments)


def _node(cluster: _Cluster, master: str, number: int) -> list[Service]:
    name = f"node-{number}"
    return local_node.LocalNode(
        master=master,
        label=name,
        name=name,
        state_dir=cluster.data_dir / "nodes" / name,
        models_dir=cluster.models_dir,
        memory=cluster.memory,
        threads=max(1, (os.cpu_count() or 1) // cluster.nodes),
    ).services()


async def _heard(processes: Processes, address: str, runner_addresses: frozenset[str]) -> state_pb2.ClusterState:
    """The state once every node has said what it can give and what it runs."""
    deadline = asyncio.get_running_loop().time() + HEARD_SECONDS_MAX
    async with rpc.channel(address) as channel:
        events = event_service_pb2_grpc.EventServiceStub(channel)
        while asyncio.get_running_loop().time() < deadline:
            await processes.check()
            try:
                request = event_service_pb2.GetStateRequest()
                state = (await events.GetState(request, timeout=connection.CALL_SECONDS_MAX)).state
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            else:
                ready = {node.runner.address for node in state.nodes if node.HasField("memory")}
                if runner_addresses <= ready:
                    return state
            await asyncio.sleep(POLL_SECONDS)
    raise CommandError(
        f"the master did not hear from every node within {HEARD_SECONDS_MAX:.0f} s: see what they say with --verbose"
    )


def _welcome(cluster: _Cluster, address: str, state: state_pb2.ClusterState) -> None:
    if cluster.as_json:
        print(json.dumps({"master": address, "state": json.loads(message_json(state))}), flush=True)
        return
    out = console()
    out.print(f"master at {address}, {cluster.nodes} node{'s' if cluster.nodes > 1 else ''}; Ctrl-C stops them\n")
    out.print(tables.nodes(state))
    if cluster.in_parts:
        out.print(
            "each gives an equal part of what this machine had available; --memory SIZE says otherwise", markup=False
        )
    steps = ["ullage models add smollm2-135m", "ullage place smollm2-135m", 'ullage generate smollm2-135m "Hello"']
    if address != connection.DEFAULT_MASTER:
        steps.insert(0, f"export ULLAGE_MASTER={address}")
    out.print("\nIn another terminal:\n" + "\n".join(f"  {step}" for step in steps), markup=False)
