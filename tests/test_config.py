"""What a process goes by, as it is read off its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from services import config
from services.config import Setting
from ullage.v1.config_service_pb2 import (
    SETTING_SOURCE_COMMAND_LINE,
    SETTING_SOURCE_DEFAULT,
    SETTING_SOURCE_ENVIRONMENT,
)

app = typer.Typer(add_completion=False)
told: list[Setting] = []


@app.command()
def command(
    context: typer.Context,
    *,
    wait_ms: Annotated[int, typer.Option(envvar="ULLAGE_WAIT_MS")] = 3_000,
    folder: Annotated[Path | None, typer.Option(envvar="ULLAGE_FOLDER")] = None,
    name: Annotated[str | None, typer.Option()] = None,
    insecure: Annotated[bool, typer.Option("--insecure")] = False,
) -> None:
    told[:] = config.settings(context, folder=folder or Path("/usual"))


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        (
            [],
            {},
            [
                Setting("--wait-ms", "3000", SETTING_SOURCE_DEFAULT, "ULLAGE_WAIT_MS"),
                Setting("--folder", "/usual", SETTING_SOURCE_DEFAULT, "ULLAGE_FOLDER"),
                Setting("--name", None, SETTING_SOURCE_DEFAULT, None),
                Setting("--insecure", "false", SETTING_SOURCE_DEFAULT, None),
            ],
        ),
        (
            ["--wait-ms", "900000", "--name", "", "--insecure"],
            {"ULLAGE_WAIT_MS": "1", "ULLAGE_FOLDER": "/own"},
            [
                Setting("--wait-ms", "900000", SETTING_SOURCE_COMMAND_LINE, "ULLAGE_WAIT_MS"),
                Setting("--folder", "/own", SETTING_SOURCE_ENVIRONMENT, "ULLAGE_FOLDER"),
                Setting("--name", "", SETTING_SOURCE_COMMAND_LINE, None),
                Setting("--insecure", "true", SETTING_SOURCE_COMMAND_LINE, None),
            ],
        ),
    ],
)
def test_each_option_is_told_with_its_value_and_who_said_it(
    arguments: list[str], environment: dict[str, str], expected: list[Setting]
) -> None:
    ended = CliRunner().invoke(app, arguments, env=environment)
    assert ended.exit_code == 0, ended.output
    assert told == expected
