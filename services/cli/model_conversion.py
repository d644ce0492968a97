"""The conversion of a GGUF file, in a process of its own, since it needs the runner's libraries."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Final

from services.cli.failure import CommandError
from services.cli.model_progress import Steps

CONVERTER: Final = "services.runner.shard.gguf"
SILENCE_SECONDS_MAX: Final = 300.0
"""The largest tensor is written in a fraction of this, even to a slow disk."""

GRACE_SECONDS: Final = 5.0


def convert(source: Path, destination: Path, steps: Steps) -> None:
    """Make the folder `destination` of the GGUF file `source`. Raises CommandError with the converter's own words."""
    asyncio.run(_convert(source, destination, steps))


async def _convert(source: Path, destination: Path, steps: Steps) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CONVERTER, str(source), str(destination)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None  # noqa: S101 - asked for above
    assert process.stderr is not None  # noqa: S101 - asked for above
    errors = asyncio.create_task(process.stderr.read())
    try:
        await _follow(process.stdout, steps)
        code = await process.wait()
    except TimeoutError as error:
        raise CommandError(
            f"the conversion of {source.name} has made no progress for {SILENCE_SECONDS_MAX:.0f} s: "
            "see that the disk is well, and try again",
            reason="CONVERSION_FAILED",
        ) from error
    finally:
        await _end(process)
    if code != 0:
        said = (await errors).decode(errors="replace").strip().splitlines()
        raise CommandError(said[-1] if said else f"the conversion ended with {code}", reason="CONVERSION_FAILED")


async def _follow(output: asyncio.StreamReader, steps: Steps) -> None:
    """Pass the converter's progress on until it ends. Raises TimeoutError when it falls silent."""
    current = ""
    while True:
        async with asyncio.timeout(SILENCE_SECONDS_MAX):
            line = await output.readline()
        if not line:
            return
        told = json.loads(line)
        if told["step"] != current:
            current = told["step"]
            steps.begin(current, told["total_bytes"])
        steps.at(told["done_bytes"])


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let the converter tidy up after itself; where it does not, kill it."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(GRACE_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
