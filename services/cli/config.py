"""`ullage config`: what a running master, probe or runner goes by."""

from __future__ import annotations

from typing import Annotated

import typer

from services.cli import connection, tables
from services.cli.connection import CALL_SECONDS_MAX
from services.cli.output import JsonOption, console, print_json
from ullage.v1 import config_service_pb2, config_service_pb2_grpc


def config(
    address: Annotated[
        str | None,
        typer.Argument(metavar="[HOST:PORT]", help="A probe or a runner; else the master.", show_default=False),
    ] = None,
    *,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Show every option of a running service: what it goes by, and who said so.

    Examples: `ullage config`, `ullage config 127.0.0.1:50502`
    """
    there = address or master
    failure = f"nothing answers at {there}: `ullage status` shows where runners are, --master names another master"
    with connection.channel_to(there, failure=failure) as channel:
        stub = config_service_pb2_grpc.ConfigServiceStub(channel)
        answer = stub.GetConfig(config_service_pb2.GetConfigRequest(), timeout=CALL_SECONDS_MAX)
    if as_json:
        print_json(answer)
        return
    out = console()
    out.print(f"{answer.service} {answer.ullage_version} at {there}\n", markup=False)
    out.print(tables.settings(answer.settings))
