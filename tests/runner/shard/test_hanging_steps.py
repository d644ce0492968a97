"""A rank whose computation hangs while its heartbeats go on: found by what its process does, and told by its name."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from tests.runner.shard import tiny_weights
from tests.runner.shard.ring import Child, Ring, assignments, children
from ullage.v1 import model_pb2

PROMPT = [5, 17, 200, 31]


@pytest.fixture(scope="module")
def hanging_blas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and a system on which the BLAS is chosen")
    library = tmp_path_factory.mktemp("blas") / "libhanging.so"
    source = Path(__file__).with_name("hanging_blas.c")
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True, timeout=60)
    return library


def hang(child: Child, flag: Path, how: str) -> None:
    """Have the child's next product not end."""
    Path(f"{flag}.{child.process.pid}").write_text(how)


async def asked_again_and_again(ring: Ring) -> None:
    """See that there is a step to hang, whenever it is told to: a single answer may be whole by then."""
    while True:
        await ring.generate(tokens=PROMPT)


@pytest.mark.parametrize(
    ("bounds", "how", "said"),
    [
        pytest.param((), "rest", "a step has done nothing for", id="one rank that rests"),
        pytest.param((2,), "rest", "a step has done nothing for", id="the second of two ranks that rests"),
        pytest.param((2,), "spin", "a step has taken", id="the second of two ranks that goes in circles"),
    ],
)
async def test_a_step_that_hangs_is_told_though_heartbeats_go_on(
    bounds: tuple[int, ...], how: str, said: str, hanging_blas: Path, tmp_path: Path
) -> None:
    folder = tiny_weights.write(tmp_path / "tiny", eos_token_id=None)
    model = tiny_weights.prepared(folder)
    flag = tmp_path / "hang"
    environment = {"ULLAGE_BLAS": str(hanging_blas), "ULLAGE_TEST_HANG": str(flag)}
    async with children(len(bounds) + 1, environment=environment) as started:
        cut = assignments(model, [one.address for one in started], bounds, context_tokens=400)
        await asyncio.gather(*(one.load(part, folder) for one, part in zip(started, cut, strict=True)))
        ring = Ring(started)
        await ring.generate(tokens=PROMPT, max_tokens=1)
        asking = asyncio.create_task(asked_again_and_again(ring))
        last = ring.children[-1]
        hang(last, flag, how)

        status = await last.failed()
        assert status.failure.phase == model_pb2.SHARD_PHASE_RUNNING
        assert status.failure.message.startswith(f"its computation hangs: {said}")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asking
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        rank = len(bounds)
        assert f"rank {rank} on node n{rank} failed: its computation hangs" in (caught.value.details() or "")
