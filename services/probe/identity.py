"""Who this node is.

The node's id lives in `<state-dir>/node_id`: 32 lower-case hexadecimal digits and a newline, written once and
the same after a reboot. Probe and runner of one node read the same file, and whichever comes first makes it:
the whole content is written beside it and then linked into place, which fails where the file is there by
now. So nobody ever reads half an id, and two that start at once agree.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import socket
import sys
import uuid
from pathlib import Path
from typing import Final

from services.probe.darwin import sysctl
from services.probe.darwin.sampler import LIBRARY
from services.probe.darwin.sysctl import Sysctl
from ullage.v1 import node_pb2

FILE_NAME: Final = "node_id"

_NODE_ID: Final = re.compile(r"[0-9a-f]{32}")

_PLACEHOLDERS: Final = frozenset(
    {"", "default string", "not applicable", "not specified", "system product name", "to be filled by o.e.m.", "none"}
)
"""What firmware says when its maker filled nothing in."""


class IdentityError(Exception):
    """The node's id can be neither read nor made; the message says what to do."""


def node_id(state_dir: Path) -> str:
    """The node's id, made if there is none. Raises IdentityError."""
    path = state_dir / FILE_NAME
    try:
        if not path.exists():
            _make(path)
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise IdentityError(
            f"cannot keep this node's id in {path} ({error.strerror}): "
            "make the folder writable, or choose another with --state-dir"
        ) from error
    if not _NODE_ID.fullmatch(text.removesuffix("\n")):
        raise IdentityError(
            f"{path} holds no node id (32 hexadecimal digits): restore it, or delete it to make this a new node"
        )
    return text.removesuffix("\n")


def _make(path: Path) -> None:
    """Write a new id to `path`, unless somebody else does so first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("x", encoding="ascii") as file:
            file.write(f"{uuid.uuid4().hex}\n")
            file.flush()
            os.fsync(file.fileno())
        path.hardlink_to(draft)
    except FileExistsError:
        return  # The runner was faster; its id is this node's.
    finally:
        draft.unlink(missing_ok=True)


def identity(state_dir: Path, name: str | None, version: str, root: Path) -> node_pb2.NodeIdentity:
    """The node as it is in this boot; what the machine does not say is absent. Raises IdentityError."""
    return node_pb2.NodeIdentity(
        node_id=node_id(state_dir),
        boot_id=uuid.uuid4().hex,
        friendly_name=name or socket.gethostname() or None,
        model=_mac(sysctl.MODEL) or _model(root),
        chip=_mac(sysctl.CHIP) or _chip(root),
        os=_os(),
        ullage_version=version,
    )


def _mac(name: str) -> str | None:
    """What a Mac says of itself, None elsewhere."""
    if sys.platform != "darwin":
        return None
    try:
        return Sysctl(ctypes.CDLL(LIBRARY)).text(name)
    except (OSError, AttributeError):
        return None


def _model(root: Path) -> str | None:
    """The machine's name by its firmware: x86 has DMI, ARM boards a device tree."""
    for file in ("sys/class/dmi/id/product_name", "proc/device-tree/model"):
        text = _line(root / file)
        if text.lower() not in _PLACEHOLDERS:
            return text
    return None


def _chip(root: Path) -> str | None:
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(\S.*)$", text, re.MULTILINE)
    return found[1].strip() if found else None


def _os() -> str | None:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]}"
    return f"{platform.system()} {platform.release()}".strip() or None


def _line(path: Path) -> str:
    """The file's text without what ends it, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""
