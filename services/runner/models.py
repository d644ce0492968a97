"""The models a runner has on its disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from services.model_folder import MANIFEST_FILE, ModelFolderError, check_tensors, manifest
from services.runner.partial_model import Cut
from ullage.v1 import model_pb2


def present(models_dir: Path) -> tuple[str, ...]:
    """The ids of the models prepared under `models_dir`, in order."""
    return tuple(sorted(found.parent.name for found in models_dir.glob(f"*/{MANIFEST_FILE}")))


def has(models_dir: Path, model_id: str) -> bool:
    """Whether the model is prepared here."""
    return model_id in present(models_dir)


def folder(models_dir: Path, model_id: str) -> Path:
    """Where the model is, if it is there. Raises ModelFolderError for an id that would lead elsewhere."""
    if Path(model_id).name != model_id or model_id == "..":
        raise ModelFolderError(f"{model_id!r} cannot be the name of a model's folder")
    return models_dir / model_id


def check(folder: Path, model: model_pb2.Model, shard: model_pb2.Shard, on_piece: Callable[[], None]) -> None:
    """Read the weights a shard will load. Raises ModelFolderError where one is not what it was when it was prepared.

    Reading them twice costs little: the second time they are in memory. `on_piece` is called meanwhile, and may raise.
    """
    cut = Cut.of(model, shard)
    for file in manifest.read(folder)[1]:
        # A model prepared by an earlier release has no checksums.
        if file.tensor_crc32s:
            check_tensors(folder / file.name, file.tensor_crc32s, cut.needs, on_piece)
