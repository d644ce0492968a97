"""The demo, which is what a newcomer runs first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.integration.cluster import HANG_SECONDS, PATIENT, ROOT


def test_the_demo_goes_from_a_refusal_to_an_answer(smollm2_folder: Path) -> None:
    # The fixture fetches the model where the demo looks for it.
    demo = subprocess.run(
        [sys.executable, "-m", "examples.demo"],
        cwd=ROOT,
        env={**PATIENT, **os.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_SECONDS * 10,
        check=False,
    )
    assert demo.returncode == 0, demo.stdout
    for said in ("refused (INSUFFICIENT_MEMORY)", "rank 2 on node-", "tokens read in", "Everything is stopped."):
        assert said in demo.stdout
