"""ullage.json: what a prepared model folder held when it was made, so that it can be checked later.

A small JSON document beside config.json:

    {"model": {…}, "files": {"model.safetensors": {"bytes": 812, "sha256": "…", "crc32": {"model.norm.weight": …}}, …}}

`model` is ullage.v1.Model in protobuf's own JSON; `files` are all the files the model is made of. The model's digest
is the sha256 over a line "sha256  name" for each of them, sorted by name: two folders of one digest hold one model.
`crc32` has a checksum for each tensor of a weights file, so that who reads some of them can check these alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format

from services.model_folder.checksums import tensor_crc32s
from services.model_folder.errors import ModelFolderError
from ullage.v1 import model_pb2

MANIFEST_FILE: Final = "ullage.json"
MODEL_FILE_PATTERNS: Final = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""The files a model is made of; others in its folder are not copied, not hashed, and never read."""

WEIGHTS_SUFFIX: Final = ".safetensors"
_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a model as it is on disk."""

    name: str
    size_bytes: int
    sha256: str
    tensor_crc32s: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Of a weights file, a checksum for each tensor; none where nobody took them."""


def model_paths(folder: Path) -> list[Path]:
    """The files in `folder` that the model is made of, sorted by name."""
    found = {path for pattern in MODEL_FILE_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    return sorted(found, key=lambda path: path.name)


def hash_files(folder: Path, on_bytes: Callable[[int], None] = lambda _: None) -> tuple[StoredFile, ...]:
    """The model's files, each read once; `on_bytes` hears how many more bytes were read."""
    try:
        return tuple(_hashed(path, on_bytes) for path in model_paths(folder))
    except OSError as error:
        raise ModelFolderError(f"{error.filename or folder} cannot be read: {error.strerror or error}") from error


def _hashed(path: Path, on_bytes: Callable[[int], None]) -> StoredFile:
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
            on_bytes(len(chunk))
    return StoredFile(path.name, size_bytes, digest.hexdigest(), _tensor_crc32s(path))


def _tensor_crc32s(path: Path) -> dict[str, int]:
    # What is wrong with a file that is no safetensors is said where it is weighed.
    with contextlib.suppress(ModelFolderError):
        return tensor_crc32s(path) if path.suffix == WEIGHTS_SUFFIX else {}
    return {}


def digest_of(files: Sequence[StoredFile]) -> str:
    """The digest of a model made of `files`, in hex."""
    lines = (f"{file.sha256}  {file.name}\n" for file in sorted(files, key=lambda file: file.name))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def write(folder: Path, model: model_pb2.Model, files: Sequence[StoredFile]) -> None:
    """Write ullage.json, whole or not at all."""
    document = {
        "model": json_format.MessageToDict(model),
        "files": {file.name: _entry(file) for file in files},
    }
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{MANIFEST_FILE}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(folder / MANIFEST_FILE)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _entry(file: StoredFile) -> dict[str, Any]:
    checksums = {"crc32": dict(file.tensor_crc32s)} if file.tensor_crc32s else {}
    return {"bytes": file.size_bytes, "sha256": file.sha256, **checksums}


def _stored(name: str, entry: Any) -> StoredFile:
    checksums = {str(tensor): int(crc32) for tensor, crc32 in entry.get("crc32", {}).items()}
    return StoredFile(name, int(entry["bytes"]), str(entry["sha256"]), checksums)


def read(folder: Path) -> tuple[model_pb2.Model, tuple[StoredFile, ...]]:
    """What ullage.json says. Raises ModelFolderError where there is none, or it is none of ours."""
    try:
        document: Any = json.loads((folder / MANIFEST_FILE).read_bytes())
        model = json_format.ParseDict(document["model"], model_pb2.Model(), ignore_unknown_fields=True)
        files = tuple(_stored(name, entry) for name, entry in document["files"].items())
    except FileNotFoundError as error:
        raise ModelFolderError(
            f"{folder.name or folder} has no {MANIFEST_FILE}, so it is no prepared model: run `ullage models add`"
        ) from error
    except OSError as error:
        raise ModelFolderError(f"{MANIFEST_FILE} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise ModelFolderError(
            f"{MANIFEST_FILE} in {folder.name or folder} is damaged: run `ullage models add` again"
        ) from error
    return model, files
