"""What this machine's shards compute on and cost, asked of a shard's process, which alone knows MLX."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf import json_format

from ullage.v1 import node_pb2

DESCRIBE_SECONDS: Final = 60.0
"""It imports MLX and builds nothing: seconds, on a busy machine."""

WEIGHT_FORMS: Final = {
    "float32": node_pb2.WEIGHT_FORM_FLOAT32,
    "stored": node_pb2.WEIGHT_FORM_AS_STORED,
}

NAMES_OF_FORMS: Final = {form: name for name, form in WEIGHT_FORMS.items()}


class DescriptionError(Exception):
    """A shard's process cannot run on this machine; the message has its own last words."""


async def describe(command: Sequence[str], threads: int, weights: str) -> node_pb2.RunnerProfile:
    """The part of the profile that the shards' process knows. Raises DescriptionError."""
    process = await asyncio.create_subprocess_exec(
        *command,
        "--describe",
        *("--threads", str(threads), "--weights", weights),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DESCRIBE_SECONDS):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise DescriptionError(f"a shard's process did not describe itself within {DESCRIBE_SECONDS:g} s") from None
    if process.returncode != 0:
        words = err.decode(errors="replace").strip().splitlines()[-1:] or ["it says nothing"]
        raise DescriptionError(f"shards cannot run here (exit code {process.returncode}): {words[0]}")
    return _profile(out)


def _profile(out: bytes) -> node_pb2.RunnerProfile:
    try:
        described: dict[str, Any] = json.loads(out)
        form = WEIGHT_FORMS[described.pop("weight_form")]
        profile = json_format.ParseDict(described, node_pb2.RunnerProfile())
    except (ValueError, KeyError, AttributeError, json_format.ParseError) as error:
        raise DescriptionError(f"a shard's process describes itself in a way unknown here: {error!r}") from error
    profile.weight_form = form
    return profile
