"""`ullage node`: this machine as a node of a cluster, its probe and its runner in one foreground command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from services.cli import connection, local_node
from services.cli.output import JsonOption, console
from services.cli.processes import Processes, run_until_asked_to_stop


def node(
    *,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    name: Annotated[str | None, typer.Option("--name", help="What people call this node; else its host name.")] = None,
    memory: local_node.MemoryOption = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, max=4096, help="For all shards together.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", envvar="ULLAGE_STATE_DIR", help="Where the node's identity is kept.")
    ] = None,
    models_dir: local_node.ModelsDirOption = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the runner listens.")
    ] = "127.0.0.1:50502",
    advertise: Annotated[
        str | None, typer.Option("--advertise", metavar="HOST:PORT", help="Where others find the runner; else there.")
    ] = None,
    probe_listen: Annotated[
        str, typer.Option("--probe-listen", metavar="HOST:PORT", help="Where the probe listens, for inspection.")
    ] = "127.0.0.1:50501",
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen on more than loopback, without TLS.")] = False,
    verbose: local_node.VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start this machine's probe and runner; Ctrl-C stops both.

    They wait for the master when it is away. Other nodes must reach the runner: give it the address they know.
    With --json the first line on stdout tells that both listen, and where.

    Example: `ullage node --master 192.168.1.10:50500 --listen 192.168.1.11:50502 --insecure`
    """
    here = local_node.LocalNode(
        master=master,
        name=name,
        state_dir=state_dir,
        models_dir=models_dir,
        memory=memory,
        threads=threads,
        probe_listen=probe_listen,
        runner_listen=listen,
        advertise=advertise,
        insecure=insecure,
    )
    run_until_asked_to_stop(_run(here, verbose=verbose, as_json=as_json))


async def _run(here: local_node.LocalNode, *, verbose: bool, as_json: bool) -> None:
    async with Processes(verbose=verbose) as processes:
        probe, runner = await processes.start(here.services())
        if as_json:
            print(json.dumps({"probe": probe, "runner": runner, "master": here.master}), flush=True)
        else:
            console().print(f"probe at {probe}, runner at {runner}, master at {here.master}; Ctrl-C stops them")
        await processes.watch()
