import errno
import importlib.metadata
import io
import json
import os
import subprocess
import sys

import grpc
import pytest

from services import rpc
from services.cli.__main__ import run
from tests.cli.canned import CannedMaster, CannedRunner, instance, node
from tests.cli.conftest import Serve, Ullage
from ullage.v1 import event_pb2, model_pb2, runner_service_pb2, runner_service_pb2_grpc, state_pb2

RUNNING = instance("i-123", model_pb2.INSTANCE_STATE_RUNNING, model_pb2.SHARD_PHASE_RUNNING)
LOADING = instance("i-123", model_pb2.INSTANCE_STATE_LOADING, model_pb2.SHARD_PHASE_LOADING)


@pytest.fixture(autouse=True)
def two_nodes(master: CannedMaster) -> None:
    master.state.nodes.extend([node("aaaa-1", "node-1"), node("bbbb-2", "node-2")])
    master.instance.CopyFrom(RUNNING)


def test_without_a_master_a_command_says_how_to_get_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--master", "127.0.0.1:1"]) == 5
    assert "no master answers at 127.0.0.1:1: start one with `ullage up`" in capsys.readouterr().err


def test_the_version_is_told_where_people_look_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    for asked in (["--version"], ["version"]):
        assert run(asked) == 0
        assert capsys.readouterr().out == f"{importlib.metadata.version('ullage')}\n"
    assert run(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"version": importlib.metadata.version("ullage")}


def test_status_shows_what_each_node_can_give_and_what_its_shards_hold(ullage: Ullage, master: CannedMaster) -> None:
    master.state.nodes[0].memory.own_bytes = 300 * 2**20
    said = ullage("status")
    assert said.code == 0
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[1] == ["node-1", "live", "NORMAL", "512", "MiB", "0", "B", "0", "B", "300", "MiB", "127.0.0.1:1"]


def test_status_tells_of_each_gpu_whose_its_memory_is(ullage: Ullage, master: CannedMaster) -> None:
    master.state.nodes[0].system.gpus.add(
        name="RTX 4070",
        memory_total_bytes=12 * 2**30,
        memory_available_bytes=11 * 2**30,
        usage_pct=35.4,
        power_watts=88,
    )
    master.state.nodes[0].system.gpus.add(name="GB10", unified=True)
    master.state.nodes[0].system.gpus.add(name="silent")
    assert ullage("status").out.splitlines()[-3:] == [
        "node-1: RTX 4070, 11.0 GiB of 12.0 GiB free, 35 %, 88 W",
        "node-1: GB10, its memory is the node's",
        "node-1: silent, unknown of unknown free",
    ]


def test_status_tells_slow_from_stuck_by_the_masters_clock(ullage: Ullage, master: CannedMaster) -> None:
    master.state.instances.append(LOADING)
    master.state.recorded_at.seconds = 100
    moved = event_pb2.RecordedEvent(sequence=5)
    moved.recorded_at.seconds = 58
    master.events.append(moved)
    said = ullage("status")
    assert "i-123: last progress 42 s ago" in said.out
    assert list(master.listings[0].filter.instance_ids) == ["i-123"]


def test_status_warns_of_a_shard_that_holds_more_than_it_was_promised(ullage: Ullage, master: CannedMaster) -> None:
    master.state.instances.append(RUNNING)
    master.state.instances[0].shards[1].over_grant_bytes = 80 * 2**20
    said = ullage("status")
    assert "i-123: rank 1 holds 80.0 MiB more than it was promised; new requests wait until it does not" in said.out


def test_json_is_the_answer_alone(ullage: Ullage) -> None:
    said = ullage("status", "--json")
    assert json.loads(said.out)["state"]["nodes"][0]["promised_bytes"] == "0"
    assert said.err == ""


def test_state_names_its_sequence_and_its_hash(ullage: Ullage) -> None:
    said = ullage("state", "--at", "0")
    assert said.out.startswith("sequence 0 of 7, before anything was recorded\nhash abc\n")


def test_a_past_in_which_the_clock_was_set_back_is_not_called_a_mistake_of_whoever_asks(
    ullage: Ullage, master: CannedMaster
) -> None:
    for sequence, seconds in ((1, 7200), (2, 3600)):
        event = event_pb2.RecordedEvent(sequence=sequence)
        event.recorded_at.FromSeconds(seconds)
        master.events.append(event)
    said = ullage("replay")
    assert said.code == 1
    assert "clock was set back in between" in said.err
    said = ullage("replay", "--from", "2", "--to", "1")
    assert said.code == 2
    assert "1 is before 2: give --from the earlier sequence" in said.err


def test_place_shows_the_layers_of_each_node_and_waits_until_it_runs(ullage: Ullage, master: CannedMaster) -> None:
    master.changes.extend([LOADING, RUNNING])
    said = ullage("place", "m", "--context", "1024", "--exclude", "node-2", "--layers", "aaaa=12")
    assert said.code == 0
    assert "m is placed as i-123" in said.out
    row = next(line for line in said.out.splitlines() if "node-1" in line)
    assert row.split() == [
        "0",
        "node-1",
        "0-9",
        "100",
        "MiB",
        "-",
        "-",
        "1.0",
        "MiB",
        "-",
        "-",
        "101",
        "MiB",
        "WARNING",
        "0.6",
    ]
    assert said.err.splitlines()[-2:] == ["rank 0 on node-1: RUNNING", "rank 1 on node-2: RUNNING"]
    spec = master.specs[0]
    assert (spec.context_tokens, list(spec.exclude_node_ids)) == (1024, ["bbbb-2"])
    assert [(fixed.node_id, fixed.layers) for fixed in spec.fixed_layers] == [("aaaa-1", 12)]


def test_a_placement_that_fails_while_loading_ends_with_its_failure_and_stderr(
    ullage: Ullage, master: CannedMaster
) -> None:
    failed = instance("i-123", model_pb2.INSTANCE_STATE_FAILED, model_pb2.SHARD_PHASE_FAILED)
    failed.failure = "rank 1 on node-2 failed while LOADING: gone"
    failed.shards[1].failure.stderr_lines.append("Killed")
    master.changes.append(failed)
    said = ullage("place", "m")
    assert said.code == 1
    assert said.err.endswith("error (INSTANCE_FAILED): rank 1 on node-2 failed while LOADING: gone\n  Killed\n")


def test_a_dry_run_reserves_nothing_and_its_refusal_is_exit_code_3(ullage: Ullage, master: CannedMaster) -> None:
    assert "nothing is reserved" in ullage("place", "m", "--dry-run").out
    master.refusal = model_pb2.Refusal(
        reason=model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY, message="m needs 1.00 GiB, 2 nodes offer 0.50 GiB"
    )
    said = ullage("place", "m", "--dry-run")
    assert (said.code, said.out) == (3, "")
    assert said.err == "refused (INSUFFICIENT_MEMORY): m needs 1.00 GiB, 2 nodes offer 0.50 GiB\n"


def test_a_refused_place_carries_its_proof_in_json(ullage: Ullage, master: CannedMaster) -> None:
    refusal = model_pb2.Refusal(reason=model_pb2.REFUSAL_REASON_NO_NODES, message="no node has been heard")
    master.error = rpc.RpcError(grpc.StatusCode.UNAVAILABLE, refusal.message, reason="NO_NODES", details=[refusal])
    said = ullage("place", "m", "--json")
    error = json.loads(said.err)["error"]
    assert (said.code, error["exit_code"], error["reason"]) == (3, 3, "NO_NODES")
    assert error["refusal"]["message"] == "no node has been heard"


def test_an_error_of_the_master_keeps_its_words_and_its_reason(ullage: Ullage, master: CannedMaster) -> None:
    master.error = rpc.RpcError(grpc.StatusCode.NOT_FOUND, "no model is called 'x'", reason="UNKNOWN_MODEL")
    said = ullage("place", "x")
    assert (said.code, said.err) == (4, "error (UNKNOWN_MODEL): no model is called 'x'\n")


@pytest.mark.parametrize("layers", ["node-1", "node-1=", "node-1=-1", "node-1=²"])
def test_layers_of_a_node_that_are_no_number_are_wrong_usage(ullage: Ullage, layers: str) -> None:
    said = ullage("place", "m", "--layers", layers)
    assert said.code == 2
    assert f"--layers {layers!r}: write NODE=N, e.g. node-1=12" in said.err


@pytest.mark.parametrize("context", ["0", "-5", "many"])
def test_a_context_that_is_no_positive_number_is_wrong_usage(ullage: Ullage, context: str) -> None:
    said = ullage("place", "m", "--context", context)
    assert said.code == 2
    assert "Invalid value for '--context'" in said.err
    assert "see `ullage place --help`" in said.err


def test_release_takes_every_instance_of_a_model(ullage: Ullage, master: CannedMaster) -> None:
    second = instance("i-456", model_pb2.INSTANCE_STATE_LOADING, model_pb2.SHARD_PHASE_LOADING)
    gone = instance("i-000", model_pb2.INSTANCE_STATE_RELEASED, model_pb2.SHARD_PHASE_UNLOADED)
    master.state.instances.extend([gone, RUNNING, second])
    said = ullage("release", "--model", "m")
    assert said.out == "i-123 RELEASING\ni-456 RELEASING\n"
    assert master.released == ["i-123", "i-456"]


def test_releasing_a_model_twice_is_no_error(ullage: Ullage, master: CannedMaster) -> None:
    master.state.instances.append(instance("i-1", model_pb2.INSTANCE_STATE_RELEASED, model_pb2.SHARD_PHASE_UNLOADED))
    said = ullage("release", "--model", "m", "--json")
    assert (said.code, said.out, said.err) == (0, "", "every instance of m is released already\n")
    said = ullage("release", "--model", "other")
    assert (said.code, said.out) == (4, "")
    assert "no instance of 'other' is placed: see `ullage status`" in said.err


def test_release_needs_an_instance_or_a_model(ullage: Ullage) -> None:
    assert ullage("release").code == 2
    assert ullage("release", "i-999").code == 4


@pytest.fixture
def runner(serve: Serve, master: CannedMaster) -> CannedRunner:
    """A runner on node-1 that answers "Blue sky"; the running instance's first rank is there."""
    summary = runner_service_pb2.GenerationSummary(
        finish_reason=runner_service_pb2.FINISH_REASON_STOP,
        prompt_tokens=9,
        generated_tokens=2,
        prefill_seconds=0.5,
        decode_seconds=0.25,
        seed=7,
    )
    canned = CannedRunner(  # type: ignore[abstract]  # the calls no command makes
        [
            runner_service_pb2.GenerateResponse(text="Blue", token_ids=[4]),
            runner_service_pb2.GenerateResponse(text=" sky", token_ids=[5], summary=summary),
        ]
    )
    address = serve(lambda server: runner_service_pb2_grpc.add_RunnerServiceServicer_to_server(canned, server))
    master.state.nodes[0].runner.address = address
    master.state.instances.append(RUNNING)
    return canned


def test_generate_streams_text_to_stdout_and_its_summary_to_stderr(ullage: Ullage, runner: CannedRunner) -> None:
    said = ullage("generate", "m", "Why?", "--max-tokens", "5", "--stop", "END")
    assert (said.code, said.out) == (0, "Blue sky\n")
    assert said.err == "9 tokens read in 0.50 s, 2 written in 0.25 s (8.0 per second); ended by stop; seed 7\n"
    request = runner.requests[0]
    assert (request.instance_id, request.chat.messages[0].content) == ("i-123", "Why?")
    assert (request.sampling.max_tokens, list(request.sampling.stop)) == (5, ["END"])
    assert not request.sampling.HasField("temperature")


def test_generate_passes_a_raw_prompt_as_it_is_and_gives_tokens_in_json(ullage: Ullage, runner: CannedRunner) -> None:
    said = ullage("generate", "i-1", "Why?", "--raw", "--json")
    assert runner.requests[0].text == "Why?"
    answer = json.loads(said.out)
    assert (answer["text"], answer["token_ids"], answer["summary"]["seed"]) == ("Blue sky", [4, 5], "7")


def test_generate_passes_on_how_to_sample_and_gives_log_probabilities(ullage: Ullage, runner: CannedRunner) -> None:
    runner.responses[0].logprobs.add(token_id=4, logprob=-0.5, text="Blue")
    sampling = ("--top-k", "40", "--min-p", "0.5", "--repetition-penalty", "1.5", "--logprobs", "2")
    said = ullage("generate", "m", "Why?", "--json", *sampling)
    asked = runner.requests[0].sampling
    assert (asked.top_k, asked.min_p, asked.repetition_penalty, asked.logprobs) == (40, 0.5, 1.5, 2)
    assert [(one["token_id"], one["logprob"]) for one in json.loads(said.out)["logprobs"]] == [(4, -0.5)]


def test_generate_ends_with_the_masters_word_when_the_runner_itself_is_silent(
    ullage: Ullage, runner: CannedRunner, master: CannedMaster
) -> None:
    runner.responses, runner.is_stopped = runner.responses[:1], True
    failed = instance("i-123", model_pb2.INSTANCE_STATE_FAILED, model_pb2.SHARD_PHASE_FAILED)
    failed.failure = "rank 0 on node-1 failed while RUNNING: its runner has not been heard for 4 s"
    master.changes.append(failed)
    said = ullage("generate", "m", "Why?")
    assert said.code == 5
    assert said.err == f"error (INSTANCE_FAILED): {failed.failure}\n"


def test_generate_says_what_to_do_when_nothing_runs(ullage: Ullage, master: CannedMaster) -> None:
    said = ullage("generate", "m", "Why?")
    assert said.code == 4
    assert "nothing called 'm' is placed: place it with `ullage place m`" in said.err
    master.state.instances.append(LOADING)
    said = ullage("generate", "m", "Why?")
    assert said.code == 4
    assert "no instance of 'm' is running (i-123 is LOADING)" in said.err


def test_generate_says_why_what_was_placed_does_not_run(ullage: Ullage, master: CannedMaster) -> None:
    failed = instance("i-123", model_pb2.INSTANCE_STATE_FAILED, model_pb2.SHARD_PHASE_FAILED)
    failed.failure = "rank 0 on node-1 failed while LOADING: m has no tokenizer.json"
    master.state.instances.append(failed)
    said = ullage("generate", "m", "Why?")
    assert f"no instance of 'm' is running (i-123 is FAILED, because {failed.failure}): place it" in said.err


def test_generate_asks_and_speaks_of_what_was_placed_last(
    ullage: Ullage, runner: CannedRunner, master: CannedMaster
) -> None:
    # The state has them by their ids.
    master.state.instances.extend([RUNNING, RUNNING])
    for one, (instance_id, sequence) in zip(
        master.state.instances, [("i-100", 7), ("i-123", 9), ("i-456", 5)], strict=True
    ):
        one.instance_id, one.placed_at_sequence = instance_id, sequence
    ullage("generate", "m", "Why?")
    assert runner.requests[0].instance_id == "i-123"
    for one in master.state.instances:
        one.state = model_pb2.INSTANCE_STATE_FAILED
    assert "(i-123 is FAILED)" in ullage("generate", "m", "Why?").err


def test_generate_asks_no_model_that_was_not_meant(ullage: Ullage, runner: CannedRunner, master: CannedMaster) -> None:
    other = instance("i-456", model_pb2.INSTANCE_STATE_RUNNING, model_pb2.SHARD_PHASE_RUNNING)
    other.spec.model_id = "other"
    master.state.instances.append(other)
    said = ullage("generate", "i", "Why?")
    assert said.code == 2
    assert "'i' may be any of i-123, i-456: type more of the model's name" in said.err
    assert ullage("generate", "i-1", "Why?").code == 0
    assert ullage("generate", "", "Why?").code == 4


def test_what_came_of_an_answer_ends_its_line_before_the_failure(
    ullage: Ullage, runner: CannedRunner, master: CannedMaster
) -> None:
    runner.responses, runner.is_stopped = runner.responses[:1], True
    master.changes.append(instance("i-123", model_pb2.INSTANCE_STATE_RELEASED, model_pb2.SHARD_PHASE_UNLOADED))
    assert ullage("generate", "m", "Why?").out == f"{runner.responses[0].text}\n"


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "m", "Why?", "--seed"),
        ("generate", "m", "Why?", "--max-tokens"),
        ("generate", "m", "Why?", "--top-k"),
        ("generate", "m", "Why?", "--logprobs"),
        ("place", "m", "--context"),
        ("place", "m", "--sequences"),
        ("place", "m", "--min-nodes"),
        ("place", "m", "--prompt"),
        ("events", "--from"),
        ("events", "--follow", "--from"),
        ("state", "--at"),
        ("diff", "1"),
        ("whatif", "m", "--at"),
        ("replay", "--from"),
    ],
)
def test_a_number_that_no_request_can_hold_is_wrong_usage(command: tuple[str, ...], ullage: Ullage) -> None:
    said = ullage(*command, str(2**64))
    assert said.code == 2
    assert said.err == f"error (USAGE): {2**64} is a larger number than any request can hold: name a smaller one\n"


def test_a_limit_of_events_may_be_any_number(ullage: Ullage, master: CannedMaster) -> None:
    master.events.extend(numbered(3))
    assert sequences(ullage("events", "--limit", str(2**64)).out) == [1, 2, 3]


@pytest.mark.parametrize(
    "command", [("generate", "m", "ab\udcff"), ("place", "ab\udcff"), ("status", "--master", "ab\udcff")]
)
def test_bytes_that_are_no_text_are_wrong_usage(command: tuple[str, ...], ullage: Ullage, runner: CannedRunner) -> None:
    # As Python hands over the byte 0xff of a command line.
    said = ullage(*command)
    assert said.code == 2
    assert said.err == "error (USAGE): the text given is no UTF-8 from its character 3 on: write it in UTF-8\n"


def test_a_prompt_from_stdin_that_is_no_text_is_wrong_usage(
    ullage: Ullage, runner: CannedRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    said = ullage("generate", "m", "-")
    assert said.code == 2
    assert said.err == "error (USAGE): stdin is no UTF-8 from its byte 3 on: write it in UTF-8\n"


class FullDisk(io.StringIO):
    """What stdout goes to where a disk is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_behind_stdout_is_an_error_of_one_line(ullage: Ullage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", FullDisk())
    said = ullage("status", "--json")
    assert said.code == 1
    assert json.loads(said.err)["error"]["message"] == f"the output cannot be written: {os.strerror(errno.ENOSPC)}"


def test_a_terminal_that_lacks_a_character_shows_its_number(runner: CannedRunner, master_address: str) -> None:
    runner.responses[0].text = "\N{THUMBS UP SIGN}"
    environment = {**os.environ, "ULLAGE_MASTER": master_address, "PYTHONIOENCODING": "latin-1"}
    for options, shown in (((), r"\U0001f44d"), (("--json",), r'"text": "\ud83d\udc4d')):
        command = [sys.executable, "-m", "services.cli", "generate", "m", "Why?", *options]
        said = subprocess.run(command, env=environment, capture_output=True, check=True)
        assert shown in said.stdout.decode("latin-1")


def numbered(count: int) -> list[event_pb2.RecordedEvent]:
    return [event_pb2.RecordedEvent(sequence=sequence) for sequence in range(1, count + 1)]


def sequences(out: str) -> list[int]:
    return [int(line.split()[0]) for line in out.splitlines()]


def test_events_shows_the_newest_hundred_in_order(ullage: Ullage, master: CannedMaster) -> None:
    master.events.extend(numbered(250))
    assert sequences(ullage("events").out) == list(range(151, 251))
    assert sequences(ullage("events", "--limit", "2").out) == [249, 250]


def test_events_from_a_sequence_goes_on_page_by_page_to_the_end(ullage: Ullage, master: CannedMaster) -> None:
    master.events.extend(numbered(2100))
    assert sequences(ullage("events", "--from", "50").out) == list(range(50, 2101))
    assert len(master.listings) == 3


def test_events_follows_until_the_limit(ullage: Ullage, master: CannedMaster) -> None:
    master.events.extend(numbered(5))
    said = ullage("events", "--follow", "--limit", "3", "--json")
    assert [json.loads(line)["sequence"] for line in said.out.splitlines()] == ["1", "2", "3"]


def test_an_unknown_kind_of_event_is_wrong_usage_and_the_kinds_are_named(ullage: Ullage) -> None:
    said = ullage("events", "--kind", "memory")
    assert said.code == 2
    assert "no kind is called 'memory': there is master_started, node_announced, memory_sampled" in said.err


def test_a_node_that_never_announced_itself_is_shown_by_the_beginning_of_its_id(
    ullage: Ullage, master: CannedMaster
) -> None:
    master.state.nodes.append(state_pb2.NodeView())
    master.state.nodes[-1].identity.node_id = "0123456789abcdef"
    row = ullage("status").out.splitlines()[1].split()
    assert row == ["01234567", "unknown", "UNKNOWN", "unknown", "0", "B", "0", "B", "unknown", "none"]
