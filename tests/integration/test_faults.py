"""Ranks that are killed, stopped or starved, in every phase: told within the bound, cleaned up, and got over.

Here runs a choice of the combinations; `pytest -m faults` runs them all.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from services.cli.failure import ExitCode
from tests.integration.cluster import HANG_SECONDS, IMPATIENT, ULLAGE, Cluster, eventually
from tests.integration.pace import Moment
from tests.integration.ring import BOUND_SECONDS, LONG_ANSWER_TOKENS, LONG_PROMPT, MODEL, PHASES, Answer, Ring

pytestmark = pytest.mark.model

LATE_SECONDS: Final = 0.25
"""What may come to a stop of two seconds: a shard stopped for three is given up, by looks half a second apart."""

KV_BYTES_MIN: Final = 16 << 20
"""Of a long prompt's 800 tokens, at 23 kB each on a rank with half the layers."""

LOAD_BYTES_MAX: Final = 150 << 20
"""Less than half of what a shard with half the layers holds."""

LAYERS: Final = {"node-1": 15, "node-2": 15}
NAMES: Final = tuple(LAYERS)

UNHEARD: Final = r"its runner has not been heard for \d+ s"

FAULTS: Final = ("killed", "stopped", "runner killed", "runner stopped")
RANKS: Final = (0, 1)

CHOICE: Final = (
    ("killed", "decode", 1),
    ("stopped", "prefill", 1),
    ("killed", "load", 0),
    ("runner killed", "decode", 1),
)
OTHERS: Final = tuple(case for case in itertools.product(FAULTS, PHASES, RANKS) if case not in CHOICE)


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Iterator[Ring]:
    """A master and two nodes with the model over both of them, placed again after each fault."""
    cluster = Cluster(tmp_path_factory.mktemp("faults"), smollm2_folder.parent, IMPATIENT)
    try:
        cluster.start_master()
        cluster.ullage("models", "add", MODEL)
        addresses = {}
        for name in NAMES:
            cluster.start_probe(name, "--memory", "1500MiB")
            addresses[name] = cluster.start_runner(name)
        cluster.wait_until_known(NAMES)
        ring = Ring(cluster, addresses)
        yield ring
        ring.close()
    finally:
        cluster.stop()


@pytest.fixture
def running(ring: Ring) -> Iterator[Ring]:
    """The model, running, and running again after whatever the test did to it."""
    if not ring.is_running:
        ring.place_and_run(LAYERS)
    yield ring
    ring.place_and_run(LAYERS)
    ring.answers()


def strike(ring: Ring, fault: str, rank: int) -> tuple[Moment, Callable[[], None]]:
    """Do it to the rank: when, and what makes its node whole again."""
    name = ring.name_of(rank)
    label = f"{name}-runner"
    runner = ring.cluster.processes[label]
    match fault:
        case "killed":
            process = ring.shard(rank)
            now = Moment()
            process.kill()
            return now, lambda: None
        case "stopped":
            process = ring.shard(rank)
            now = Moment()
            process.suspend()
            return now, lambda: resume(process)
        case "runner killed":
            now = Moment()
            ring.cluster.kill(label)
            return now, lambda: start_again(ring, name)
        case _:
            now = Moment()
            runner.send_signal(signal.SIGSTOP)
            return now, lambda: runner.send_signal(signal.SIGCONT)


def resume(process: psutil.Process) -> None:
    """SIGCONT, to one that is ended as it is."""
    eventually("a stopped process is not left", lambda: not process.is_running())


def start_again(ring: Ring, name: str) -> None:
    ring.addresses[name] = ring.cluster.start_runner(name)


def hold(ring: Ring, fault: str, phase: str, rank: int) -> None:
    answer = ring.reach(phase, rank, LAYERS)
    since, mend = strike(ring, fault, rank)
    try:
        failure = ring.failed(since)
        assert_named(ring, failure, rank)
        if answer is not None and not (fault == "runner stopped" and rank == 0):
            # Who talks to a stopped runner itself hears nothing: nobody is there to tell it.
            answer.ended_by(since)
            assert answer.error is not None
            assert f"rank {rank}" in answer.details or fault == "runner killed"
    finally:
        mend()
    ring.everything_is_gone()


def assert_named(ring: Ring, failure: str, rank: int) -> None:
    """Which rank it was, on which node, and in which phase whoever says so was."""
    assert f"rank {rank}" in failure
    assert ring.name_of(rank) in failure or ring.node_id(ring.name_of(rank)) in failure
    assert any(f"while {phase}: " in failure for phase in ("STARTING", "CONNECTING", "LOADING", "RUNNING"))


@pytest.mark.parametrize(("fault", "phase", "rank"), CHOICE)
def test_a_rank_lost_is_told_within_five_seconds_and_got_over(running: Ring, fault: str, phase: str, rank: int) -> None:
    hold(running, fault, phase, rank)


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "phase", "rank"), OTHERS)
def test_a_rank_lost_in_any_way_and_phase_is_told_within_five_seconds_and_got_over(
    running: Ring, fault: str, phase: str, rank: int
) -> None:
    hold(running, fault, phase, rank)


def test_a_shard_stopped_for_two_seconds_is_left_in_peace(ring: Ring) -> None:
    answer = eventually("an answer over a stop of two seconds and not of more", lambda: answer_over_a_stop(ring))

    assert answer.error is None
    assert len(answer.token_ids) == 80


def answer_over_a_stop(ring: Ring) -> Answer | None:
    """An answer that rank 1 was stopped in for two seconds; None where it failed and this machine made them more."""
    if not ring.is_running:
        ring.place_and_run(LAYERS)
    process = ring.shard(1)
    answer = ring.ask(tokens=80)
    answer.has_tokens(3)
    stopped, stopped_at = Moment(), time.monotonic()
    process.suspend()
    time.sleep(2.0)
    process.resume()
    slept_seconds = time.monotonic() - stopped_at
    answer.wait()
    waited_seconds = time.monotonic() - stopped_at - stopped.age_seconds
    if answer.error is not None and max(slept_seconds - 2.0, waited_seconds) > LATE_SECONDS:
        ring.release()
        return None
    return answer


def test_a_client_of_a_runner_that_is_stopped_is_told_by_the_master(ring: Ring) -> None:
    ring.release()
    ring.place_and_run({"node-1": 30})
    runner = ring.cluster.processes["node-1-runner"]
    command = [*ULLAGE, "generate", ring.instance.instance_id, "Once upon a time", "--raw"]
    with subprocess.Popen(
        command, env={**os.environ, **ring.cluster.environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as client:
        assert client.stdout is not None
        # It answers; a thousand tokens are still to come.
        client.stdout.read(10)
        since = Moment()
        runner.send_signal(signal.SIGSTOP)
        try:
            # Nobody but the master can see it, by the probe that goes on.
            failure = ring.failed(since)
            assert re.fullmatch(rf"rank 0 on node-1 failed while RUNNING: {UNHEARD}", failure)
            _, told = client.communicate(timeout=HANG_SECONDS)
            assert since.age_seconds <= 2 * BOUND_SECONDS
        finally:
            runner.send_signal(signal.SIGCONT)
    assert client.returncode == ExitCode.UNAVAILABLE
    assert re.search(UNHEARD, told.decode())
    ring.everything_is_gone()


def test_a_client_that_goes_gives_the_memory_of_its_answer_back_on_every_rank(running: Ring) -> None:
    ranks = [running.shard(rank) for rank in (0, 1)]
    asked_after = int(running.cluster.state()["head_sequence"])

    def resident() -> list[int]:
        return [rank.memory_info().rss for rank in ranks]

    answer = running.ask(LONG_PROMPT, tokens=200)
    answer.has_tokens(2)
    held = resident()
    answer.cancel()
    eventually(
        "every rank gives the memory back",
        lambda: all(then - now > KV_BYTES_MIN for now, then in zip(resident(), held, strict=True)),
    )
    # Not because the answer was over anyway.
    eventually("it is told as cancelled", lambda: "cancelled" in finish_reasons(running.cluster, asked_after))


def finish_reasons(cluster: Cluster, sequence: int) -> list[str]:
    """How generations ended that are told of after this sequence; one from before may be told late."""
    said = cluster.ullage("events", "--from", str(sequence + 1), "--kind", "generation_finished", "--json").stdout
    return [json.loads(line)["fact"]["generation_finished"]["finish_reason"] for line in said.splitlines()]


@pytest.fixture
def memory_group() -> Iterator[Any]:
    """A memory cgroup made for the test, as a function that puts a process into it and limits it."""
    group = Path("/sys/fs/cgroup/memory", f"ullage-test-{time.monotonic_ns()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("memory cgroups (v1) cannot be made here")

    def confine(process: psutil.Process, limit_bytes: int) -> None:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        (group / "cgroup.procs").write_text(str(process.pid))

    yield confine
    eventually("the cgroup is empty", lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


HOG: Final = """
import time
input()
held = []
while True:
    held.append(b"x" * 65536)
    time.sleep(0.01)
"""
"""Takes more and more memory; the kernel kills who holds most, which is a shard."""


@pytest.fixture
def hog() -> Iterator[Any]:
    with subprocess.Popen([sys.executable, "-c", HOG], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()
        # Closing it would write what the process did not live to read.
        process.communicate()


def starve(ring: Ring, phase: str, confine: Any, hog: subprocess.Popen[bytes]) -> tuple[psutil.Process, Answer | None]:
    """Have rank 1 be in this phase with too little memory: its process, and the request under way."""
    if phase == "load":
        return eventually("a shard has too little before it loads", lambda: starved_early(ring, confine)), None
    victim, answer = ring.shard(1), None
    # What a process holds so far is not charged to a group that it enters.
    match phase:
        case "prefill":
            confine(victim, 4 << 20)
            answer = ring.ask(LONG_PROMPT, 4)
        case "decode":
            answer = ring.ask(tokens=LONG_ANSWER_TOKENS)
            answer.has_tokens(3)
            confine(victim, 1 << 20)
        case _:
            confine(victim, 8 << 20)
            confine(psutil.Process(hog.pid), 8 << 20)
            tell(hog)
    return victim, answer


def starved_early(ring: Ring, confine: Any) -> psutil.Process | None:
    """Rank 1, just started, with too little to load; None where it held so much already that what is left may do."""
    ring.release()
    ring.place(LAYERS)
    victim = ring.shard(1)
    confine(victim, LOAD_BYTES_MAX)
    with suppress(psutil.NoSuchProcess):  # It has asked for too much already.
        if victim.memory_info().rss >= LOAD_BYTES_MAX:
            return None
    return victim


def tell(hog: subprocess.Popen[bytes]) -> None:
    """Have it begin."""
    assert hog.stdin is not None
    hog.stdin.write(b"\n")
    hog.stdin.flush()


@pytest.mark.parametrize("phase", ["load", *(pytest.param(phase, marks=pytest.mark.faults) for phase in PHASES[1:])])
def test_a_shard_out_of_memory_is_told_as_that_and_got_over(
    running: Ring, memory_group: Any, hog: subprocess.Popen[bytes], phase: str
) -> None:
    victim, answer = starve(running, phase, memory_group, hog)
    psutil.wait_procs([victim], timeout=HANG_SECONDS)
    failure = running.failed(Moment())
    hog.kill()
    if answer is not None:
        answer.wait()
        assert "rank 1" in answer.details

    assert failure.startswith(f"rank 1 on {running.name_of(1)} failed while ")
    assert failure.endswith(
        "its process ended: killed by SIGKILL: memory ran out, and the kernel killed a process then"
    )
    running.everything_is_gone()
