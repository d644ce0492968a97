"""What goes round a ring first, and what of it tells that the ranks do not make one model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.runner.shard.sampling import Sampled
from services.runner.shard.warm_up import CHECKED_TOKENS, SeamError, warm_up
from ullage.v1 import dispatch_service_pb2, model_pb2, runner_service_pb2


class FakeRing:
    """Ranks whose token is as likely as `logprobs` say, one after the other."""

    def __init__(self, *logprobs: float) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.open: set[str] = set()
        self._logprobs = list(logprobs)

    async def step(
        self,
        generation_id: str,
        position: int,
        tokens: Sequence[int],
        sampling: runner_service_pb2.SamplingParameters,
        *,
        wants_token: bool,
    ) -> Sampled | None:
        self.open.add(generation_id)
        self.pieces.append((position, len(tokens)))
        return Sampled(1, self._logprobs.pop(0)) if wants_token else None

    def close_sequence(self, generation_id: str) -> None:
        self.open.remove(generation_id)


def assignment(ranks: int, context_tokens: int = 512) -> dispatch_service_pb2.Assignment:
    peers = [dispatch_service_pb2.Peer(rank=rank) for rank in range(ranks)]
    model = model_pb2.Model(hidden_size=64, vocabulary_size=1000)
    return dispatch_service_pb2.Assignment(peers=peers, model=model, context_tokens=context_tokens)


async def test_a_whole_chunk_goes_round_and_then_a_few_tokens_in_two_ways() -> None:
    ring = FakeRing(-1.0, -2.0, -2.01)
    await warm_up(ring, assignment(2))
    few = CHECKED_TOKENS
    assert ring.pieces == [(0, 128), (0, few), (0, few - 1), (few - 1, 1)]
    assert ring.open == set()


@pytest.mark.parametrize("parted", [-2.5, float("nan")])
async def test_ranks_that_do_not_fit_together_are_found(parted: float) -> None:
    with pytest.raises(SeamError, match="the 3 ranks do not make one model"):
        await warm_up(FakeRing(-1.0, -2.0, parted), assignment(3))


async def test_a_rank_alone_has_no_seams() -> None:
    ring = FakeRing()
    await warm_up(ring, assignment(1))
    assert ring.pieces == []


async def test_a_context_of_a_few_tokens_is_left_alone() -> None:
    ring = FakeRing()
    await warm_up(ring, assignment(2, context_tokens=CHECKED_TOKENS - 1))
    assert ring.pieces == []
