"""Which token is picked from given scores."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import grpc
import mlx.core as mx
import pytest

from services.rpc import RpcError
from services.runner.shard.sampling import checked, pick
from ullage.v1 import runner_service_pb2

PROBABILITIES = (0.5, 0.3, 0.15, 0.05)
SCORES = mx.log(mx.array(PROBABILITIES)) + 3.0


def parameters(**values: Any) -> runner_service_pb2.SamplingParameters:
    return runner_service_pb2.SamplingParameters(**values)


def drawn(count: int = 400, **values: Any) -> Counter[int]:
    return Counter(pick(SCORES, parameters(**values), position).token_id for position in range(count))


def test_without_a_temperature_the_likeliest_token_is_picked() -> None:
    token_id, logprob, _ = pick(SCORES, parameters(), 0)
    assert token_id == 0
    assert math.isclose(logprob, math.log(0.5), rel_tol=1e-5)


def test_tokens_are_drawn_by_their_probability() -> None:
    counts = drawn(temperature=1.0, seed=3)
    for token_id, probability in enumerate(PROBABILITIES):
        assert abs(counts[token_id] / 400 - probability) < 0.08


def test_top_p_keeps_the_likeliest_that_reach_it() -> None:
    assert set(drawn(temperature=1.0, seed=3, top_p=0.5)) == {0}
    assert set(drawn(temperature=1.0, seed=3, top_p=0.75)) == {0, 1}
    assert set(drawn(temperature=1.0, seed=3, top_p=1.0)) == {0, 1, 2, 3}


def test_the_smallest_top_p_keeps_one_token() -> None:
    assert set(drawn(temperature=5.0, seed=3, top_p=1e-9)) == {0}


def test_top_k_keeps_so_many() -> None:
    assert set(drawn(temperature=1.0, seed=3, top_k=2)) == {0, 1}
    assert set(drawn(temperature=1.0, seed=3, top_k=99)) == {0, 1, 2, 3}


def test_min_p_keeps_what_is_near_the_likeliest() -> None:
    assert set(drawn(temperature=1.0, seed=3, min_p=0.25)) == {0, 1, 2}


def test_a_tiny_temperature_is_no_division_by_zero() -> None:
    assert pick(SCORES, parameters(temperature=1e-300, seed=1), 0).token_id == 0


def test_a_token_depends_on_seed_and_place_alone() -> None:
    draw = [pick(SCORES, parameters(temperature=1.0, seed=9), place).token_id for place in range(64)]
    backwards = [pick(SCORES, parameters(temperature=1.0, seed=9), place).token_id for place in reversed(range(64))]
    assert draw == backwards[::-1]
    assert draw != [pick(SCORES, parameters(temperature=1.0, seed=10), place).token_id for place in range(64)]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1: it must be in [0, 100]"),
        ({"temperature": math.nan}, "temperature is nan: it must be in [0, 100]"),
        ({"top_p": 0.0}, "top_p is 0: it must be in (0, 1]"),
        ({"min_p": 2.0}, "min_p is 2: it must be in [0, 1]"),
        ({"max_tokens": 0}, "max_tokens is 0: ask for at least 1, or leave it out for as many as the context leaves"),
        ({"stop": [""]}, "a stop string has 0 characters: 1 to 1024 are taken"),
        ({"stop": ["x"] * 17}, "17 stop strings: at most 16 are taken"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0: it must be in (0, 10]"),
        ({"logprobs": 21}, "logprobs is 21: it must be in [0, 20]"),
    ],
)
def test_a_parameter_out_of_its_range_is_refused_with_the_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RpcError) as caught:
        checked(parameters(**values))
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message == message


def test_parameters_within_their_ranges_are_taken() -> None:
    checked(parameters(temperature=0.7, top_p=1.0, top_k=40, min_p=0.05, max_tokens=1, stop=["\n"]))


def test_a_repetition_penalty_makes_tokens_that_were_there_less_likely() -> None:
    # Scores 2.3, 1.8, 1.1 and 0.0, those of tokens 0 and 1 halved.
    token_id, logprob, _ = pick(SCORES, parameters(repetition_penalty=2.0), 5, {0, 1})
    assert token_id == 0
    assert math.isclose(logprob, math.log(0.5), rel_tol=1e-5)
    assert pick(SCORES, parameters(repetition_penalty=3.0), 5, {0, 1}).token_id == 2
    assert pick(SCORES, parameters(repetition_penalty=3.0), 5, set()).token_id == 0
    assert pick(-SCORES, parameters(repetition_penalty=3.0), 5, {3}).token_id == 3


def test_the_likeliest_are_told_with_the_models_own_probabilities() -> None:
    sampled = pick(SCORES, parameters(logprobs=2, temperature=1.0, seed=3, repetition_penalty=5.0), 5, {0})
    assert [token_id for token_id, _ in sampled.likeliest] == [0, 1]
    assert all(
        math.isclose(logprob, math.log(PROBABILITIES[token_id]), rel_tol=1e-5)
        for token_id, logprob in sampled.likeliest
    )
    assert pick(SCORES, parameters(logprobs=0), 5).likeliest == []
    assert len(pick(SCORES, parameters(logprobs=20), 5).likeliest) == 4
