"""A model's folder on a machine: config.json, *.safetensors, tokenizer files, and ullage.json, its manifest.

Rules these modules live by:
- Bytes and parameters are summed from the files' headers; no tensor is ever loaded, and MLX is not needed.
- A folder is believed only where it adds up: every file whole, every tensor there and of the shape config.json gives.
- Whatever is wrong is a ModelFolderError that names the file or tensor and says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from services.model_folder import description, formulas, manifest
from services.model_folder.admission import ADMITTED, REFUSED, Architecture, refusal
from services.model_folder.by_name import Part, is_matrix_of_head, is_unused, part_of
from services.model_folder.checksums import check_tensors
from services.model_folder.errors import ModelFolderError
from services.model_folder.manifest import (
    MANIFEST_FILE,
    MODEL_FILE_PATTERNS,
    StoredFile,
    digest_of,
    hash_files,
    model_paths,
)
from ullage.v1 import model_pb2

ADMITTED_MODEL_TYPES: Final = frozenset(ADMITTED)
"""Architectures a runner can split, as config.json's model_type; any other is refused by name."""

__all__ = [
    "ADMITTED",
    "ADMITTED_MODEL_TYPES",
    "MANIFEST_FILE",
    "MODEL_FILE_PATTERNS",
    "REFUSED",
    "Architecture",
    "ModelFolderError",
    "Part",
    "StoredFile",
    "check",
    "check_tensors",
    "computed",
    "describe",
    "digest_of",
    "hash_files",
    "is_matrix_of_head",
    "is_unused",
    "model_paths",
    "part_of",
    "read_manifest",
    "refusal",
    "verify",
    "write_manifest",
]


def describe(folder: Path, *, model_id: str, source: str, files: Sequence[StoredFile] | None = None) -> model_pb2.Model:
    """The model in `folder` with what each part weighs, and its digest.

    `files` are the folder's files where they are hashed already; otherwise each is read once for the digest.
    Raises ModelFolderError when something is missing, cut short or not understood.
    """
    model = description.weigh(folder, model_id=model_id, source=source, digest="")
    model.digest = digest_of(hash_files(folder) if files is None else files)
    return model


def computed(folder: Path, *, model_id: str, source: str) -> model_pb2.Model:
    """The model that the config.json in `folder` describes, before its weights are there; marked as computed.

    Raises ModelFolderError where config.json says too little, or for a type there is no formula for.
    """
    return formulas.computed(folder, model_id=model_id, source=source, digest=digest_of(hash_files(folder)))


def check(folder: Path) -> None:
    """Return when `folder` holds a whole model that can run, as far as headers tell; else raise ModelFolderError."""
    description.weigh(folder, model_id="", source="", digest="")


def write_manifest(folder: Path, model: model_pb2.Model, files: Sequence[StoredFile] | None = None) -> None:
    """Write ullage.json for `model`, as `describe` returned it. `files` as in `describe`.

    Raises ModelFolderError when the folder's files are no longer those that were described.
    """
    stored = tuple(hash_files(folder) if files is None else files)
    if digest_of(stored) != model.digest:
        raise ModelFolderError(f"the files of {folder.name or folder} changed while they were read: try again")
    manifest.write(folder, model, stored)


def read_manifest(folder: Path) -> model_pb2.Model:
    """The model that was prepared in `folder`. Raises ModelFolderError when none was."""
    model, _ = manifest.read(folder)
    return model


def verify(folder: Path, model: model_pb2.Model, *, deep: bool = False) -> None:
    """Return when `folder` holds `model`, whole; otherwise raise ModelFolderError with what to do.

    Cheap: sizes against the manifest, the files' headers, and the digest the manifest recorded.
    With `deep` every file is read and hashed again, which also finds bytes that changed in place.
    """
    prepared, files = manifest.read(folder)
    if prepared.digest != model.digest:
        raise ModelFolderError(
            f"{folder.name or folder} holds another model of that name (digest {prepared.digest[:12]}, not "
            f"{model.digest[:12]}): run `ullage models add` on this node with the same source"
        )
    for file in files:
        _check_size(folder, file)
    if digest_of(files) != model.digest:
        raise ModelFolderError(f"{MANIFEST_FILE} in {folder.name or folder} is damaged: run `ullage models add` again")
    description.weigh(folder, model_id=model.model_id, source=model.source, digest=model.digest)
    if deep:
        _check_hashes(files, hash_files(folder))


def _check_size(folder: Path, file: StoredFile) -> None:
    try:
        size_bytes = (folder / file.name).stat().st_size
    except OSError as error:
        raise ModelFolderError(f"{file.name} is gone from {folder.name}: run `ullage models add` again") from error
    if size_bytes != file.size_bytes:
        raise ModelFolderError(
            f"{file.name} has {size_bytes:,} of {file.size_bytes:,} bytes: run `ullage models add` again"
        )


def _check_hashes(recorded: Sequence[StoredFile], found: Sequence[StoredFile]) -> None:
    for file in sorted(set(recorded) ^ set(found), key=lambda file: file.name):
        raise ModelFolderError(
            f"{file.name} is not what it was when the model was added: run `ullage models add` again"
        )
