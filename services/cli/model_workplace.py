"""A folder in the models directory in which one model is made, and the end of those that killed commands left there.

A command holds a lock on its folder while it runs, and whoever comes next removes the folders that nobody holds. They
are as large as a model, and nothing else would ever name them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_UNNAMED: Final = ".new."
"""What a folder is called until it is held: nobody looks for those."""

if sys.platform == "win32":

    def _held(folder: Path) -> int | None:
        """Windows locks no folders, so that what is left there stays."""
        return None
else:
    import fcntl

    def _held(folder: Path) -> int | None:
        """The lock on `folder`, until it is closed or the process ends; None where it cannot be had."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor


@contextlib.contextmanager
def workplace(models_dir: Path, model_id: str) -> Iterator[Path]:
    """A new folder for the work on a model, gone afterwards. What killed commands left of theirs goes before."""
    _clear(models_dir, model_id)
    made = Path(tempfile.mkdtemp(dir=models_dir, prefix=_UNNAMED))
    lock = _held(made)
    folder = made.with_name(f".{model_id}.{made.name.removeprefix(_UNNAMED)}")
    try:
        made.rename(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _clear(models_dir: Path, model_id: str) -> None:
    for left in models_dir.glob(f".{model_id}.*"):
        with contextlib.suppress(OSError):
            lock = _held(left)
            if lock is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
