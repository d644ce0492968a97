"""Shards in processes of their own, over real streams: what they answer, and how they fail."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import mlx.core as mx
import pytest

from services.runner.shard import frames, shard_model
from services.runner.shard.architecture import Cut
from tests.runner.shard import tiny_configs, tiny_weights
from tests.runner.shard.ring import ENDLESS_TOKENS, Ring, assignments, children, generate_request, running
from tests.runner.told import WAIT_SECONDS, until
from ullage.v1 import event_pb2, model_pb2, runner_service_pb2

PROMPT = [5, 17, 200, 31, 8, 90, 12, 33]
LONG_PROMPT = [(7 * place) % 250 for place in range(300)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, model_pb2.Model]:
    # No token ends an answer, so that lengths are known.
    folder = tiny_weights.write(tmp_path_factory.mktemp("models") / "tiny", eos_token_id=None)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder, tiny_weights.prepared(folder)


def whole(folder: Path, prompt: list[int], tokens: int) -> list[int]:
    """The likeliest tokens after `prompt`, by the model in one piece in this process."""
    layers = tiny_configs.LAYERS
    model = shard_model.load(folder, Cut(0, layers, layers), "float32", on_cpu=True, progress=lambda *_: None)
    cache = model.new_cache()
    for start in range(0, len(prompt), frames.CHUNK_TOKENS_MAX):
        hidden = model.forward(mx.array(prompt[start : start + frames.CHUNK_TOKENS_MAX]), cache)
    found: list[int] = []
    while True:
        found.append(int(str(mx.argmax(model.scores(hidden)).item())))
        if len(found) == tokens:
            return found
        hidden = model.forward(mx.array(found[-1:]), cache)


@pytest.mark.parametrize("bounds", [(), (1,), (3,), (1, 4)])
async def test_sharded_processes_give_the_tokens_of_the_whole_model(
    bounds: tuple[int, ...], tiny: tuple[Path, model_pb2.Model]
) -> None:
    folder, model = tiny
    async with running(folder, model, *bounds, context_tokens=400) as ring:
        answer = await ring.generate(tokens=PROMPT, max_tokens=64)
        assert answer.token_ids == whole(folder, PROMPT, 64)
        assert answer.summary.generated_tokens == 64
        assert answer.summary.prompt_tokens == len(PROMPT)
        assert answer.summary.finish_reason == runner_service_pb2.FINISH_REASON_LENGTH
        in_chunks = await ring.generate(tokens=LONG_PROMPT, max_tokens=16)
        assert in_chunks.token_ids == whole(folder, LONG_PROMPT, 16)


async def test_the_same_seed_gives_the_same_tokens_at_any_split(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    found = []
    for bounds in ((), (2,)):
        async with running(folder, model, *bounds) as ring:
            for seed in (1, 1, 2):
                answer = await ring.generate(tokens=PROMPT, max_tokens=24, temperature=1.0, top_p=0.9, seed=seed)
                assert answer.summary.seed == seed
                found.append(answer.token_ids)
    assert found[0] == found[1] == found[3] == found[4]
    assert found[2] == found[5] != found[0]


async def test_a_seed_that_was_not_given_is_told_and_repeats_the_answer(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    async with running(folder, model) as ring:
        first = await ring.generate(tokens=PROMPT, max_tokens=16, temperature=1.0)
        again = await ring.generate(tokens=PROMPT, max_tokens=16, temperature=1.0, seed=first.summary.seed)
        assert again.token_ids == first.token_ids


async def test_answers_made_at_once_do_not_disturb_each_other(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    prompts = [PROMPT[place:] + PROMPT[:place] for place in range(4)]
    async with running(folder, model, 2, concurrent_sequences=4) as ring:
        answers = await asyncio.gather(*(ring.generate(tokens=prompt, max_tokens=24) for prompt in prompts))
        assert [answer.token_ids for answer in answers] == [whole(folder, prompt, 24) for prompt in prompts]


async def test_answers_side_by_side_in_batches_are_those_made_alone(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    prompts = [[(place * 31 + each) % 250 for each in range(3 + 5 * place)] for place in range(8)]
    # Of different lengths, so that answers leave their batch while others go on.
    lengths = [40 - 3 * place for place in range(8)]
    seeded = {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3}
    async with running(folder, model, 2, concurrent_sequences=8, context_tokens=128) as ring:
        alone = [
            await ring.generate(tokens=prompt, max_tokens=length, **seeded)
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        together = await asyncio.gather(
            *(
                ring.generate(tokens=prompt, max_tokens=length, **seeded)
                for prompt, length in zip(prompts, lengths, strict=True)
            )
        )
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        greedy = await asyncio.gather(*(ring.generate(tokens=prompt, max_tokens=16) for prompt in prompts))
        assert [answer.token_ids for answer in greedy] == [whole(folder, prompt, 16) for prompt in prompts]


async def test_a_client_that_goes_leaves_the_batch_and_the_others_go_on(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    prompts = [[(place * 31 + each) % 250 for each in range(3 + 5 * place)] for place in range(4)]
    async with running(folder, model, concurrent_sequences=5, context_tokens=ENDLESS_TOKENS) as ring:
        gone = ring.children[0].runner.Generate(generate_request(tokens=PROMPT))
        others = [asyncio.create_task(ring.generate(tokens=prompt, max_tokens=48)) for prompt in prompts]
        async for response in gone:
            if response.token_ids:
                break
        await asyncio.sleep(0.05)
        gone.cancel()
        answers = await asyncio.gather(*others)
        assert [answer.token_ids for answer in answers] == [whole(folder, prompt, 48) for prompt in prompts]


@pytest.mark.parametrize("bounds", [(), (1, 3)])
async def test_a_prompt_goes_on_from_what_an_earlier_one_began_with_and_gives_the_same_tokens(
    bounds: tuple[int, ...], tiny: tuple[Path, model_pb2.Model]
) -> None:
    folder, model = tiny
    other = [*LONG_PROMPT[:200], *PROMPT]
    async with running(folder, model, *bounds, context_tokens=400) as ring:
        answers = [await ring.generate(tokens=prompt, max_tokens=8) for prompt in (LONG_PROMPT, LONG_PROMPT, other)]
        assert [answer.summary.reused_prompt_tokens for answer in answers] == [0, 256, 128]
        assert answers[0].token_ids == answers[1].token_ids == whole(folder, LONG_PROMPT, 8)
        assert answers[2].token_ids == whole(folder, other, 8)
        penalised = await ring.generate(tokens=LONG_PROMPT, max_tokens=8, repetition_penalty=1.5)
        assert penalised.summary.reused_prompt_tokens == 0


async def test_who_leaves_while_it_goes_on_from_an_earlier_prompt_leaves_nothing(
    tiny: tuple[Path, model_pb2.Model],
) -> None:
    folder, model = tiny
    async with running(folder, model, 2, context_tokens=400) as ring:
        for milliseconds in range(12):
            assert len((await ring.generate(tokens=LONG_PROMPT, max_tokens=2)).token_ids) == 2
            call = ring.children[0].runner.Generate(generate_request(tokens=LONG_PROMPT))
            await asyncio.sleep(milliseconds / 1000)
            call.cancel()


async def test_what_is_kept_of_prompts_gives_way_to_answers(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    prompts = [[first, *LONG_PROMPT] for first in range(5)]
    async with running(folder, model, 2, context_tokens=400, concurrent_sequences=2) as ring:
        for _ in range(2):
            # Each stands for one more sequence than the later ranks take.
            answers = [await ring.generate(tokens=prompt, max_tokens=2) for prompt in prompts]
            assert [answer.summary.reused_prompt_tokens for answer in answers] == [0] * 5
        last_two = [await ring.generate(tokens=prompt, max_tokens=2) for prompt in prompts[-2:]]
        assert [answer.summary.reused_prompt_tokens for answer in last_two] == [256, 256]
        at_once = await asyncio.gather(*(ring.generate(tokens=prompt, max_tokens=20) for prompt in prompts[:4]))
        assert [answer.token_ids for answer in at_once] == [whole(folder, prompt, 20) for prompt in prompts[:4]]


async def test_a_penalty_looks_back_over_prompt_and_answer_at_any_split(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    found = []
    for bounds in ((), (1, 3)):
        async with running(folder, model, *bounds) as ring:
            found.append((await ring.generate(tokens=PROMPT, max_tokens=40, repetition_penalty=10.0)).token_ids)
            plain = (await ring.generate(tokens=PROMPT, max_tokens=40)).token_ids
    assert found[0] == found[1] != plain
    assert len(set(found[0])) > len(set(plain))


async def test_log_probabilities_come_with_each_token_where_they_were_asked_for(
    tiny: tuple[Path, model_pb2.Model],
) -> None:
    folder, model = tiny
    async with running(folder, model, 2) as ring:
        request = generate_request(tokens=PROMPT, max_tokens=4, logprobs=3)
        told = [response async for response in ring.children[0].runner.Generate(request)]
        entries = [entry for response in told for entry in response.logprobs]
        assert [entry.token_id for entry in entries] == [token for response in told for token in response.token_ids]
        for entry in entries:
            assert entry.likeliest[0].token_id == entry.token_id
            assert entry.likeliest[0].logprob == pytest.approx(entry.logprob)
            assert len(entry.likeliest) == 3
        plain = [
            response
            async for response in ring.children[0].runner.Generate(generate_request(tokens=PROMPT, max_tokens=4))
        ]
        assert not any(response.logprobs for response in plain)


async def test_an_answer_ends_before_a_stop_string(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    async with running(folder, model) as ring:
        free = await ring.generate(text="once upon", max_tokens=32)
        stop = free.text[5:8]
        stopped = await ring.generate(text="once upon", max_tokens=32, stop=[stop])
        assert stopped.text == free.text[: free.text.index(stop)]
        assert stopped.summary.finish_reason == runner_service_pb2.FINISH_REASON_STOP


async def refused(ring: Ring, request: runner_service_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in ring.children[0].runner.Generate(request):
            pass
    return caught.value.code(), caught.value.details() or ""


async def test_requests_that_cannot_be_answered_are_refused_with_what_to_do(
    tiny: tuple[Path, model_pb2.Model],
) -> None:
    folder, model = tiny
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    async with running(folder, model, context_tokens=16) as ring:
        assert await refused(ring, generate_request(text="")) == (
            invalid,
            "the prompt is empty: send text, chat messages or tokens",
        )
        code, message = await refused(ring, generate_request(tokens=[1] * 16))
        assert code == invalid
        assert message.startswith(
            "the prompt has 16 tokens and the context holds 16, the answer included: send at most"
        )
        code, message = await refused(ring, generate_request(tokens=[9999]))
        assert (code, message) == (invalid, "token 9999 is not in the vocabulary of 259 tokens")
        code, message = await refused(ring, generate_request(tokens=[1], top_p=1.5))
        assert (code, message) == (invalid, "top_p is 1.5: it must be in (0, 1]")
        chat = generate_request(text="")
        chat.chat.messages.add(role="user", content="hello")
        assert await refused(ring, chat) == (invalid, "this model has no chat template: send the prompt as text")
        code, _ = await refused(ring, generate_request(tokens=[1], instance_id="other"))
        assert code == grpc.StatusCode.NOT_FOUND
        # The longest prompt there can be leaves room for one token.
        assert (await ring.generate(tokens=[1] * 15)).summary.generated_tokens == 1


async def test_more_requests_than_run_and_wait_are_refused(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    async with running(folder, model, 2, context_tokens=ENDLESS_TOKENS) as ring:
        first = ring.children[0].runner.Generate(generate_request(tokens=PROMPT))
        await anext(aiter(first))
        others = [ring.children[0].runner.Generate(generate_request(tokens=PROMPT)) for _ in range(2)]
        readings = [asyncio.create_task(anext(aiter(call))) for call in others]
        # One of them is refused; the other waits, for as long as the first goes on.
        done, waiting = await asyncio.wait(readings, timeout=WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        assert len(waiting) == 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            done.pop().result()
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        await waiting.pop()


async def test_a_client_that_goes_frees_its_place_and_the_log_learns_of_it(
    tiny: tuple[Path, model_pb2.Model],
) -> None:
    folder, model = tiny
    async with running(folder, model, 2, context_tokens=ENDLESS_TOKENS) as ring:
        watching = asyncio.create_task(ring.children[0].watch())
        await until(lambda: ring.children[0].watched != [])
        call = ring.children[0].runner.Generate(generate_request(tokens=PROMPT))
        await anext(aiter(call))
        call.cancel()
        answer = await ring.generate(tokens=PROMPT, max_tokens=8)
        assert answer.token_ids == whole(folder, PROMPT, 8)

        def finished() -> list[event_pb2.GenerationFinished]:
            watched = ring.children[0].watched
            return [told.generation_finished for told in watched if told.HasField("generation_finished")]

        await until(lambda: len(finished()) >= 2)
        watching.cancel()
        assert [event.finish_reason for event in finished()] == ["cancelled", "length"]
        assert finished()[1].prompt_tokens == len(PROMPT)
        assert finished()[1].generated_tokens == 8


async def test_a_deadline_ends_an_answer_and_frees_its_place(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    async with running(folder, model, 2, context_tokens=ENDLESS_TOKENS) as ring:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in ring.children[0].runner.Generate(generate_request(tokens=PROMPT), timeout=0.3):
                pass
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        answer = await ring.generate(tokens=PROMPT, max_tokens=8)
        assert answer.token_ids == whole(folder, PROMPT, 8)


async def test_text_that_is_no_utf8_is_refused(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    request = generate_request(text="?", max_tokens=1).SerializeToString().replace(b"?", b"\xff")
    async with running(folder, model) as ring:
        call = ring.children[0].channel.unary_stream("/ullage.v1.RunnerService/Generate")(request)
        with pytest.raises(grpc.aio.AioRpcError):
            async for _ in call:
                pass
        assert len((await ring.generate(tokens=PROMPT, max_tokens=2)).token_ids) == 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_fails_the_others_by_its_name(
    number: signal.Signals, tiny: tuple[Path, model_pb2.Model]
) -> None:
    folder, model = tiny
    async with running(folder, model, 1, 3, context_tokens=ENDLESS_TOKENS) as ring:
        call = ring.children[0].runner.Generate(generate_request(tokens=PROMPT))
        await anext(aiter(call))
        ring.children[1].process.send_signal(number)
        statuses = await asyncio.gather(ring.children[0].failed(), ring.children[2].failed())
        for status in statuses:
            assert status.failure.blamed_rank == 1
            assert status.failure.phase == model_pb2.SHARD_PHASE_RUNNING
            assert "rank 1 on node n1" in status.failure.message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "rank 1 on node n1" in (caught.value.details() or "")


async def test_a_rank_that_is_no_neighbour_of_the_lost_one_learns_its_name(tiny: tuple[Path, model_pb2.Model]) -> None:
    folder, model = tiny
    async with running(folder, model, 1, 2, 3) as ring:
        ring.children[2].process.kill()
        assert (await ring.children[0].failed()).failure.blamed_rank == 2


async def test_a_neighbour_that_cannot_be_reached_is_named_with_direction_and_address(
    tiny: tuple[Path, model_pb2.Model],
) -> None:
    folder, model = tiny
    other = model_pb2.Model()
    other.CopyFrom(model)
    other.digest = "f" * 64
    async with children(2) as started:
        addresses = [one.address for one in started]
        here, _ = assignments(model, addresses, (2,))
        _, there = assignments(other, addresses, (2,))
        ours, _ = await asyncio.gather(started[0].load(here, folder), started[1].load(there, folder))
        failure = ours[-1].failure
        assert failure.phase == model_pb2.SHARD_PHASE_CONNECTING
        assert failure.blamed_rank == 1
        assert failure.message.startswith(f"rank 0 on node n0 cannot reach rank 1 on node n1 at {addresses[1]}: ")


async def test_a_file_cut_short_fails_the_shard_before_it_loads(tmp_path: Path) -> None:
    folder = tiny_weights.write(tmp_path / "tiny")
    model = tiny_weights.prepared(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    async with children(1) as started:
        (alone,) = assignments(model, [started[0].address], ())
        statuses = await started[0].load(alone, folder)
        assert statuses[-1].phase == model_pb2.SHARD_PHASE_FAILED
        assert "run `ullage models add` again" in statuses[-1].failure.message
