"""Requests to a runner as a client makes them, and when their tokens came."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from benchmarks.stack import WAIT_SECONDS
from ullage.v1 import runner_service_pb2

DECODED_TOKENS: Final = 24
PROMPT_TOKENS: Final = 8


@dataclass
class Answer:
    """When one request got its tokens."""

    token_times: list[float] = field(default_factory=list)
    summary: runner_service_pb2.GenerationSummary = field(default_factory=runner_service_pb2.GenerationSummary)


async def ask(stub: Any, instance_id: str, prompt_tokens: int, tokens: int) -> Answer:
    """One request, to its end."""
    answer = Answer()
    async for response in stub.Generate(request(instance_id, prompt_tokens, tokens), timeout=WAIT_SECONDS):
        answer.token_times += [time.perf_counter()] * len(response.token_ids)
        if response.HasField("summary"):
            answer.summary = response.summary
    return answer


def request(instance_id: str, prompt_tokens: int, tokens: int) -> runner_service_pb2.GenerateRequest:
    """A request for the likeliest `tokens`."""
    asked = runner_service_pb2.GenerateRequest(instance_id=instance_id)
    asked.tokens.token_ids.extend(100 + number % 150 for number in range(prompt_tokens))
    asked.sampling.max_tokens = tokens
    return asked


async def rate(stub: Any, instance_id: str, in_flight: int) -> float:
    """Decoded tokens a second, of all requests together."""
    asked = (ask(stub, instance_id, PROMPT_TOKENS, DECODED_TOKENS) for _ in range(in_flight))
    answers = [answer.token_times for answer in await asyncio.gather(*asked)]
    first_at, last_at = min(times[0] for times in answers), max(times[-1] for times in answers)
    # Each one's first token is prefill.
    return sum(len(times) - 1 for times in answers) / (last_at - first_at)


async def token_seconds(stub: Any, instance_id: str, tokens: int) -> float:
    """What a token of one request takes, as a rule."""
    answer = await ask(stub, instance_id, PROMPT_TOKENS, tokens)
    return statistics.median(after - before for before, after in pairwise(answer.token_times))
