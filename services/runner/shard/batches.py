"""Which answers go round the ring side by side. On the first rank.

There are as many groups of answers as ranks, so that every rank has one to work on, and an answer joins the
smallest. A group sets out once all of its answers have their last token and want the next; one that does not in
time, its client being slow, is left behind and joins again when it comes. So a batch is full while clients are
quick, and no client waits for another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from services.runner.shard.frames import BatchRow
from services.runner.shard.pipeline import Pipeline
from services.runner.shard.sampling import Sampled, looks_back
from ullage.v1 import runner_service_pb2

STRAGGLER_SECONDS_MAX: Final = 0.003
"""How long a group waits for its last answers: less than a step takes, more than it takes to hand on a token."""

BATCH_ROWS_MIN: Final = 2
"""One row goes by itself: its cache needs no mask for its neighbours."""


@dataclass
class _Wanted:
    position: int
    token: int
    sampling: runner_service_pb2.SamplingParameters
    found: asyncio.Future[Sampled]


@dataclass
class _Group:
    members: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    """Members that were left behind and have not come back yet."""
    wanted: dict[str, _Wanted] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None
    steps: set[asyncio.Task[None]] = field(default_factory=set)
    """Those under way; while there is one, the group is on its way."""

    @property
    def is_complete(self) -> bool:
        return self.wanted.keys() >= self.members - self.late


class Batches:
    """All answers that are past their prompt. Belongs to the event loop."""

    def __init__(self, pipeline: Pipeline, groups: int) -> None:
        self._pipeline = pipeline
        self._groups = [_Group() for _ in range(groups)]
        self._group_of: dict[str, _Group] = {}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def step(
        self, generation_id: str, position: int, token: int, sampling: runner_service_pb2.SamplingParameters
    ) -> asyncio.Future[Sampled]:
        """Set out for the token after `token`, the sequence's at `position`. The first call joins a group.

        Whoever is to be told of `token` can be told meanwhile. What is awaited raises RpcError.
        """
        group = self._group_of.get(generation_id)
        if group is None:
            group = self._group_of[generation_id] = min(self._groups, key=lambda each: len(each.members))
            group.members.add(generation_id)
        group.late.discard(generation_id)
        found: asyncio.Future[Sampled] = asyncio.get_running_loop().create_future()
        group.wanted[generation_id] = _Wanted(position, token, sampling, found)
        self._set_out(group)
        return found

    def leave(self, generation_id: str, then: Callable[[], None]) -> None:
        """The answer is over, or nobody wants it: its group does not wait for it any more.

        `then` is called once no step for it is under way, which may be at once: before that, its sequence cannot be
        closed.
        """
        group = self._group_of.pop(generation_id, None)
        if group is not None:
            group.members.discard(generation_id)
            group.late.discard(generation_id)
            group.wanted.pop(generation_id, None)
            self._set_out(group)
        step = self._under_way.get(generation_id)
        if step is None:
            then()
        else:
            step.add_done_callback(lambda _: then())

    def _set_out(self, group: _Group) -> None:
        """Start the group's next step if it is there and complete; else see that it does not wait for long."""
        is_small = len(group.members) < BATCH_ROWS_MIN
        if not group.wanted or (group.steps and not is_small):
            return
        if group.is_complete or is_small:
            self._start(group)
        elif group.timer is None:
            group.timer = asyncio.get_running_loop().call_later(STRAGGLER_SECONDS_MAX, self._leave_behind, group)

    def _leave_behind(self, group: _Group) -> None:
        group.timer = None
        group.late = group.members - group.wanted.keys()
        self._set_out(group)

    def _start(self, group: _Group) -> None:
        if group.timer is not None:
            group.timer.cancel()
            group.timer = None
        # Always in the order in which they joined, so that the caches need not be put into another.
        ids = [each for each in self._group_of if each in group.wanted]
        wanted = [group.wanted.pop(each) for each in ids]
        if len(ids) >= BATCH_ROWS_MIN:
            self._track(group, ids, self._together(ids, wanted))
            return
        for each, one in zip(ids, wanted, strict=True):
            self._track(group, [each], self._alone(each, one))

    def _track(self, group: _Group, ids: Sequence[str], step: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(step)
        group.steps.add(task)
        self._under_way.update(dict.fromkeys(ids, task))

        def arrived(_: asyncio.Task[None]) -> None:
            group.steps.discard(task)
            for each in ids:
                # An answer may have asked for its next token before this is called.
                if self._under_way.get(each) is task:
                    del self._under_way[each]
            self._set_out(group)

        task.add_done_callback(arrived)

    async def _alone(self, generation_id: str, wanted: _Wanted) -> None:
        try:
            sampled = await self._pipeline.step(
                generation_id, wanted.position, [wanted.token], wanted.sampling, wants_token=True
            )
            assert sampled is not None  # noqa: S101 - what `wants_token` promises
        except Exception as error:
            _fail([wanted], error)
        else:
            _give([wanted], [sampled])

    async def _together(self, ids: Sequence[str], wanted: Sequence[_Wanted]) -> None:
        rows = [
            BatchRow(
                generation_id=generation_id,
                position=one.position,
                token_id=one.token if looks_back(one.sampling) else None,
            )
            for generation_id, one in zip(ids, wanted, strict=True)
        ]
        try:
            found = await self._pipeline.step_batch(rows, [one.token for one in wanted])
        except Exception as error:
            _fail(wanted, error)
        else:
            _give(wanted, found)


def _give(wanted: Sequence[_Wanted], sampled: Sequence[Sampled]) -> None:
    for one, found in zip(wanted, sampled, strict=True):
        # Whoever has gone meanwhile has cancelled his.
        if not one.found.done():
            one.found.set_result(found)


def _fail(wanted: Sequence[_Wanted], error: Exception) -> None:
    for one in wanted:
        if not one.found.done():
            one.found.set_exception(error)
            # Or asyncio would complain of an error that nobody saw, for whoever leaves before it is his turn to look.
            one.found.exception()
