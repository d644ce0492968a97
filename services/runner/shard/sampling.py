"""From the scores of the next token to the token.

A token depends on the scores, the parameters, the seed and its place in the sequence, and on nothing else:
the same seed gives the same text however the model is split and whatever else is running.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import grpc
import mlx.core as mx

from services.rpc import RpcError
from ullage.v1 import runner_service_pb2

TEMPERATURE_MAX: Final = 100.0
GREEDY_BELOW: Final = 1e-3
"""Below this temperature the likeliest token has all the probability a 4-byte float can tell from 1."""
STOPS_MAX: Final = 16
STOP_CHARACTERS_MAX: Final = 1024
LOGPROBS_MAX: Final = 20
REPETITION_PENALTY_MAX: Final = 10.0


class Sampled(NamedTuple):
    """A token and its log probability under the model's own scores."""

    token_id: int
    logprob: float
    likeliest: Sequence[tuple[int, float]] = ()
    """The likeliest tokens with theirs, where they were asked for."""


def checked(sampling: runner_service_pb2.SamplingParameters) -> None:
    """Raise RpcError INVALID_ARGUMENT, with the range, when a parameter is out of it."""
    _within("temperature", sampling.temperature, 0.0, TEMPERATURE_MAX)
    if sampling.HasField("top_p"):
        _within("top_p", sampling.top_p, 0.0, 1.0, low_excluded=True)
    _within("min_p", sampling.min_p, 0.0, 1.0)
    if sampling.HasField("max_tokens") and sampling.max_tokens == 0:
        raise _invalid("max_tokens is 0: ask for at least 1, or leave it out for as many as the context leaves")
    if sampling.HasField("repetition_penalty"):
        _within("repetition_penalty", sampling.repetition_penalty, 0.0, REPETITION_PENALTY_MAX, low_excluded=True)
    _within("logprobs", sampling.logprobs, 0, LOGPROBS_MAX)
    if len(sampling.stop) > STOPS_MAX:
        raise _invalid(f"{len(sampling.stop)} stop strings: at most {STOPS_MAX} are taken")
    for stop in sampling.stop:
        if not 1 <= len(stop) <= STOP_CHARACTERS_MAX:
            raise _invalid(f"a stop string has {len(stop)} characters: 1 to {STOP_CHARACTERS_MAX} are taken")


def _within(name: str, value: float, low: float, high: float, *, low_excluded: bool = False) -> None:
    if math.isfinite(value) and low <= value <= high and not (low_excluded and value == low):
        return
    bracket = "(" if low_excluded else "["
    raise _invalid(f"{name} is {value:g}: it must be in {bracket}{low:g}, {high:g}]")


def _invalid(message: str) -> RpcError:
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, reason="SAMPLING_PARAMETER")


def looks_back(sampling: runner_service_pb2.SamplingParameters) -> bool:
    """Whether a token depends on which tokens came before it, beside the scores."""
    return sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1.0


def pick(
    logits: mx.array, sampling: runner_service_pb2.SamplingParameters, position: int, seen: Collection[int] = ()
) -> Sampled:
    """The token at `position`, from the scores (one row, one for each token of the vocabulary) there.

    `seen` are the tokens before it, where sampling looks back.
    """
    scores = logits.astype(mx.float32).reshape(-1)
    logprobs = scores - mx.logsumexp(scores)
    chances = logprobs
    if seen and looks_back(sampling):
        scores = _penalised(scores, seen, sampling.repetition_penalty)
        chances = scores - mx.logsumexp(scores)
    if sampling.temperature < GREEDY_BELOW:
        token = mx.argmax(chances)
    else:
        kept = _kept(chances, sampling)
        token = mx.random.categorical(kept / sampling.temperature, key=_key(sampling.seed, position))
    chosen = logprobs[token]
    mx.eval(token, chosen)
    token_id: Any = token.item()
    logprob: Any = chosen.item()
    return Sampled(int(token_id), float(logprob), _likeliest(logprobs, sampling.logprobs))


def _penalised(scores: mx.array, seen: Collection[int], penalty: float) -> mx.array:
    """`scores` with those of the tokens in `seen` made less likely."""
    places = mx.array(sorted(seen))
    before = scores[places]
    scores[places] = mx.where(before > 0, before / penalty, before * penalty)
    return scores


def _likeliest(logprobs: mx.array, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens, each with its log probability; of equal ones the first."""
    count = min(count, logprobs.size)
    if count == 0:
        return []
    order = mx.argsort(-logprobs)[:count]
    places: Any = order.tolist()
    values: Any = logprobs[order].tolist()
    return list(zip(places, values, strict=True))


def _kept(logprobs: mx.array, sampling: runner_service_pb2.SamplingParameters) -> mx.array:
    """`logprobs` with what top_p, min_p and top_k leave out at minus infinity, taken in that order."""
    if sampling.HasField("top_p") and sampling.top_p < 1.0:
        logprobs = mx.where(_outside_top_p(logprobs, sampling.top_p), -mx.inf, logprobs)
    if sampling.min_p > 0.0:
        logprobs = mx.where(logprobs < logprobs.max() + math.log(sampling.min_p), -mx.inf, logprobs)
    if 0 < sampling.top_k < logprobs.size:
        threshold = mx.sort(logprobs)[-sampling.top_k]
        logprobs = mx.where(logprobs < threshold, -mx.inf, logprobs)
    return logprobs


def _outside_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    """Which tokens are not among the likeliest that together reach `top_p`."""
    ascending = mx.sort(logprobs)
    likelier_mass = mx.cumsum(mx.exp(ascending), reverse=True, inclusive=False)
    dropped = mx.minimum((likelier_mass >= top_p).sum(), logprobs.size - 1)
    return logprobs < ascending[dropped]


def _key(seed: int, position: int) -> mx.array:
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return mx.random.key(int.from_bytes(digest, "little"))
