"""`python -m benchmarks.soak [--minutes 30]`: random requests, cancels and kills on a split model; what became of it.

Not a benchmark and not a test: it runs for long, and its summary is read by people. It ends with 1 when something
hung, when a request failed that nothing had been done to, or when a process grew.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

from benchmarks.split import LAYERS, model_folder
from benchmarks.stack import Stack, started
from services import logs, rpc
from ullage.v1 import model_pb2, runner_service_pb2, runner_service_pb2_grpc

SHARDS: Final = 2
CONCURRENT: Final = 4
CLIENTS: Final = 3
ANSWER_SECONDS_MAX: Final = 90.0
"""A request that has neither ended nor failed by then hangs."""

FAILED_SECONDS_MAX: Final = 5.0
STRIKE_SECONDS: Final = (10.0, 30.0)
"""Between two kills."""

PROMPT_TOKENS_MAX: Final = 250
GOES_ON_SHARE: Final = 0.3
"""Of prompts that begin with the one before."""

GROWTH_BYTES_MAX: Final = 32 << 20
"""Of a runner or the master, from after the first minute to the end."""


@dataclass
class Soak:
    """What goes on, and what was seen of it."""

    stack: Stack
    random: random.Random
    ends_at: float
    pause_seconds: float
    """How long a client rests between two requests, on the average."""
    instance_id: str = ""
    is_broken: bool = False
    """On purpose, though it may not be known yet."""
    mended_at: float = 0.0
    """When it was last placed again."""
    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed_seconds: list[float] = field(default_factory=list)
    resident: dict[str, list[int]] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)
    """The last one: another may go on from it."""

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.ends_at

    async def run(self) -> None:
        self.instance_id = await self.stack.place(LAYERS[SHARDS], CONCURRENT)
        async with rpc.channel(self.stack.addresses[0]) as channel, asyncio.TaskGroup() as tasks:
            stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
            for _ in range(CLIENTS):
                tasks.create_task(self._ask(stub))
            tasks.create_task(self._strike())
            tasks.create_task(self._weigh())

    async def _ask(self, stub: Any) -> None:
        while not self.is_over:
            instance_id, began = self.instance_id, time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    self.seen[await self._one(stub, instance_id)] += 1
            except TimeoutError:
                self.wrong.append(f"a request hung for {ANSWER_SECONDS_MAX:.0f} s")
            except grpc.aio.AioRpcError as error:
                self._note(instance_id, began, error)
                await asyncio.sleep(0.5)
            await asyncio.sleep(self.random.uniform(0, 2 * self.pause_seconds))

    def _note(self, instance_id: str, began: float, error: grpc.aio.AioRpcError) -> None:
        """A failure is in order when its instance was broken, or is not there."""
        broken = self.is_broken or self.mended_at >= began or instance_id != self.instance_id
        busy = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        if broken or busy:
            self.seen["told that it is busy" if busy else "told that a rank is lost"] += 1
        else:
            self.wrong.append(f"a request failed for nothing: {error.code().name} {error.details()}")

    async def _one(self, stub: Any, instance_id: str) -> str:
        """One request, to its end or left in the middle."""
        request = runner_service_pb2.GenerateRequest(instance_id=instance_id)
        request.tokens.token_ids.extend(self._new_prompt())
        request.sampling.max_tokens = self.random.randint(1, 100)
        request.sampling.temperature = self.random.choice([0.0, 1.0])
        leave_after = self.random.randint(1, 50) if self.random.random() < 0.3 else None
        call = stub.Generate(request)
        tokens = 0
        async for response in call:
            tokens += len(response.token_ids)
            self.seen["began with tokens of an earlier one"] += response.summary.reused_prompt_tokens > 0
            if leave_after is not None and tokens >= leave_after:
                call.cancel()
                return "left in the middle"
        return "answered"

    def _new_prompt(self) -> list[int]:
        goes_on = self.random.random() < GOES_ON_SHARE
        start = self.prompt[:PROMPT_TOKENS_MAX] if goes_on else []
        self.prompt = [*start, *self.random.choices(range(100, 10_000), k=self.random.randint(1, PROMPT_TOKENS_MAX))]
        return self.prompt

    async def _strike(self) -> None:
        """Break it, see that this is known in time, and place it again; sometimes release it in peace."""
        while not self.is_over:
            await asyncio.sleep(self.random.uniform(*STRIKE_SECONDS))
            how = self.random.choice(["killed", "stopped", "released"])
            self.is_broken, began = True, time.monotonic()
            if how == "released":
                await self.stack.release(self.instance_id)
            else:
                self._hit(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
                await self._failed(began, how)
            self.seen[f"instance {how}"] += 1
            await self.stack.until(lambda: not self._shards())
            self.instance_id = await self.stack.place(LAYERS[SHARDS], CONCURRENT)
            self.is_broken, self.mended_at = False, time.monotonic()

    async def _failed(self, began: float, how: str) -> None:
        instance = self.stack.instance(self.instance_id)
        await self.stack.until(lambda: instance.state == model_pb2.INSTANCE_STATE_FAILED)
        took = time.monotonic() - began
        self.failed_seconds.append(took)
        if took > FAILED_SECONDS_MAX:
            self.wrong.append(f"{how}, and FAILED only after {took:.1f} s: {instance.failure}")

    def _hit(self, number: signal.Signals) -> None:
        victim = self.random.choice(self._shards())
        victim.send_signal(number)

    def _shards(self) -> list[psutil.Process]:
        return [child for runner in self.stack.runners for child in psutil.Process(runner.pid).children()]

    async def _weigh(self) -> None:
        """Note what the lasting processes hold, once they have settled."""
        await asyncio.sleep(min(60.0, (self.ends_at - time.monotonic()) / 3))
        while not self.is_over:
            named = {f"runner {number}": runner.pid for number, runner in enumerate(self.stack.runners)}
            for name, pid in {"master and clients": None, **named}.items():
                self.resident.setdefault(name, []).append(psutil.Process(pid).memory_info().rss)
            await asyncio.sleep(5.0)

    def growth(self) -> dict[str, int]:
        """By process, the bytes it holds more at the end than when it had settled."""
        return {name: sum(seen[-3:]) // len(seen[-3:]) - seen[0] for name, seen in self.resident.items() if seen}

    def summary(self, minutes: float) -> dict[str, Any]:
        grown = self.growth()
        grew = (f"{name} grew by {each:,} bytes" for name, each in grown.items() if each > GROWTH_BYTES_MAX)
        return {
            "minutes": round(minutes, 1),
            "seen": dict(sorted(self.seen.items())),
            "seconds_to_failed_max": round(max(self.failed_seconds, default=0.0), 2),
            "grown_mib": {name: round(each / (1 << 20), 1) for name, each in grown.items()},
            "processes_left": len(self._shards()),
            "wrong": [*self.wrong, *grew],
        }


async def soaked(folder: Path, minutes: float, seed: int, pause_seconds: float) -> dict[str, Any]:
    """The summary of so many minutes with the model in `folder`."""
    with tempfile.TemporaryDirectory(prefix="ullage-soak-") as state:
        async with started(folder, Path(state), runners=SHARDS) as running:
            began = time.monotonic()
            randomness = random.Random(seed)  # noqa: S311 - repeatable, not secret
            soak = Soak(running, randomness, began + minutes * 60, pause_seconds)
            await soak.run()
            with contextlib.suppress(TimeoutError):
                await running.release(soak.instance_id)
            return soak.summary((time.monotonic() - began) / 60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="between a client's requests")
    arguments = parser.parse_args()
    logs.configure("soak", level="warning")
    summary = asyncio.run(soaked(model_folder(), arguments.minutes, arguments.seed, arguments.pause))
    print(json.dumps(summary, indent=1))
    return 1 if summary["wrong"] or summary["processes_left"] else 0


if __name__ == "__main__":
    sys.exit(main())
