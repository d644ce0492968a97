"""What the device can do, measured once and quickly: what one token costs, and what a prompt costs.

Measured as a model would use it, with the same products and the small steps between them, for a figure from a data
sheet is not what a layer gets. The quickest of several tries counts: whatever else runs here can only make one slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import mlx.core as mx

SECONDS_MAX: Final = 0.4
"""For how long each of the two is tried again."""

TRIES_MIN: Final = 3
"""However long they take: a single one may have waited for a processor most of its time."""

_SQUARE: Final = 1024
_HIDDEN: Final = 1024
_INNER: Final = 2048
_LAYERS: Final = 6
"""Together 144 MiB of weights: more than a processor's caches hold."""


class Speed(NamedTuple):
    """`decode_bytes_per_second` of weights read for one token; `flops_per_second` of a large matrix product."""

    decode_bytes_per_second: int
    flops_per_second: float


def measured(element_bytes: int) -> Speed:
    """The speed with numbers of `element_bytes`, 2 or 4. Takes about a second; holds 144 MiB meanwhile."""
    dtype = mx.float32 if element_bytes == 4 else mx.float16
    read_bytes = _LAYERS * 3 * _HIDDEN * _INNER * element_bytes
    speed = Speed(int(read_bytes / _quickest(_token(dtype))), 2 * _SQUARE**3 / _quickest(_product(dtype)))
    mx.clear_cache()
    return speed


def _token(dtype: mx.Dtype) -> Callable[[], mx.array]:
    """One token through layers that are all feed-forward."""
    layers = [
        [mx.full(shape, 1e-3, dtype=dtype) for shape in ((_INNER, _HIDDEN), (_INNER, _HIDDEN), (_HIDDEN, _INNER))]
        for _ in range(_LAYERS)
    ]
    mx.eval(layers)
    scale, token = mx.ones((_HIDDEN,), dtype=dtype), mx.ones((1, _HIDDEN), dtype=dtype)

    def computed() -> mx.array:
        hidden = token
        for gate, up, down in layers:
            normed = mx.fast.rms_norm(hidden, scale, 1e-5)
            gated = normed @ gate.T
            hidden = hidden + (gated * mx.sigmoid(gated) * (normed @ up.T)) @ down.T
        return hidden

    return computed


def _product(dtype: mx.Dtype) -> Callable[[], mx.array]:
    square = mx.full((_SQUARE, _SQUARE), 1e-3, dtype=dtype)
    mx.eval(square)
    return lambda: square @ square


def _quickest(computed: Callable[[], mx.array]) -> float:
    """The seconds of the quickest of as many tries as fit, of TRIES_MIN at least."""
    mx.eval(computed())
    tries: list[float] = []
    now = time.perf_counter()
    end = now + SECONDS_MAX
    while len(tries) < TRIES_MIN or now < end:
        started = time.perf_counter()
        mx.eval(computed())
        now = time.perf_counter()
        tries.append(now - started)
    return min(tries)
