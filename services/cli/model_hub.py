"""A model's files from Hugging Face's hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
from huggingface_hub.utils.tqdm import disable_progress_bars

from services import model_folder
from services.cli.failure import CommandError, ExitCode


def snapshot(name: str, patterns: Sequence[str] = model_folder.MODEL_FILE_PATTERNS) -> Path:
    """The folder with the files of `owner/name` that match one of `patterns`, fetched where the hub's cache lacks them.

    Raises CommandError, saying what to do, when they cannot be had.
    """
    try:
        # Its own bars would run through ours.
        disable_progress_bars()
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except huggingface_hub.errors.GatedRepoError as error:
        raise _unavailable(
            name, "its owner asks for consent: give it on the model's page, then `hf auth login`"
        ) from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        raise _unavailable(
            name, "there is no such model, or it is private: see its page, or `hf auth login`"
        ) from error
    except (huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.HfHubHTTPError, OSError) as error:
        raise _unavailable(
            name, "the hub cannot be reached: try again when it can, or copy the model's folder here and add that"
        ) from error


def _unavailable(name: str, why: str) -> CommandError:
    return CommandError(f"hf:{name}: {why}", ExitCode.UNAVAILABLE, reason="SOURCE_UNAVAILABLE")
