"""Who this node is: one id on its disk, made by whichever of its processes starts first."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import uuid
from pathlib import Path
from typing import Final

NODE_ID_FILE: Final = "node_id"

_NODE_ID: Final = re.compile(r"[0-9a-f]{32}")


class IdentityError(Exception):
    """The node's id cannot be read or made; the message says what to do."""


def node_id(state_dir: Path) -> str:
    """The id kept in `state_dir`, made now if there is none.

    Probe and runner may both be making it: the file appears whole or not at all, and the first one stays.
    """
    path = state_dir / NODE_ID_FILE
    try:
        if not path.exists():
            _make(path)
        kept = path.read_text(errors="replace").strip()
    except OSError as error:
        raise IdentityError(
            f"the node's id cannot be kept in {state_dir}: {error.strerror}; choose another --state-dir"
        ) from error
    if not _NODE_ID.fullmatch(kept):
        raise IdentityError(
            f"{path} does not hold a node id (32 hex digits): restore it, or delete it to join as a new node"
        )
    return kept


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".node_id-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(uuid.uuid4().hex + "\n")
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link does not replace the one that was there first.
        with contextlib.suppress(FileExistsError):
            Path(path).hardlink_to(temporary)
    finally:
        Path(temporary).unlink()
