"""The split does not show: what runners answer together is, token for token, what the unsharded model answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cluster import COMMAND_SECONDS_MAX, ROOT, Cluster
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.model

TOKENS = "64"
PROMPTS = (
    "The old lighthouse keeper opened the door and",
    "def fibonacci(n):\n",
)
SPLITS = {
    "one node": {"node-2": 30},
    "two nodes": {"node-1": 7, "node-3": 23},
    "three nodes": {"node-1": 13, "node-2": 1, "node-3": 16},
}


@pytest.fixture(scope="module")
def unsharded(smollm2_folder: Path) -> list[list[int]]:
    """The token ids of the unsharded model, from a process without any of our code."""
    command = [sys.executable, "-m", "tests.integration.reference", str(smollm2_folder), TOKENS, *PROMPTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    answers: list[list[int]] = json.loads(done.stdout)
    assert [len(answer) for answer in answers] == [int(TOKENS)] * len(PROMPTS)
    return answers


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
def test_sixty_four_tokens_are_those_of_the_unsharded_model(
    released: Cluster, unsharded: list[list[int]], split: dict[str, int]
) -> None:
    layers = [part for name, count in split.items() for part in ("--layers", f"{name}={count}")]
    instance = released.ask("place", MODEL, "--context", "256", *layers)
    got = sorted(shard["end_layer"] - shard["first_layer"] for shard in instance["placement"]["shards"])
    assert got == sorted(split.values())

    for prompt, expected in zip(PROMPTS, unsharded, strict=True):
        answer = released.generate(MODEL, prompt, "--raw", "--max-tokens", TOKENS)
        assert answer["token_ids"] == expected
