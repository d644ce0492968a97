"""A GGUF file: its metadata, and where its tensors are."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC: Final = b"GGUF"
VERSIONS: Final = frozenset({2, 3})
DIMENSIONS_MAX: Final = 4

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: Final[Mapping[int, str]] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_ALIGNMENT_BYTES: Final = 32


class GgufError(Exception):
    """The file cannot be converted; str() says what is wrong with it and what to do."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the file's header lists it."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Outermost first, the reverse of GGUF's own order."""
    begin: int
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file that is whole."""

    path: Path
    metadata: Mapping[str, Any]
    """Strings, numbers, and lists of them."""
    tensors: Mapping[str, TensorInfo]

    def read(self, tensor: TensorInfo) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as stored."""
        with self.path.open("rb") as file:
            file.seek(tensor.begin)
            return np.frombuffer(file.read(tensor.stored_bytes), dtype=np.uint8)


def open_gguf(path: Path) -> GgufFile:
    """Read the header of `path`. Raises GgufError where it is no GGUF file or not whole."""
    try:
        with path.open("rb") as file:
            return _Header(path, file).parse()
    except OSError as error:
        raise GgufError(f"{path.name} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise GgufError(f"{path.name} is damaged: its header holds text that is none; copy it again") from error


class _Header:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._file_bytes = os.fstat(file.fileno()).st_size

    def parse(self) -> GgufFile:
        if self._file.read(len(MAGIC)) != MAGIC:
            raise GgufError(f"{self._path.name} is no GGUF file: it does not begin with GGUF")
        version = self._number("<I")
        if version not in VERSIONS:
            raise GgufError(f"{self._path.name} is GGUF version {version}: convert it to version 3 with llama.cpp")
        tensor_count, pair_count = self._number("<Q"), self._number("<Q")
        metadata = dict(self._pair() for _ in range(pair_count))
        alignment = metadata.get("general.alignment", _ALIGNMENT_BYTES)
        if type(alignment) is not int or alignment <= 0:
            raise self._damaged(f"alignment is {alignment!r}")
        unplaced = [self._tensor() for _ in range(tensor_count)]
        data_begin = math.ceil(self._file.tell() / alignment) * alignment
        return GgufFile(self._path, metadata, self._placed(unplaced, data_begin))

    def _placed(self, unplaced: list[TensorInfo], data_begin: int) -> dict[str, TensorInfo]:
        tensors = {
            info.name: TensorInfo(info.name, info.kind, info.shape, data_begin + info.begin, info.stored_bytes)
            for info in unplaced
        }
        if len(tensors) != len(unplaced):
            raise self._damaged("a tensor is listed twice")
        expected_bytes = max((info.begin + info.stored_bytes for info in tensors.values()), default=data_begin)
        if self._file_bytes < expected_bytes:
            raise GgufError(
                f"{self._path.name} has {self._file_bytes:,} of {expected_bytes:,} bytes: copy or download it again"
            )
        return tensors

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._number("<I"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0]
        raise self._damaged(f"its metadata has a value of type {kind}")

    def _array(self) -> list[Any]:
        kind, count = self._number("<I"), self._number("<Q")
        if kind in _SCALARS:
            return self._numbers(kind, count)
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        raise self._damaged(f"its metadata has an array of type {kind}")

    def _tensor(self) -> TensorInfo:
        """A tensor's entry, its begin counted from the start of the data."""
        name, dimensions = self._string(), self._number("<I")
        if not 0 < dimensions <= DIMENSIONS_MAX:
            raise self._damaged(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed([self._number("<Q") for _ in range(dimensions)]))
        if 0 in shape:
            raise self._damaged(f"tensor {name} holds nothing")
        kind_number, begin = self._number("<I"), self._number("<Q")
        try:
            kind = GGMLQuantizationType(kind_number)
        except ValueError as error:
            raise self._damaged(f"tensor {name} is of type {kind_number}, which is not known") from error
        block_numbers, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_numbers:
            raise self._damaged(f"the rows of tensor {name} are no whole blocks of {kind.name}")
        return TensorInfo(name, kind, shape, begin, math.prod(shape) // block_numbers * block_bytes)

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode()

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[kind])
        numbers: list[Any] = np.frombuffer(self._bytes(count * dtype.itemsize), dtype=dtype).tolist()
        return numbers

    def _number(self, form: str) -> int:
        (number,) = struct.unpack(form, self._bytes(struct.calcsize(form)))
        return int(number)

    def _bytes(self, count: int) -> bytes:
        # Checked before reading: a damaged length must not become an allocation.
        if count > self._file_bytes - self._file.tell():
            raise GgufError(
                f"{self._path.name} ends within its header, after {self._file_bytes:,} bytes: copy or download it again"
            )
        return self._file.read(count)

    def _damaged(self, what: str) -> GgufError:
        return GgufError(f"{self._path.name} is damaged: {what}; copy or download it again")
