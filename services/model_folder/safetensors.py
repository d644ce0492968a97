"""The header of a safetensors file: which tensors it holds, without reading one.

The form: 8 bytes that say how long the header is (little-endian), a JSON object of that length, the tensors' bytes.
A header is believed only where it adds up: each tensor's bytes follow from its type and shape, they lie one after the
other without a gap, and the file ends where the last one does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeGuard

from services.model_folder.errors import ModelFolderError

HEADER_BYTES_MAX: Final = 100_000_000
"""The longest header the format allows; a longer one is damage."""

DTYPE_BYTES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
_LENGTH_BYTES: Final = 8
_DIMENSIONS_MAX: Final = 8
_SIZE_MAX: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as its file's header describes it."""

    file_name: str
    dtype: str
    shape: tuple[int, ...]
    stored_bytes: int


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of the file by name. Raises ModelFolderError where it is cut short, too long, or no safetensors."""
    return {name: tensor for name, (tensor, _) in _read(path)[1].items()}


def tensor_places(path: Path) -> dict[str, tuple[int, int]]:
    """Where in the file each tensor is, [begin, end), in the order in which they lie. Raises as `read_header`."""
    data_at, entries = _read(path)
    places = sorted((begin, end, name) for name, (_, (begin, end)) in entries.items())
    return {name: (data_at + begin, data_at + end) for begin, end, name in places}


def _read(path: Path) -> tuple[int, dict[str, tuple[Tensor, tuple[int, int]]]]:
    """Where the tensors' bytes begin, and each tensor with its place among them."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = _header_bytes(path.name, file.read(_LENGTH_BYTES), file_bytes)
            entries = _entries(path.name, file.read(header_bytes))
    except OSError as error:
        raise ModelFolderError(f"{path.name} cannot be read: {error.strerror or error}") from error
    data_bytes = _checked_layout(path.name, entries)
    _check_length(path.name, file_bytes, _LENGTH_BYTES + header_bytes + data_bytes)
    return _LENGTH_BYTES + header_bytes, entries


def _header_bytes(file_name: str, prefix: bytes, file_bytes: int) -> int:
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < _LENGTH_BYTES or not 0 < header_bytes <= HEADER_BYTES_MAX:
        raise _damaged(file_name, "it does not begin like a safetensors file")
    if _LENGTH_BYTES + header_bytes > file_bytes:
        raise ModelFolderError(
            f"{file_name} has {file_bytes:,} bytes and its header alone needs {_LENGTH_BYTES + header_bytes:,}: "
            "copy it again"
        )
    return header_bytes


def _entries(file_name: str, header: bytes) -> dict[str, tuple[Tensor, tuple[int, int]]]:
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _damaged(file_name, "its header is no JSON") from error
    if not isinstance(parsed, dict):
        raise _damaged(file_name, "its header is no JSON object")
    return {name: _entry(file_name, name, entry) for name, entry in parsed.items() if name != "__metadata__"}


def _entry(file_name: str, name: str, entry: Any) -> tuple[Tensor, tuple[int, int]]:
    """The tensor and [begin, end) of its bytes in the data."""
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _damaged(file_name, f"tensor {name} is of type {dtype!r}, which is not known")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(file_name, f"the header's entry for tensor {name} makes no sense")
    begin, end = offsets
    stored_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != stored_bytes:
        raise _damaged(file_name, f"tensor {name} needs {stored_bytes:,} bytes and is given {end - begin:,}")
    return Tensor(file_name, dtype, tuple(shape), stored_bytes), (begin, end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _DIMENSIONS_MAX
        and all(type(size) is int and 0 <= size <= _SIZE_MAX for size in value)
    )


def _checked_layout(file_name: str, entries: Mapping[str, tuple[Tensor, tuple[int, int]]]) -> int:
    """The length of the data in bytes."""
    end_before = 0
    for name, (_, (begin, end)) in sorted(entries.items(), key=lambda item: item[1][1]):
        if begin != end_before:
            raise _damaged(file_name, f"the bytes of tensor {name} do not follow those of the one before it")
        end_before = end
    return end_before


def _check_length(file_name: str, file_bytes: int, expected_bytes: int) -> None:
    if file_bytes < expected_bytes:
        raise ModelFolderError(f"{file_name} has {file_bytes:,} of {expected_bytes:,} bytes: copy it again")
    if file_bytes > expected_bytes:
        raise _damaged(file_name, f"it has {file_bytes - expected_bytes:,} bytes more than its header lists")


def _damaged(file_name: str, what: str) -> ModelFolderError:
    return ModelFolderError(f"{file_name} is damaged: {what}; copy it again")
