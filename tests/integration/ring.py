"""A model over the ranks of a cluster, asked over gRPC so that what happens can be timed; and ways to break it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import grpc
import psutil

from services import rpc
from tests.integration.cluster import HANG_SECONDS, Cluster, eventually
from tests.integration.pace import Moment
from ullage.v1 import (
    model_pb2,
    placement_service_pb2,
    placement_service_pb2_grpc,
    runner_service_pb2,
    runner_service_pb2_grpc,
)

MODEL: Final = "smollm2-135m"
CONTEXT_TOKENS: Final = 1024
BOUND_SECONDS: Final = 5.0
"""From a rank's death or stall to the client's and the master's knowing, as pace.py counts."""

LONG_PROMPT: Final = "The lighthouse keeper counted the ships that passed in the night. " * 60
"""Some 800 tokens: seconds of prefill."""

LONG_ANSWER_TOKENS: Final = 1000
"""Under way for so long that it is not over before something is done to it."""

AT_WORK_SECONDS: Final = 0.1
"""On a processor: more than a rank takes that only waits."""

PHASES: Final = ("load", "prefill", "decode", "idle")

_OVER: Final = frozenset({model_pb2.INSTANCE_STATE_FAILED, model_pb2.INSTANCE_STATE_RELEASED})


def dial(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=rpc.CHANNEL_OPTIONS)


class Answer:
    """One request, read on a thread of its own."""

    def __init__(self, address: str, instance_id: str, prompt: str, tokens: int) -> None:
        self.token_ids: list[int] = []
        self.error: grpc.RpcError | None = None
        self.ended: Moment | None = None
        self._channel = dial(address)
        request = runner_service_pb2.GenerateRequest(instance_id=instance_id, text=prompt)
        request.sampling.max_tokens = tokens
        self._call = runner_service_pb2_grpc.RunnerServiceStub(self._channel).Generate(request, timeout=HANG_SECONDS)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for response in self._call:
                self.token_ids += response.token_ids
        except grpc.RpcError as error:
            self.error = error
        self.ended = Moment()

    def has_tokens(self, count: int) -> None:
        eventually(f"{count} tokens", lambda: len(self.token_ids) >= count or self.ended)

    def wait(self) -> None:
        self._thread.join(HANG_SECONDS)
        assert not self._thread.is_alive(), f"the client was told nothing for {HANG_SECONDS:.0f} s"
        self._channel.close()

    def ended_by(self, since: Moment) -> None:
        """Wait for the end, which must come within the bound."""
        self.wait()
        assert self.ended is not None
        took = since.seconds_until(self.ended)
        assert took <= BOUND_SECONDS, f"the client was told only after {took:.1f} s"

    def cancel(self) -> None:
        """Go, as a client does who wants no more."""
        self._call.cancel()
        self.wait()

    @property
    def details(self) -> str:
        """What the client was told."""
        assert isinstance(self.error, grpc.Call), "the answer ended well"
        return self.error.details() or ""


class Ring:
    """The one instance of a cluster."""

    def __init__(self, cluster: Cluster, addresses: dict[str, str]) -> None:
        """`addresses` are the runners', by the names of their nodes."""
        self.cluster = cluster
        self.addresses = addresses
        self.instance = model_pb2.Instance()
        self._channel = dial(cluster.address)
        self._placement = placement_service_pb2_grpc.PlacementServiceStub(self._channel)

    def node_id(self, name: str) -> str:
        return (self.cluster.folder / name / "node_id").read_text().strip()

    def name_of(self, rank: int) -> str:
        """The node that the rank is on."""
        node_id = self.instance.placement.shards[rank].node_id
        return next(name for name in self.addresses if self.node_id(name) == node_id)

    def rank_on(self, name: str) -> int:
        """The rank that the node has."""
        return next(rank for rank in range(len(self.instance.placement.shards)) if self.name_of(rank) == name)

    def close(self) -> None:
        self._channel.close()

    def place(self, layers: Mapping[str, int], *, context_tokens: int = CONTEXT_TOKENS, concurrent: int = 1) -> None:
        """Place the model with these layers on the nodes of these names, once these can take it."""
        # A node that has just come back may not have been heard yet.
        deadline = time.monotonic() + HANG_SECONDS
        while True:
            try:
                self.place_once(layers, context_tokens=context_tokens, concurrent=concurrent)
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def place_once(
        self, layers: Mapping[str, int], *, context_tokens: int = CONTEXT_TOKENS, concurrent: int = 1
    ) -> None:
        """Ask for it once."""
        fixed = [model_pb2.FixedLayers(node_id=self.node_id(name), layers=count) for name, count in layers.items()]
        spec = model_pb2.PlacementSpec(
            model_id=MODEL, context_tokens=context_tokens, concurrent_sequences=concurrent, fixed_layers=fixed
        )
        request = placement_service_pb2.PlaceRequest(spec=spec)
        self.instance = self._placement.Place(request, timeout=HANG_SECONDS).instance

    def place_and_run(self, layers: Mapping[str, int], **asked: int) -> None:
        self.place(layers, **asked)
        self.until(model_pb2.INSTANCE_STATE_RUNNING)

    def release(self) -> None:
        if self.instance.instance_id:
            request = placement_service_pb2.ReleaseRequest(instance_id=self.instance.instance_id)
            self._placement.Release(request, timeout=HANG_SECONDS)
        self.instance = model_pb2.Instance()

    @property
    def is_running(self) -> bool:
        return self.instance.instance_id != "" and self.now().state == model_pb2.INSTANCE_STATE_RUNNING

    def now(self) -> model_pb2.Instance:
        request = placement_service_pb2.GetInstanceRequest(instance_id=self.instance.instance_id)
        return self._placement.GetInstance(request, timeout=HANG_SECONDS).instance

    def changes(self) -> Iterator[model_pb2.Instance]:
        request = placement_service_pb2.WatchInstanceRequest(instance_id=self.instance.instance_id)
        for response in self._placement.WatchInstance(request, timeout=HANG_SECONDS):
            yield response.instance

    def until(self, state: model_pb2.InstanceState.ValueType) -> model_pb2.Instance:
        for instance in self.changes():
            if instance.state == state:
                return instance
            assert instance.state not in _OVER, instance.failure
        raise AssertionError("the instance is no longer watched")

    def place_and_see_loading(self, layers: Mapping[str, int], rank: Callable[[], int]) -> None:
        """Place the model in place of what there is, and return while this rank, asked for then, loads."""

        def seen_loading() -> bool:
            self.release()
            self.place(layers)
            for instance in self.changes():
                phase = instance.shards[rank()].phase
                if phase >= model_pb2.SHARD_PHASE_LOADING:
                    # Whoever looks late is shown what came of it meanwhile, and looks again.
                    return phase == model_pb2.SHARD_PHASE_LOADING
            return False

        eventually("a rank is seen loading", seen_loading)

    def failed(self, since: Moment) -> str:
        """Why the instance failed, once it has; that must be within the bound."""
        failure = ""
        for instance in self.changes():
            if instance.state == model_pb2.INSTANCE_STATE_FAILED:
                failure = instance.failure
                break
        took = since.age_seconds
        assert failure
        assert took <= BOUND_SECONDS, f"FAILED only after {took:.1f} s: {failure}"
        return failure

    def ask(self, prompt: str = "Once upon a time", tokens: int = 8) -> Answer:
        return Answer(self.addresses[self.name_of(0)], self.instance.instance_id, prompt, tokens)

    def answers(self) -> None:
        """It does, now."""
        answer = self.ask()
        answer.wait()
        assert answer.error is None
        assert len(answer.token_ids) == 8

    def reach(self, phase: str, rank: int, layers: Mapping[str, int]) -> Answer | None:
        """Have the rank be in this phase; the request under way, if there is one."""
        match phase:
            case "load":
                self.place_and_see_loading(layers, lambda: rank)
                return None
            case "prefill":
                return eventually("the rank is in the middle of a prompt", lambda: self._amid_prompt(rank))
            case "decode":
                answer = self.ask(tokens=LONG_ANSWER_TOKENS)
                answer.has_tokens(3)
                return answer
            case _:
                return None

    def _amid_prompt(self, rank: int) -> Answer | None:
        """An answer whose prompt the rank computes; None where the tokens came before that was seen."""
        process = self.shard(rank)
        spent_before = _processor_seconds(process)
        answer = self.ask(LONG_PROMPT, 200)

        def at_work() -> bool:
            return _processor_seconds(process) - spent_before > AT_WORK_SECONDS

        eventually("the rank is at work", lambda: at_work() or answer.ended)
        if not answer.token_ids:
            return answer
        answer.cancel()
        return None

    def shard(self, rank: int) -> psutil.Process:
        """The process of this rank."""
        wanted = ["--instance", self.instance.instance_id, "--rank", str(rank)]

        def found() -> psutil.Process | None:
            for process in psutil.Process().children(recursive=True):
                command = _command(process)
                if any(command[i : i + 4] == wanted for i in range(len(command))):
                    return process
            return None

        process = eventually(f"the process of rank {rank}", found)
        assert process is not None
        return process

    def processes(self) -> list[psutil.Process]:
        """Of all the instance's ranks, as far as they are there."""
        children = psutil.Process().children(recursive=True)
        return [child for child in children if self.instance.instance_id in _command(child)]

    def everything_is_gone(self) -> None:
        """No process of the instance is left, hence none of its memory, and the master knows."""
        eventually("every shard's process is gone", lambda: not self.processes())
        gone = {model_pb2.SHARD_PHASE_FAILED, model_pb2.SHARD_PHASE_UNLOADED}
        eventually("the master knows", lambda: all(shard.phase in gone for shard in self.now().shards))


def _processor_seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
