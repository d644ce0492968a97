"""The part of a model that a shard needs, in a folder that holds no more of it: which bytes, and which are there.

Rules this module lives by:
- The folder looks like the whole model's: files of their full size, with holes where nothing was fetched. So a
  shard loads from it as from any other, and reads none of the holes.
- It lies where nobody takes it for a prepared model, beside a list of the ranges that are on the disk. A range is
  listed once its bytes are.
- Small files are whole, and of the sha256 that the model's digest was made of; of weights each tensor is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from services.model_folder import ModelFolderError, StoredFile, check_tensors, part_of, write_manifest
from ullage.v1 import model_pb2

PARTIAL_FOLDER: Final = ".partial"
HELD_FILE: Final = "held.json"
WEIGHTS_SUFFIX: Final = ".safetensors"

HEADER_LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 100_000_000
"""The longest header the format allows; a longer one is damage."""


class Range(NamedTuple):
    """[begin, end) of a file."""

    begin: int
    end: int


class Cut(NamedTuple):
    """The part of the model that is needed."""

    first_layer: int
    end_layer: int
    layers: int
    tied_embedding: bool

    @classmethod
    def of(cls, model: model_pb2.Model, shard: model_pb2.Shard) -> Cut:
        return cls(shard.first_layer, shard.end_layer, len(model.layers), model.tied_embedding)

    def needs(self, tensor: str) -> bool:
        """Whether the shard uses the tensor. One of a kind that is not known is taken along."""
        match part_of(tensor):
            case int(layer):
                return self.first_layer <= layer < self.end_layer
            case "embedding":
                return self.first_layer == 0 or (self.end_layer == self.layers and self.tied_embedding)
            case "head":
                return self.end_layer == self.layers
            case None:
                return True


def tensor_ranges(header: bytes, cut: Cut, size_bytes: int) -> list[Range]:
    """The ranges of a weights file that `cut` needs, its header among them. `header` begins with its own length.

    Raises ModelFolderError for what is no header.
    """
    try:
        entries = json.loads(header[HEADER_LENGTH_BYTES:])
        data_at = len(header)
        ranges = [
            Range(data_at + entry["data_offsets"][0], data_at + entry["data_offsets"][1])
            for name, entry in entries.items()
            if name != "__metadata__" and cut.needs(name)
        ]
        inside = all(data_at <= begin <= end <= size_bytes for begin, end in ranges)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ModelFolderError(f"what was fetched is no safetensors file: {error!r}") from error
    if not inside:
        raise ModelFolderError("what was fetched is no safetensors file: a tensor lies outside of it")
    return joined([Range(0, data_at), *ranges])


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in as few ranges as they take, in order."""
    result: list[Range] = []
    for each in sorted(ranges):
        if result and each.begin <= result[-1].end:
            result[-1] = Range(result[-1].begin, max(result[-1].end, each.end))
        elif each.end > each.begin:
            result.append(each)
    return result


def without(ranges: Iterable[Range], held: Sequence[Range]) -> list[Range]:
    """What of `ranges` is not in `held`, both joined."""
    missing: list[Range] = []
    for begin, end in ranges:
        at = begin
        for other in held:
            if other.end <= at or other.begin >= end:
                continue
            if other.begin > at:
                missing.append(Range(at, other.begin))
            at = max(at, other.end)
        if at < end:
            missing.append(Range(at, end))
    return missing


class PartialModel:
    """The folder on the disk. Does I/O, so for use on a thread."""

    def __init__(self, models_dir: Path, model: model_pb2.Model) -> None:
        self.path = models_dir / PARTIAL_FOLDER / f"{Path(model.model_id).name}-{model.digest[:12]}"
        self._model = model
        self._held: dict[str, list[Range]] = {}

    def open(self) -> None:
        """Make the folder, or find what it holds."""
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            held = json.loads((self.path / HELD_FILE).read_bytes())
            self._held = {name: joined(Range(*each) for each in ranges) for name, ranges in held.items()}

    def lay_out(self, files: Sequence[StoredFile]) -> None:
        """Have every file there at its full size, and the manifest. Raises ModelFolderError for another model's files.

        What is not held takes no room on the disk.
        """
        write_manifest(self.path, self._model, files)
        for file in files:
            descriptor = os.open(self.path / file.name, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                os.ftruncate(descriptor, file.size_bytes)
            finally:
                os.close(descriptor)

    def others_bytes(self) -> int:
        """What the parts of other models take on the disk: nobody needs them but to be quicker the next time."""
        others = (file for file in self.path.parent.glob("*/*") if file.parent != self.path)
        return sum(_disk_bytes(file) for file in others)

    def held(self, name: str) -> list[Range]:
        """The ranges of a file that are on the disk."""
        return self._held.get(name, [])

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Put bytes in their place; they count once `keep` was called."""
        with (self.path / name).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    def keep(self, name: str, written: Range) -> None:
        """Note that these bytes are there, once the disk has them."""
        with (self.path / name).open("r+b") as file:
            os.fsync(file.fileno())
        self._held[name] = joined([*self.held(name), written])
        self._store_held()

    def forget(self, name: str) -> None:
        """Take nothing of a file for held any more."""
        self._held.pop(name, None)
        self._store_held()

    def _store_held(self) -> None:
        temporary = self.path / f".{HELD_FILE}"
        temporary.write_text(json.dumps(self._held))
        temporary.replace(self.path / HELD_FILE)

    def check(self, file: StoredFile, cut: Cut) -> None:
        """Raise ModelFolderError, and forget the file, when it is not what it should be.

        Of a weights file the tensors are read that `cut` needs; any other is held whole, and read so.
        """
        try:
            if file.tensor_crc32s:
                check_tensors(self.path / file.name, file.tensor_crc32s, cut.needs)
            elif self.held(file.name) == joined([Range(0, file.size_bytes)]):
                self._check_whole(file)
        except ModelFolderError as error:
            self.forget(file.name)
            raise ModelFolderError(f"{file.name} was not fetched as it is in the model: {error}") from error

    def _check_whole(self, file: StoredFile) -> None:
        with (self.path / file.name).open("rb") as opened:
            sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
        if sha256 != file.sha256:
            raise ModelFolderError("its sha256 is another")

    def read(self, name: str, wanted: Range) -> bytes:
        """Bytes that are held."""
        with (self.path / name).open("rb") as file:
            file.seek(wanted.begin)
            return file.read(wanted.end - wanted.begin)


def _disk_bytes(file: Path) -> int:
    """What a file takes on the disk, its holes left out."""
    taken = file.stat()
    # Windows does not say, and st_blocks counts 512 bytes on every other system.
    return getattr(taken, "st_blocks", -(-taken.st_size // 512)) * 512
