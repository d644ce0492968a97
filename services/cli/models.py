"""`ullage models`: prepares models on this machine, and tells the cluster which there are."""

from __future__ import annotations

import json
from typing import Annotated, Final

import grpc
import typer
from google.protobuf import json_format

from services.cli import connection, local_node, model_estimate, model_progress, model_store, model_table
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.failure import CommandError, ExitCode, from_rpc_error
from services.cli.model_source import parse_source
from services.cli.model_store import Prepared
from services.cli.output import JsonOption, bytes_text, console, print_json
from ullage.v1 import model_pb2, model_service_pb2

PAGE_SIZE: Final = 1000
CONTEXT_TOKENS_DEFAULT: Final = 2048

app = typer.Typer(help="Prepare models on this machine, and see which ones the cluster knows.", no_args_is_help=True)
app.command()(model_estimate.estimate)

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help="A model from `ullage models list`.")]


@app.command()
def add(
    *,
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A model's folder, a .gguf file, hf:OWNER/NAME, or smollm2-135m.")
    ],
    name: Annotated[str | None, typer.Option("--name", help="The id it gets; else made of the source's name.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Prepare it, but do not tell the master.")] = False,
    models_dir: local_node.ModelsDirOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Prepare a model on this machine and make it known to the cluster.

    Do it on every node that shall run the model, with the same source. A GGUF file is converted, once. Where the
    master cannot be reached the model is ready all the same, and the exit code is 5: the same command registers it
    later.

    Example: `ullage models add smollm2-135m`
    """
    wanted = parse_source(source)
    model_id = model_store.model_id_of(wanted, name)
    with model_progress.shown() as steps:
        prepared = model_store.prepare(wanted, models_dir or model_store.default_models_dir(), model_id, steps)
    if not as_json:
        _say_prepared(prepared)
    if not offline:
        _register(prepared, master)
    if as_json:
        _print_added(prepared, registered=not offline)
    elif not offline:
        console().print(f"registered with the master at {master}", markup=False, soft_wrap=True)


def _say_prepared(prepared: Prepared) -> None:
    model = prepared.model
    size = bytes_text(model_table.stored_bytes(model))
    ready = "is ready" if prepared.fresh else "was there already, the same"
    line = f"{model.model_id} {ready}: {len(model.layers)} layers, {size}, {model.quantization}, in {prepared.folder}"
    console().print(line, markup=False, soft_wrap=True)


def _register(prepared: Prepared, address: str) -> None:
    request = model_service_pb2.RegisterModelRequest(model=prepared.model)
    try:
        with connection.master_at(address) as there:
            there.models.RegisterModel(request, timeout=CALL_SECONDS_MAX)
    except (CommandError, grpc.RpcError) as error:
        failure = error if isinstance(error, CommandError) else from_rpc_error(error)
        raise CommandError(
            f"{prepared.model.model_id} is ready in {prepared.folder} but not registered: {failure}; "
            "then run this command again",
            failure.exit_code,
            reason=failure.reason,
        ) from error


def _print_added(prepared: Prepared, *, registered: bool) -> None:
    body = {
        "model": json_format.MessageToDict(
            prepared.model, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ),
        "folder": str(prepared.folder),
        "fresh": prepared.fresh,
        "registered": registered,
    }
    print(json.dumps(body, indent=2), flush=True)


@app.command(name="list")
def list_(*, master: connection.MasterOption = connection.DEFAULT_MASTER, as_json: JsonOption = False) -> None:
    """Show the models the cluster knows.

    Example: `ullage models list`
    """
    with connection.master_at(master) as there:
        known = _all(there)
    if as_json:
        print_json(model_service_pb2.ListModelsResponse(models=known))
    elif known:
        console().print(model_table.models(known))
    else:
        console().print("no models yet: add one, e.g. `ullage models add smollm2-135m`", markup=False)


def _all(master: Master) -> list[model_pb2.Model]:
    known: list[model_pb2.Model] = []
    token = ""
    while True:
        request = model_service_pb2.ListModelsRequest(page_size=PAGE_SIZE, page_token=token)
        page = master.models.ListModels(request, timeout=CALL_SECONDS_MAX)
        known.extend(page.models)
        token = page.next_page_token
        if not token:
            return known


@app.command()
def show(
    *,
    model: ModelArgument,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of context to count KV for.")] = (
        CONTEXT_TOKENS_DEFAULT
    ),
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Show what each part of a model weighs, and what a context takes besides.

    Example: `ullage models show smollm2-135m --context 8192`
    """
    with connection.master_at(master) as there:
        request = model_service_pb2.GetModelRequest(model_id=model)
        found = there.models.GetModel(request, timeout=CALL_SECONDS_MAX).model
    if as_json:
        print_json(found)
        return
    out = console()
    total = bytes_text(model_table.stored_bytes(found))
    out.print(
        f"{found.model_id}: {found.model_type}, {total}, {found.quantization}, {found.source}",
        markup=False,
        soft_wrap=True,
    )
    out.print(model_table.parts(found))
    out.print(model_table.kv_text(found, context), markup=False, soft_wrap=True)
    out.print(f"longest context {found.context_tokens_max} tokens; digest {found.digest}", markup=False, soft_wrap=True)


@app.command()
def remove(
    *,
    model: ModelArgument,
    files: Annotated[bool, typer.Option("--files", help="Remove its folder on this machine as well.")] = False,
    models_dir: local_node.ModelsDirOption = None,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Make the cluster forget a model; its folders stay unless --files is given.

    Example: `ullage models remove smollm2-135m --files`
    """
    with connection.master_at(master) as there:
        forgotten = _forget(there, model, must_be_known=not files)
    removed = files and model_store.remove(models_dir or model_store.default_models_dir(), model)
    if not forgotten and not removed:
        raise CommandError(f"no model is called {model!r}, neither in the cluster nor here", ExitCode.NOT_FOUND)
    if as_json:
        print(json.dumps({"model_id": model, "forgotten": forgotten, "files_removed": removed}), flush=True)
        return
    if forgotten:
        console().print(f"the cluster has forgotten {model}", markup=False)
    if removed:
        console().print(f"its folder on this machine is removed: {model}", markup=False)


def _forget(master: Master, model_id: str, *, must_be_known: bool) -> bool:
    """Whether the cluster knew it."""
    try:
        master.models.RemoveModel(model_service_pb2.RemoveModelRequest(model_id=model_id), timeout=CALL_SECONDS_MAX)
    except grpc.RpcError as error:
        if must_be_known or error.code() != grpc.StatusCode.NOT_FOUND:
            raise
        return False
    return True
