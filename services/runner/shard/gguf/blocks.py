"""GGUF's blocks of quantised numbers, repacked as MLX's groups: the same integers, scales and offsets.

A block of 32 numbers has a float16 scale d and integers q. MLX keeps q unsigned, packed in uint32, with a scale and
a bias for each group, and means q * scale + bias: Q4_1 is that already, Q4_0 and Q8_0 are with bias -8d and -128d.
Multiplying d by a power of two is exact, so no number changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

GROUP_SIZE: Final = 32
BITS: Final[Mapping[Kind, int]] = {Kind.Q4_0: 4, Kind.Q4_1: 4, Kind.Q8_0: 8}
"""The quantisations MLX can hold as they are, with the bits of a number."""
FLOATS: Final[Mapping[Kind, str]] = {Kind.F16: "<f2", Kind.F32: "<f4"}
UNDERSTOOD: Final = frozenset(BITS) | frozenset(FLOATS)

Array = npt.NDArray[Any]
_Bytes = npt.NDArray[np.uint8]


def part_shapes(kind: Kind, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What `unpack` will return: dtype (numpy's name) and shape of each part."""
    if kind in FLOATS:
        return {"weight": (FLOATS[kind], shape)}
    *rows, columns = shape
    groups = ("<f2", (*rows, columns // GROUP_SIZE))
    return {"weight": ("<u4", (*rows, columns * BITS[kind] // 32)), "scales": groups, "biases": groups}


def part_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a part of that dtype and shape."""
    return math.prod(shape) * np.dtype(dtype).itemsize


def unpack(kind: Kind, stored: _Bytes, shape: tuple[int, ...]) -> dict[str, Array]:
    """The parts of a tensor of `kind`: weight, and for a quantised one scales and biases.

    Raises OverflowError for a scale that is no finite number, or so large that its bias is none in float16.
    """
    if kind in FLOATS:
        return {"weight": stored.view(FLOATS[kind]).reshape(shape)}
    *rows, columns = shape
    blocks = stored.reshape(*rows, columns // GROUP_SIZE, -1)
    match kind:
        case Kind.Q4_0:
            scales = _halves(blocks, 0)
            biases, packed = _scaled(scales, -8), _repacked_nibbles(blocks[..., 2:])
        case Kind.Q4_1:
            scales, biases = _halves(blocks, 0), _halves(blocks, 2)
            packed = _repacked_nibbles(blocks[..., 4:])
        case _:
            scales = _halves(blocks, 0)
            # Flipping the sign bit adds 128.
            biases, packed = _scaled(scales, -128), np.ascontiguousarray(blocks[..., 2:] ^ 0x80)
    if not (np.isfinite(scales).all() and np.isfinite(biases).all()):
        raise OverflowError
    weight = packed.reshape(*rows, -1).view("<u4")
    return {"weight": weight, "scales": scales, "biases": biases}


def _halves(blocks: _Bytes, begin: int) -> Array:
    return np.ascontiguousarray(blocks[..., begin : begin + 2]).view("<f2")[..., 0]


def _scaled(scales: Array, factor: int) -> Array:
    # What is not finite afterwards is refused by the caller.
    with np.errstate(over="ignore", invalid="ignore"):
        biases: Array = (scales.astype(np.float32) * factor).astype("<f2")
    return biases


def _repacked_nibbles(nibbles: _Bytes) -> _Bytes:
    """16 bytes that hold numbers i and i + 16, as 16 bytes that hold numbers 2i and 2i + 1."""
    numbers = np.concatenate((nibbles & 0x0F, nibbles >> 4), axis=-1)
    packed: _Bytes = numbers[..., 0::2] | numbers[..., 1::2] << 4
    return packed


def unpermuted(part: Array, heads: int) -> Array:
    """Rows of a query or key projection in Hugging Face's order, from GGUF's, which pairs them for its own rotary."""
    rows, *rest = part.shape
    return part.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(part.shape)
