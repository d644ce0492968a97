"""The first tokens that go round the whole ring, before anybody may ask for one. On the first rank.

A ring that is connected, and whose ranks each computed a step alone, may still wedge at the first frame of full size,
or put together what does not fit. So a chunk of a prompt goes round, and then a few tokens twice: once in one piece and
once with the last of them apart, which every rank's cache has to make the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol

from services.runner.shard import frames
from services.runner.shard.sampling import Sampled
from ullage.v1 import dispatch_service_pb2, runner_service_pb2

CHECKED_TOKENS: Final = 8

DIFFERENCE_MAX: Final = 0.25
"""Of the likeliest token's log probability, computed in one way and the other: far more than any type rounds."""

_GREEDY: Final = runner_service_pb2.SamplingParameters()


class Ring(Protocol):
    """What takes tokens through all ranks; a Pipeline."""

    async def step(
        self,
        generation_id: str,
        position: int,
        tokens: Sequence[int],
        sampling: runner_service_pb2.SamplingParameters,
        *,
        wants_token: bool,
    ) -> Sampled | None: ...

    def close_sequence(self, generation_id: str) -> None: ...


class SeamError(Exception):
    """The ranks do not make one model; str() says how that was seen."""


async def warm_up(ring: Ring, assignment: dispatch_service_pb2.Assignment) -> None:
    """Send the first tokens round. Raises SeamError for what cannot be, RpcError when a rank is lost."""
    ranks = len(assignment.peers)
    room = min(frames.chunk_tokens(assignment.model.hidden_size), assignment.context_tokens)
    if ranks == 1 or room < CHECKED_TOKENS:
        return
    await _asked(ring, "warm-up", [_tokens(room, assignment)])
    few = _tokens(CHECKED_TOKENS, assignment)
    whole = await _asked(ring, "warm-up in one piece", [few])
    parted = await _asked(ring, "warm-up in two pieces", [few[:-1], few[-1:]])
    difference = abs(whole.logprob - parted.logprob)
    if not (math.isfinite(difference) and difference <= DIFFERENCE_MAX):
        raise SeamError(
            f"the {ranks} ranks do not make one model: the likeliest token has a log probability of "
            f"{whole.logprob:.3f} when {CHECKED_TOKENS} tokens come at once and of {parted.logprob:.3f} when the last "
            "comes alone; see that all nodes run the same release and hold the same files"
        )


def _tokens(count: int, assignment: dispatch_service_pb2.Assignment) -> list[int]:
    """Tokens from all over the vocabulary."""
    vocabulary_size = assignment.model.vocabulary_size
    return [(place + 1) * 7919 % vocabulary_size for place in range(count)]


async def _asked(ring: Ring, sequence_id: str, pieces: Sequence[Sequence[int]]) -> Sampled:
    """The token after all pieces, which are of one sequence."""
    position, sampled = 0, None
    for piece in pieces:
        is_last = piece is pieces[-1]
        sampled = await ring.step(sequence_id, position, piece, _GREEDY, wants_token=is_last)
        position += len(piece)
    ring.close_sequence(sequence_id)
    assert sampled is not None  # noqa: S101 - what `wants_token` promises
    return sampled
