"""A checksum for each tensor of a weights file, so that a part of a model can be checked without reading the rest."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from services.model_folder.errors import ModelFolderError
from services.model_folder.safetensors import tensor_places

PIECE_BYTES: Final = 1 << 20


def tensor_crc32s(path: Path) -> dict[str, int]:
    """The checksum of each tensor in a weights file. Raises OSError, and ModelFolderError for no safetensors."""
    places = tensor_places(path)
    with path.open("rb") as file:
        return {name: _crc32(file, *place, on_piece=lambda: None) for name, place in places.items()}


def check_tensors(
    path: Path,
    crc32s: Mapping[str, int],
    needs: Callable[[str], bool],
    on_piece: Callable[[], None] = lambda: None,
) -> None:
    """Read the tensors of the file that `needs` names. Raises ModelFolderError where one is not what it was.

    `on_piece` is called again and again meanwhile, and may raise to end this. A tensor without a checksum is not read.
    """
    try:
        with path.open("rb") as file:
            places = tensor_places(path)
            lost = next((name for name in crc32s if needs(name) and name not in places), None)
            if lost is not None:
                raise ModelFolderError(f"{path.name} has no tensor {lost} any more: run `ullage models add` again")
            for name, place in places.items():
                if name in crc32s and needs(name) and _crc32(file, *place, on_piece=on_piece) != crc32s[name]:
                    raise ModelFolderError(
                        f"tensor {name} in {path.name} is damaged, its checksum is another than when the model was "
                        "prepared: run `ullage models add` again"
                    )
    except OSError as error:
        raise ModelFolderError(f"{path.name} cannot be read: {error.strerror or error}") from error


def _crc32(file: BinaryIO, begin: int, end: int, *, on_piece: Callable[[], None]) -> int:
    file.seek(begin)
    crc32 = 0
    while begin < end and (piece := file.read(min(PIECE_BYTES, end - begin))):
        crc32 = zlib.crc32(piece, crc32)
        begin += len(piece)
        on_piece()
    return crc32
