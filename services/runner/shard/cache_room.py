"""Room in the caches for the tokens of the next step, made before the runtime makes it.

Rules this module lives by:
- A cache ends where a step of the runtime's ends, counted from its first token: so the placement counted. The runtime
  counts from where the cache is, so that a chunk that ends between two steps, or a sequence that joined others there,
  would be given up to a step too much of every layer.
- A sliding cache never gets more than its window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx


def make_room(caches: Sequence[Any], tokens: int) -> None:
    """See that each of `caches` takes `tokens` more of every sequence in it."""
    for cache in _apart(caches):
        # An empty one begins at a step as it is, and one that keeps a state does not grow.
        if getattr(cache, "keys", None) is None:
            continue
        held, there = cache.size() + tokens, cache.keys.shape[2]
        wanted = -(-held // cache.step) * cache.step
        window_tokens = getattr(cache, "max_size", None)
        if window_tokens is not None:
            # Several tokens at once are put behind the others as they are, whatever room there is.
            wanted = there if tokens > 1 else min(wanted, window_tokens)
        if there < min(held, wanted):
            cache.keys, cache.values = (_lengthened(each, wanted) for each in (cache.keys, cache.values))


def _apart(caches: Sequence[Any]) -> Iterator[Any]:
    """The caches, of a layer that has several each of them."""
    for cache in caches:
        yield from _apart(cache.caches) if hasattr(cache, "caches") else (cache,)


def _lengthened(numbers: mx.array, tokens: int) -> mx.array:
    """A cache's keys or values with room for so many tokens."""
    return mx.pad(numbers, [(0, 0), (0, 0), (0, tokens - numbers.shape[2]), (0, 0)])
