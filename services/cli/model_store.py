"""The models directory of a machine: one folder for each prepared model, which appears whole or not at all."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import platformdirs

from services import model_folder
from services.cli.failure import CommandError, ExitCode
from services.cli.model_progress import Steps
from services.cli.model_source import Source, hashed
from services.cli.model_workplace import workplace
from services.model_folder import ModelFolderError
from ullage.v1 import model_pb2

_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_NOT_IN_ID: Final = re.compile(r"[^a-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is ready on this machine."""

    model: model_pb2.Model
    folder: Path
    fresh: bool
    """It was made just now, and not there before."""


def default_models_dir() -> Path:
    """Where models lie when nothing else is said; the runner looks there too."""
    return platformdirs.user_data_path("ullage") / "models"


def model_id_of(source: Source, name: str | None) -> str:
    """The id a model gets: `name`, lower-cased, or one made of the source's own. Raises CommandError (USAGE)."""
    if name is None:
        return _NOT_IN_ID.sub("-", source.default_id.lower()).lstrip("._-")[:100] or "model"
    if not _ID.fullmatch(name.lower()):
        raise CommandError(
            f"--name {name!r} cannot be a model's id: use a-z, 0-9, '.', '_' and '-', the first a letter or digit, "
            "100 at most",
            ExitCode.USAGE,
        )
    return name.lower()


def prepare(source: Source, models_dir: Path, model_id: str, steps: Steps) -> Prepared:
    """The model of `source` under `models_dir`, made unless it is there already.

    Raises CommandError when the source holds no model that can run, or another model has the id.
    """
    folder = models_dir / model_id
    try:
        standing = _standing(folder)
        if standing is None:
            return Prepared(_make(source, models_dir, model_id, steps), folder, fresh=True)
        if source.is_already(folder, standing, steps):
            return Prepared(standing, folder, fresh=False)
    except ModelFolderError as error:
        raise CommandError(str(error), reason="MODEL_INVALID") from error
    except OSError as error:
        raise CommandError(
            f"{error.filename or models_dir}: {error.strerror or error}; see that {models_dir} can be written and "
            "its disk has room",
            reason="DISK",
        ) from error
    raise CommandError(
        f"another model is called {model_id!r} on this machine (from {standing.source}): choose another id with "
        f"--name, or remove that one first with `ullage models remove {model_id} --files`",
        reason="MODEL_ID_TAKEN",
    )


def remove(models_dir: Path, model_id: str) -> bool:
    """Remove the prepared folder of a model; False when there is none."""
    folder = models_dir / model_id
    if not _ID.fullmatch(model_id) or not (folder / model_folder.MANIFEST_FILE).is_file():
        return False
    with workplace(models_dir, model_id) as temporary:
        # Renamed first, so that nobody finds half of it.
        folder.rename(temporary / "removed")
    return True


def _standing(folder: Path) -> model_pb2.Model | None:
    """The whole model in `folder`, or None where there is none, or one that is damaged and may be replaced."""
    if not folder.exists():
        return None
    if not (folder / model_folder.MANIFEST_FILE).is_file():
        raise CommandError(
            f"{folder} is there and was not made by `ullage models add`: move it away, or choose another --name",
            reason="MODEL_ID_TAKEN",
        )
    try:
        model = model_folder.read_manifest(folder)
        model_folder.verify(folder, model)
    except ModelFolderError:
        return None
    return model


def _make(source: Source, models_dir: Path, model_id: str, steps: Steps) -> model_pb2.Model:
    models_dir.mkdir(parents=True, exist_ok=True)
    with workplace(models_dir, model_id) as temporary:
        # A level deeper than models lie, so that no runner takes it for one.
        made = temporary / "made"
        source.fill(made, steps)
        files = hashed(made, steps, "checksums")
        model = model_folder.describe(made, model_id=model_id, source=source.label(steps), files=files)
        model_folder.write_manifest(made, model, files)
        _put(made, models_dir / model_id, temporary)
    return model


def _put(made: Path, folder: Path, temporary: Path) -> None:
    """Let `made` be `folder`; a damaged model that was there goes to `temporary`."""
    if folder.exists():
        folder.rename(temporary / "replaced")
    made.rename(folder)
    shutil.rmtree(temporary / "replaced", ignore_errors=True)
