"""What the shards of this machine compute on, and in which form they hold their weights.

On a CPU: 4-byte floats throughout, dequantised at load unless told otherwise, because MLX's half-precision
and quantised products are ten to a hundred times slower there. On a GPU: the model's own form.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from typing import Any, Final, Literal

# Before MLX is imported. What it compiles at run time needs a compiler and loads shared objects from a
# predictable place in /tmp, gains nothing measurable on a CPU, and would make two nodes' results differ.
if sys.platform == "linux":
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

import mlx.core as mx

from services.runner.shard import blas

WeightChoice = Literal["auto", "float32", "stored"]
CACHE_BYTES_MAX: Final = 32 * 1024 * 1024
"""Freed buffers MLX may keep for reuse: enough for a step's, little enough for resident bytes to be honest."""

MAPPED_BYTES_MIN: Final = 1 << 20
"""Buffers from this size on are mapped each by itself, and go back to the system as they are freed. The C library
raises the bound to 32 MiB by itself, and then caches that are moved when a sequence joins others leave holes that
nothing fits into, as large as all of them. A lower one costs time: a chunk's activations are below it.
"""

_M_MMAP_THRESHOLD: Final = -3


@dataclass(frozen=True)
class Device:
    """`kind` is "cpu", "metal" or "cuda"; `limit_bytes` what MLX recommends to stay within, where it does."""

    kind: str
    name: str | None
    limit_bytes: int | None

    @property
    def compute_element_bytes(self) -> int:
        """Bytes of one element of activations and KV cache."""
        return 4 if self.kind == "cpu" else 2

    def weight_form(self, choice: WeightChoice) -> Literal["float32", "stored"]:
        """The form weights are held in when `choice` was asked for."""
        if choice != "auto":
            return choice
        return "float32" if self.kind == "cpu" else "stored"


def this_device() -> Device:
    """The device MLX uses here. Sets MLX's cache of freed buffers to CACHE_BYTES_MAX, and MAPPED_BYTES_MIN."""
    mx.set_cache_limit(CACHE_BYTES_MAX)
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
    facts = mx.device_info()
    name: Any = facts.get("device_name")
    limit: Any = facts.get("max_recommended_working_set_size")
    if mx.default_device().type == mx.cpu:
        return Device("cpu", name, None)
    return Device("metal" if mx.metal.is_available() else "cuda", name, limit)


def multiplies_with(loaded: blas.Loaded) -> str:
    """The name of what MLX really multiplies with: that of `loaded`, unless MLX was found not to call it."""
    before = loaded.products()
    square = mx.array([[1.0, 2.0], [3.0, 4.0]])
    product = square @ square
    mx.eval(product)
    if product.tolist() != [[7.0, 10.0], [15.0, 22.0]]:
        raise RuntimeError(f"{loaded.name} multiplies wrongly: start with {blas.CHOICE_VARIABLE}={blas.NONE}")
    if before is not None and loaded.products() == before:
        return f"{blas.NONE} ({loaded.name} is loaded, but MLX does not call it)"
    return loaded.name


def rehearse() -> None:
    """Compute what a model's layer is made of, in small.

    What the runtime takes for this, once and for good, is then in the process before the first layer is, and in what
    a runner says that its shards cost.
    """
    rows, group = 64, 32
    weights = mx.zeros((rows, rows))
    weights[:group] = mx.dequantize(*mx.quantize(mx.ones((group, rows)), group_size=group), group_size=group)
    hidden = mx.fast.rms_norm(weights[None], mx.ones((rows,)), 1e-5) @ weights.T
    heads = hidden.reshape(1, rows, 2, group).transpose(0, 2, 1, 3)
    heads = mx.fast.rope(heads, group, traditional=False, base=1e4, scale=1.0, offset=0)
    attended = mx.fast.scaled_dot_product_attention(heads, heads, heads, scale=1.0, mask="causal")
    mx.eval(attended * mx.sigmoid(attended))
    mx.clear_cache()
