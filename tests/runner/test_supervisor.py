"""A supervisor over real processes that misbehave."""

from __future__ import annotations

import dataclasses
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from services.runner.supervisor import Bounds, ShardSupervisor
from tests.clocks import FakeClock
from tests.runner.fake_shard import GROWN_BYTES, STEPS, TOTAL_BYTES
from tests.runner.told import MakeAssignment, MakeWorkshop, Told, pass_by, shard_processes, until
from ullage.v1 import model_pb2, node_pb2


async def test_a_shard_is_started_loaded_and_unloaded_and_gives_back_its_memory(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told, short_folder: Path
) -> None:
    shard = ShardSupervisor(assignment(), 2, 1, workshop("runs"))
    running = await told.until("RUNNING")
    assert running.node_id == "n1"
    assert running.resident_bytes > 1 << 20

    shard.stop()
    await shard.wait()

    assert told.phases == ["STARTING", "CONNECTING", "LOADING", "RUNNING", "UNLOADED"]
    assert told.statuses[-1].resident_bytes == 0
    assert shard.ended
    assert shard_processes() == []
    assert list(short_folder.iterdir()) == []  # noqa: ASYNC240 - nothing else runs here


async def test_weights_are_held_as_the_placement_says_where_it_says_so(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    placed = assignment()
    placed.shard.weight_form = node_pb2.WEIGHT_FORM_AS_STORED
    shard = ShardSupervisor(placed, 1, 1, workshop("runs"))
    await told.until("RUNNING")

    command = shard_processes()[0].cmdline()
    assert command[command.index("--weights") + 1] == "stored"
    shard.stop()
    await shard.wait()


async def test_a_crash_is_told_with_its_exit_code_phase_and_last_words(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    shard = ShardSupervisor(assignment(), 1, 1, workshop("crashes-loading"))
    await told.until("LOADING")
    shard_processes()[0].send_signal(signal.SIGUSR1)
    await shard.wait()

    failure = told.statuses[-1].failure
    assert failure.message == "its process ended: exit code 134 (SIGABRT)"
    assert failure.exit_code == 134
    assert failure.phase == model_pb2.SHARD_PHASE_LOADING
    assert failure.stderr_lines == ["loading layer 7", "check failed: status", "aborted"]


@pytest.mark.parametrize(("phase", "done_bytes"), [("CONNECTING", 0), ("LOADING", TOTAL_BYTES)])
async def test_a_phase_without_progress_fails_within_its_bound(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told, phase: str, done_bytes: int
) -> None:
    clock = FakeClock()
    shard = ShardSupervisor(assignment(), 1, 1, workshop(f"stalls-{phase.lower()}", clock=clock))
    await told.until_by(clock, phase)
    await until(lambda: shard.status.done_bytes == done_bytes)
    await pass_by(clock, 60.0)
    assert told.phases[-1] == phase
    clock.advance(1.0)
    await shard.wait()

    failure = told.statuses[-1].failure
    assert failure.message == "no progress for 60 s"
    assert failure.phase == model_pb2.ShardPhase.Value(f"SHARD_PHASE_{phase}")
    assert shard_processes() == []


async def test_a_slow_shard_that_gets_on_is_left_in_peace(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    # Six steps of 50 s: longer in all than the bound, each shorter.
    clock = FakeClock()
    shard = ShardSupervisor(assignment(), 1, 1, workshop("slow", clock=clock))
    await told.until_by(clock, "LOADING")
    (process,) = shard_processes()

    def has_done(steps: int) -> bool:
        return shard.status.done_bytes == steps * TOTAL_BYTES // STEPS

    for steps in range(STEPS + 1):
        await until(partial(has_done, steps))
        await pass_by(clock, 50.0)
        process.send_signal(signal.SIGUSR1)
    await told.until("RUNNING")

    assert told.phases == ["STARTING", "CONNECTING", "LOADING", "RUNNING"]
    shard.stop()
    await shard.wait()


async def test_a_process_that_dies_before_it_answers_says_why(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    await ShardSupervisor(assignment(), 1, 1, workshop("dies-at-start")).wait()

    assert told.phases == ["STARTING", "FAILED"]
    assert told.statuses[-1].failure.phase == model_pb2.SHARD_PHASE_STARTING
    assert told.statuses[-1].failure.stderr_lines[-1] == "aborted"


async def test_a_process_that_never_answers_fails_within_its_bound(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    await ShardSupervisor(assignment(), 1, 1, workshop("never-listens", Bounds(start_seconds=0.3))).wait()

    assert told.statuses[-1].failure.message == "its process did not answer within 0.3 s"


async def test_a_command_that_is_not_there_is_a_failure_of_the_shard(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told, short_folder: Path
) -> None:
    shop = workshop("runs")
    absent = dataclasses.replace(shop, command=(str(short_folder / "absent"),))
    await ShardSupervisor(assignment(), 1, 1, absent).wait()

    assert told.statuses[-1].failure.message.startswith("its process could not be started: ")


async def test_what_the_process_says_of_its_failure_is_passed_on(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    await ShardSupervisor(assignment(), 1, 1, workshop("fails")).wait()

    failure = told.statuses[-1].failure
    assert (failure.message, failure.blamed_rank) == ("rank 1 does not answer", 1)
    assert not failure.HasField("exit_code")
    assert shard_processes() == []


async def test_noise_on_its_outputs_does_no_harm(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    shard = ShardSupervisor(assignment(), 1, 1, workshop("noisy"))
    await told.until("RUNNING")
    os.kill(shard_processes()[0].pid, signal.SIGKILL)
    await shard.wait()

    failure = told.statuses[-1].failure
    assert failure.message == "its process ended: killed by SIGKILL"
    assert failure.stderr_lines[-1] == "last words"
    assert len(failure.stderr_lines[0]) == 8 * 1024


@pytest.mark.parametrize(("behaviour", "phase"), [("runs", "RUNNING"), ("stalls-loading", "LOADING")])
async def test_a_stopped_process_is_found_out_and_killed_in_whatever_phase(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told, behaviour: str, phase: str
) -> None:
    shard = ShardSupervisor(assignment(), 1, 1, workshop(behaviour, Bounds(stopped_seconds=0.5)))
    await told.until(phase)
    os.kill(shard_processes()[0].pid, signal.SIGSTOP)
    await shard.wait()

    failure = told.statuses[-1].failure
    assert failure.message == "its process has been stopped by a signal for 0.5 s"
    assert failure.phase == model_pb2.ShardPhase.Value(f"SHARD_PHASE_{phase}")
    assert shard_processes() == []


QUICK = Bounds(check_period_seconds=0.1, stuck_seconds=1.0, answer_seconds=30.0)


async def test_a_process_that_neither_answers_nor_works_is_stuck(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    await ShardSupervisor(assignment(), 1, 1, workshop("deaf", QUICK)).wait()

    assert told.statuses[-1].failure.message == "its process has neither answered nor done anything for 1 s"


async def test_a_process_that_does_not_answer_since_it_works_is_only_slow(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    clock = FakeClock()
    shard = ShardSupervisor(assignment(), 1, 1, workshop("deaf-at-work", QUICK, clock))
    await told.until_by(clock, "RUNNING")
    (process,) = shard_processes()

    def has_worked(seconds: float) -> bool:
        return process.cpu_times().user >= seconds

    for _ in range(7):
        # However long it waits for a processor, it has worked by the time the clock goes on.
        await until(partial(has_worked, process.cpu_times().user + 0.1))
        await pass_by(clock, 0.5)
        assert told.phases[-1] == "RUNNING"
    shard.stop()
    await shard.wait()

    assert told.phases[-1] == "UNLOADED"


async def test_a_process_that_works_and_never_answers_has_its_bound_too(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    bounds = Bounds(check_period_seconds=0.1, stuck_seconds=10.0, answer_seconds=1.0)
    await ShardSupervisor(assignment(), 1, 1, workshop("deaf-at-work", bounds)).wait()

    assert told.statuses[-1].failure.message == "its process has not answered for 1 s"


async def test_a_shard_over_its_promise_is_told_as_that_and_its_end_tells_what_came_back(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    promised = assignment()
    promised.shard.bytes.total_bytes = 100 << 20
    shard = ShardSupervisor(promised, 1, 1, workshop("grows"))
    # Seen whole: while it grows it is over its promise already.
    await told.until_true(lambda: told.statuses[-1].resident_bytes >= GROWN_BYTES)
    over = told.statuses[-1]
    assert over.over_grant_bytes == over.resident_bytes - (100 << 20)

    shard.stop()
    await shard.wait()

    assert told.statuses[-1].returned_bytes >= GROWN_BYTES
    assert told.statuses[-1].resident_bytes == 0


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    shard = ShardSupervisor(assignment(), 1, 1, workshop("will-not-end", Bounds(terminate_seconds=0.2)))
    await told.until("RUNNING")
    shard.stop()
    await shard.wait()

    assert told.phases[-1] == "UNLOADED"
    assert shard_processes() == []


async def test_a_shard_stopped_while_it_starts_is_unloaded_and_not_failed(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    shard = ShardSupervisor(assignment(), 1, 1, workshop("never-listens"))
    await until(lambda: shard_processes() != [])
    shard.stop()
    await shard.wait()

    assert told.phases == ["STARTING", "UNLOADED"]


async def test_a_runner_that_stops_fails_its_shards_with_the_reason(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    shard = ShardSupervisor(assignment(), 1, 1, workshop("runs"))
    await told.until("RUNNING")
    shard.stop("its runner was stopped")
    await shard.wait()

    assert told.statuses[-1].failure.message == "its runner was stopped"
    assert told.statuses[-1].failure.phase == model_pb2.SHARD_PHASE_RUNNING


async def test_a_model_that_is_not_here_fails_the_shard_before_any_process(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    other = assignment()
    other.model.model_id = "other"
    await ShardSupervisor(other, 1, 1, workshop("runs")).wait()

    assert told.phases == ["STARTING", "FAILED"]
    assert "ullage models add" in told.statuses[-1].failure.message


async def test_a_model_id_that_leads_out_of_the_models_folder_is_refused(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    outside = assignment()
    outside.model.model_id = "../tiny"
    await ShardSupervisor(outside, 1, 1, workshop("runs")).wait()

    assert told.statuses[-1].failure.message == "'../tiny' cannot be the name of a model's folder"


async def test_the_requests_a_shard_serves_are_passed_on_as_facts(
    workshop: MakeWorkshop, assignment: MakeAssignment, told: Told
) -> None:
    shard = ShardSupervisor(assignment(), 1, 1, workshop("generates"))
    await told.until("RUNNING")
    await told.until_true(lambda: any(fact.HasField("generation_finished") for fact in told.facts))

    (finished,) = (fact.generation_finished for fact in told.facts if fact.HasField("generation_finished"))
    assert finished.generated_tokens == 5
    shard.stop()
    await shard.wait()
