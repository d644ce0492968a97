"""Answers that share the ring, over ranks that answer when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.runner.shard.batches import Batches
from services.runner.shard.sampling import Sampled
from ullage.v1 import runner_service_pb2

GREEDY = runner_service_pb2.SamplingParameters()


class Ranks:
    """The ring, holding every step back until `answer`."""

    def __init__(self) -> None:
        self.positions: list[int] = []
        self._held: list[asyncio.Future[Sampled]] = []

    async def step(self, generation_id: str, position: int, tokens: Sequence[int], *_: object, **__: object) -> Sampled:
        self.positions.append(position)
        self._held.append(asyncio.get_running_loop().create_future())
        return await self._held[-1]

    async def answer(self, token: int) -> None:
        """Let the oldest step under way give `token`, and everybody hear of it."""
        self._held.pop(0).set_result(Sampled(token, 0.0))
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_the_ranks_are_at_work_before_anybody_waits_for_them() -> None:
    ranks: Any = Ranks()
    found = Batches(ranks, groups=1).step("a", 8, 3, GREEDY)
    await ranks.settle()
    assert ranks.positions == [8]
    await ranks.answer(5)
    assert (await found).token_id == 5


async def test_who_leaves_with_his_next_step_under_way_is_over_only_after_it() -> None:
    ranks: Any = Ranks()
    batches = Batches(ranks, groups=1)
    over: list[str] = []

    async def ask_twice() -> None:
        await batches.step("a", 8, 3, GREEDY)
        # In the same breath, before the first step is known to be over.
        batches.step("a", 9, 5, GREEDY)

    asking = asyncio.create_task(ask_twice())
    await ranks.settle()
    await ranks.answer(5)
    await asking
    assert ranks.positions == [8, 9]

    batches.leave("a", lambda: over.append("a"))
    await ranks.settle()
    assert over == []
    await ranks.answer(7)
    assert over == ["a"]
