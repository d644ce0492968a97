"""`ullage models estimate`: what a model will weigh, and where it would go, before its files are brought here."""

from __future__ import annotations

from typing import Annotated

import typer

from services import model_folder
from services.cli import connection, model_source, model_store, model_table
from services.cli.connection import CALL_SECONDS_MAX
from services.cli.failure import CommandError, ExitCode
from services.cli.model_source import FolderSource, HubSource
from services.cli.output import JsonOption, bytes_text, console, print_json
from services.model_folder import ModelFolderError
from ullage.v1 import model_pb2, model_service_pb2


def estimate(
    *,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder with a config.json, or hf:OWNER/NAME to fetch that alone.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="The id it gets; else made of the source's name.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Say what it weighs, but do not tell the master.")] = False,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Compute what a model will weigh from its config.json, before its files are fetched.

    It can then be previewed, and not placed: `ullage models add` with its files takes the place of the estimate.

    Example: `ullage models estimate hf:OWNER/NAME --name big && ullage place big --dry-run`
    """
    model = _computed(source, name)
    if not offline:
        with connection.master_at(master) as there:
            request = model_service_pb2.RegisterModelRequest(model=model)
            there.models.RegisterModel(request, timeout=CALL_SECONDS_MAX)
    if as_json:
        print_json(model)
        return
    size = bytes_text(model_table.stored_bytes(model))
    line = f"{model.model_id} will take about {size}: {len(model.layers)} layers, {model.quantization}; computed"
    console().print(line, markup=False, soft_wrap=True)
    if not offline:
        console().print(f"see where it would go: ullage place {model.model_id} --dry-run", markup=False, soft_wrap=True)


def _computed(text: str, name: str | None) -> model_pb2.Model:
    source = model_source.parse_source(text)
    if not isinstance(source, FolderSource | HubSource):
        raise CommandError(f"{text} has no config.json: `ullage models add` reads what it weighs", ExitCode.USAGE)
    folder, label = source.config()
    model_id = model_store.model_id_of(source, name)
    try:
        return model_folder.computed(folder, model_id=model_id, source=label)
    except ModelFolderError as error:
        raise CommandError(str(error), reason="MODEL_INVALID") from error
