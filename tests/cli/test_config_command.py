"""`ullage config`, of a service that answers and of none."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from services.cli.__main__ import run
from tests.cli.conftest import Serve
from ullage.v1 import config_service_pb2, config_service_pb2_grpc

ANSWER = config_service_pb2.GetConfigResponse(
    service="runner",
    ullage_version="0.1.0",
    settings=[
        config_service_pb2.Setting(
            flag="--stall-after-ms",
            value="900000",
            source=config_service_pb2.SETTING_SOURCE_COMMAND_LINE,
            environment_variable="ULLAGE_STALL_AFTER_MS",
        ),
        config_service_pb2.Setting(flag="--advertise", source=config_service_pb2.SETTING_SOURCE_DEFAULT),
    ],
)


class Canned(config_service_pb2_grpc.ConfigServiceServicer):
    def GetConfig(self, request: config_service_pb2.GetConfigRequest, context: Any) -> Any:
        return ANSWER


@pytest.fixture
def address(serve: Serve) -> str:
    def register(server: grpc.Server) -> None:
        config_service_pb2_grpc.add_ConfigServiceServicer_to_server(Canned(), server)

    return serve(register)


def test_each_option_has_a_line_with_who_said_it(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"runner 0.1.0 at {address}"
    assert [line.split() for line in lines[2:]] == [
        ["OPTION", "VALUE", "FROM", "ENVIRONMENT"],
        ["--stall-after-ms", "900000", "command", "line", "ULLAGE_STALL_AFTER_MS"],
        ["--advertise", "none", "default"],
    ]


def test_json_leaves_out_what_was_not_said(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", address, "--json"]) == 0
    [_, advertise] = json.loads(capsys.readouterr().out)["settings"]
    assert advertise == {"flag": "--advertise", "source": "SETTING_SOURCE_DEFAULT"}


def test_where_nothing_answers_it_says_who_would_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "127.0.0.1:1"]) == 5
    assert "nothing answers at 127.0.0.1:1: `ullage status` shows where runners are" in capsys.readouterr().err
