"""`ullage generate`: asks a running instance, at the runner of its first rank, and prints the text as it comes."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer
from google.protobuf import json_format

from services.cli import connection
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.failure import CommandError, ExitCode
from services.cli.output import JsonOption, errors_console
from ullage.v1 import event_service_pb2, model_pb2, runner_service_pb2, runner_service_pb2_grpc, state_pb2


def generate(
    *,
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_INSTANCE", help="A model that is placed, or an instance.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help='What to ask; "-" reads it from stdin.')],
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0, help="0, the default, picks the likeliest token.")
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="In (0, 1].")] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Ask a running model; the answer goes to stdout as it comes, its counts and times to stderr.

    Example: `ullage generate smollm2-135m "Why is the sky blue?" --max-tokens 64`
    """
    sampling = runner_service_pb2.SamplingParameters(
        temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens, stop=stop or []
    )
    with connection.master_at(master) as there:
        instance, address = _running(there, model)
    request = runner_service_pb2.GenerateRequest(instance_id=instance.instance_id, sampling=sampling)
    text = sys.stdin.read() if prompt == "-" else prompt
    if raw:
        request.text = text
    else:
        request.chat.messages.add(role="user", content=text)
    _ask(address, request, as_json=as_json)


def _running(master: Master, typed: str) -> tuple[model_pb2.Instance, str]:
    """The running instance `typed` stands for, and the address of its first rank's runner."""
    state = master.events.GetState(event_service_pb2.GetStateRequest(), timeout=CALL_SECONDS_MAX).state
    of_model = [one for one in state.instances if one.spec.model_id == typed]
    instances = of_model or [one for one in state.instances if one.instance_id.startswith(typed)]
    if not instances:
        advice = f"place it with `ullage place {typed}`, or see `ullage status`"
        raise CommandError(f"nothing called {typed!r} is placed: {advice}", ExitCode.NOT_FOUND, reason="NOT_RUNNING")
    running = [one for one in instances if one.state == model_pb2.INSTANCE_STATE_RUNNING]
    if not running:
        raise CommandError(_nothing_runs(typed, instances[-1]), ExitCode.NOT_FOUND, reason="NOT_RUNNING")
    return running[-1], _first_runner(state, running[-1])


def _nothing_runs(typed: str, latest: model_pb2.Instance) -> str:
    state_name = model_pb2.InstanceState.Name(latest.state).removeprefix("INSTANCE_STATE_")
    return (
        f"no instance of {typed!r} is running ({latest.instance_id} is {state_name}): "
        f"place it with `ullage place {latest.spec.model_id}`, or see `ullage status`"
    )


def _first_runner(state: state_pb2.ClusterState, instance: model_pb2.Instance) -> str:
    node_id = instance.placement.shards[0].node_id
    return next(node.runner.address for node in state.nodes if node.identity.node_id == node_id)


def _ask(address: str, request: runner_service_pb2.GenerateRequest, *, as_json: bool) -> None:
    failure = f"the runner at {address} does not answer: is its node up? See `ullage status`"
    text: list[str] = []
    token_ids: list[int] = []
    summary = runner_service_pb2.GenerationSummary()
    with connection.channel_to(address, failure=failure) as channel:
        for response in runner_service_pb2_grpc.RunnerServiceStub(channel).Generate(request):
            text.append(response.text)
            token_ids.extend(response.token_ids)
            if response.HasField("summary"):
                summary = response.summary
            if not as_json:
                print(response.text, end="", flush=True)
    if as_json:
        _print_json(request.instance_id, "".join(text), token_ids, summary)
    else:
        print(flush=True)
        errors_console().print(_summary_text(summary))


def _print_json(
    instance_id: str, text: str, token_ids: list[int], summary: runner_service_pb2.GenerationSummary
) -> None:
    body = {
        "instance_id": instance_id,
        "text": text,
        "token_ids": token_ids,
        "summary": json_format.MessageToDict(
            summary, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        ),
    }
    print(json.dumps(body, ensure_ascii=False))


def _summary_text(summary: runner_service_pb2.GenerationSummary) -> str:
    ended = runner_service_pb2.FinishReason.Name(summary.finish_reason).removeprefix("FINISH_REASON_").lower()
    text = (
        f"{summary.prompt_tokens} tokens read in {summary.prefill_seconds:.2f} s, "
        f"{summary.generated_tokens} written in {summary.decode_seconds:.2f} s"
    )
    if summary.decode_seconds > 0 and summary.generated_tokens > 1:
        text += f" ({summary.generated_tokens / summary.decode_seconds:.1f} per second)"
    return f"{text}; ended by {ended}; seed {summary.seed}"
