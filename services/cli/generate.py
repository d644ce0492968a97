"""`ullage generate`: asks a running instance, at the runner of its first rank, and prints the text as it comes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import grpc
import typer
from google.protobuf import json_format
from google.protobuf.message import Message

from services.cli import connection
from services.cli.connection import CALL_SECONDS_MAX, Master
from services.cli.failure import CommandError, ExitCode
from services.cli.instance_watch import watched
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
    top_p: Annotated[
        float | None, typer.Option("--top-p", help="Of the likeliest tokens, as many as reach this; in (0, 1].")
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", min=1, help="So many of the likeliest tokens.")] = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", help="Tokens this likely beside the likeliest; in [0, 1].")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="Over 1, tokens that came before are less likely.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text.")] = None,
    logprobs: Annotated[
        int | None, typer.Option("--logprobs", min=0, help="With --json: log probabilities, and so many likely tokens.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="The prompt as it is, without the chat template.")] = False,
    master: connection.MasterOption = connection.DEFAULT_MASTER,
    as_json: JsonOption = False,
) -> None:
    """Ask a running model; the answer goes to stdout as it comes, its counts and times to stderr.

    Example: `ullage generate smollm2-135m "Why is the sky blue?" --max-tokens 64`
    """
    sampling = runner_service_pb2.SamplingParameters(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop or [],
        logprobs=logprobs,
    )
    request = runner_service_pb2.GenerateRequest(sampling=sampling)
    text = _read() if prompt == "-" else prompt
    if raw:
        request.text = text
    else:
        request.chat.messages.add(role="user", content=text)
    with connection.master_at(master) as there:
        instance, address = _running(there, model)
        request.instance_id = instance.instance_id
        _ask(there, address, request, as_json=as_json)


def _read() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise CommandError(
            f"stdin is no UTF-8 from its byte {error.start + 1} on: write it in UTF-8", ExitCode.USAGE
        ) from error


def _running(master: Master, typed: str) -> tuple[model_pb2.Instance, str]:
    """The running instance `typed` stands for, and the address of its first rank's runner."""
    state = master.events.GetState(event_service_pb2.GetStateRequest(), timeout=CALL_SECONDS_MAX).state
    of_model = [one for one in state.instances if one.spec.model_id == typed]
    exact = [one for one in state.instances if one.instance_id == typed]
    instances = of_model or exact or [one for one in state.instances if typed and one.instance_id.startswith(typed)]
    if not instances:
        advice = f"place it with `ullage place {typed}`, or see `ullage status`"
        raise CommandError(f"nothing called {typed!r} is placed: {advice}", ExitCode.NOT_FOUND, reason="NOT_RUNNING")
    # The newest last: the state has them by their ids.
    instances = sorted(instances, key=lambda one: one.placed_at_sequence)
    running = [one for one in instances if one.state == model_pb2.INSTANCE_STATE_RUNNING]
    if not running:
        raise CommandError(_nothing_runs(typed, instances[-1]), ExitCode.NOT_FOUND, reason="NOT_RUNNING")
    if len({one.spec.model_id for one in running}) > 1:
        meant = ", ".join(one.instance_id for one in running)
        raise CommandError(f"{typed!r} may be any of {meant}: type more of the model's name", ExitCode.USAGE)
    return running[-1], _first_runner(state, running[-1])


def _nothing_runs(typed: str, latest: model_pb2.Instance) -> str:
    state_name = model_pb2.InstanceState.Name(latest.state).removeprefix("INSTANCE_STATE_")
    because = f", because {latest.failure}" if latest.failure else ""
    return (
        f"no instance of {typed!r} is running ({latest.instance_id} is {state_name}{because}): "
        f"place it with `ullage place {latest.spec.model_id}`, or see `ullage status`"
    )


def _first_runner(state: state_pb2.ClusterState, instance: model_pb2.Instance) -> str:
    node_id = instance.placement.shards[0].node_id
    return next(node.runner.address for node in state.nodes if node.identity.node_id == node_id)


@dataclass
class _Answer:
    """All that came of an answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[runner_service_pb2.TokenLogprob] = field(default_factory=list)
    summary: runner_service_pb2.GenerationSummary = field(default_factory=runner_service_pb2.GenerationSummary)

    def add(self, response: runner_service_pb2.GenerateResponse) -> None:
        self.text += response.text
        self.token_ids += response.token_ids
        self.logprobs += response.logprobs
        if response.HasField("summary"):
            self.summary = response.summary


def _ask(master: Master, address: str, request: runner_service_pb2.GenerateRequest, *, as_json: bool) -> None:
    failure = f"the runner at {address} does not answer: is its node up? See `ullage status`"
    answer = _Answer()
    try:
        with connection.channel_to(address, failure=failure) as channel:
            call: Any = runner_service_pb2_grpc.RunnerServiceStub(channel).Generate(request)
            for response in _responses(master, request.instance_id, call):
                answer.add(response)
                if not as_json:
                    print(response.text, end="", flush=True)
    except BaseException:
        if answer.text and not as_json:
            # What is said next, by whomever, is not the end of the answer's last line.
            print(flush=True)
        raise
    if as_json:
        print(json.dumps(_as_json(request.instance_id, answer)), flush=True)
    else:
        print(flush=True)
        errors_console().print(_summary_text(answer.summary))


def _responses(master: Master, instance_id: str, call: Any) -> Iterator[runner_service_pb2.GenerateResponse]:
    """What `call` brings. Raises CommandError when the instance is over and its runner does not say so itself."""
    with watched(master, instance_id, call) as watch:
        try:
            yield from call
        except grpc.RpcError:
            if call.code() != grpc.StatusCode.CANCELLED or watch.over is None:
                raise
            name = model_pb2.InstanceState.Name(watch.over.state).removeprefix("INSTANCE_STATE_")
            message = watch.over.failure or f"{instance_id} was released"
            raise CommandError(message, ExitCode.UNAVAILABLE, reason=f"INSTANCE_{name}") from None


def _as_json(instance_id: str, answer: _Answer) -> dict[str, Any]:
    body = {
        "instance_id": instance_id,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "summary": _message(answer.summary),
    }
    if answer.logprobs:
        body["logprobs"] = [_message(each) for each in answer.logprobs]
    return body


def _message(message: Message) -> dict[str, Any]:
    return json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )


def _summary_text(summary: runner_service_pb2.GenerationSummary) -> str:
    ended = runner_service_pb2.FinishReason.Name(summary.finish_reason).removeprefix("FINISH_REASON_").lower()
    text = (
        f"{summary.prompt_tokens} tokens read in {summary.prefill_seconds:.2f} s, "
        f"{summary.generated_tokens} written in {summary.decode_seconds:.2f} s"
    )
    if summary.decode_seconds > 0 and summary.generated_tokens > 1:
        text += f" ({summary.generated_tokens / summary.decode_seconds:.1f} per second)"
    return f"{text}; ended by {ended}; seed {summary.seed}"
