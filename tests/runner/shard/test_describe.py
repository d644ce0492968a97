"""What the shard's process says of itself, and which BLAS it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def described(*arguments: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "services.runner.shard", "--describe", "--threads", "1", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=120,
    )
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_a_description_is_one_json_object_on_stdout() -> None:
    facts = described()
    assert facts["device"] == "cpu"
    assert facts["weight_form"] == "float32"
    assert facts["compute_element_bytes"] == 4
    assert 50 * 2**20 < facts["shard_overhead_bytes"] < 160 * 2**20
    assert "device_limit_bytes" not in facts
    # Between the slowest machine that is busy with other things and the quickest there is.
    assert 10**8 < facts["decode_bytes_per_second"] < 10**13
    assert 10**8 < facts["flops_per_second"] < 10**16


def test_weights_are_kept_as_stored_when_asked() -> None:
    assert described("--weights", "stored")["weight_form"] == "stored"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a choice")
def test_no_blas_is_loaded_when_none_is_asked_for() -> None:
    assert described(ULLAGE_BLAS="none")["blas"] == "none"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a choice")
def test_a_blas_that_is_not_there_is_passed_over() -> None:
    assert described(ULLAGE_BLAS="/nowhere/libblas.so")["blas"] == described()["blas"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a choice")
def test_a_real_blas_is_found_and_mlx_calls_it() -> None:
    blas = described()["blas"]
    assert blas != "none"
    assert "does not call it" not in blas
