"""The models a runner has on its disk."""

from __future__ import annotations

from pathlib import Path

from services.model_folder import MANIFEST_FILE, ModelFolderError


def present(models_dir: Path) -> tuple[str, ...]:
    """The ids of the models prepared under `models_dir`, in order."""
    return tuple(sorted(manifest.parent.name for manifest in models_dir.glob(f"*/{MANIFEST_FILE}")))


def has(models_dir: Path, model_id: str) -> bool:
    """Whether the model is prepared here."""
    return model_id in present(models_dir)


def folder(models_dir: Path, model_id: str) -> Path:
    """Where the model is, if it is there. Raises ModelFolderError for an id that would lead elsewhere."""
    if Path(model_id).name != model_id or model_id == "..":
        raise ModelFolderError(f"{model_id!r} cannot be the name of a model's folder")
    return models_dir / model_id
