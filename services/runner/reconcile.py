"""What a runner must start and stop so that it runs what is wanted of it.

Rules this module lives by:
- A shard that runs and is wanted is left alone: a new master, or the same one again, disturbs nothing.
- A shard that has failed is never started again while it is wanted: the master may not have heard of its end
  yet, and what failed is the operator's to place again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

Key = tuple[str, int]
"""A shard: the instance's id and the rank."""


class Steps(NamedTuple):
    """What there is to do, each in order of the keys."""

    start: tuple[Key, ...]
    stop: tuple[Key, ...]
    forget: tuple[Key, ...]
    """Ended, and wanted no more: nothing needs to be remembered of them."""


def steps(wanted: Collection[Key], ended: Mapping[Key, bool]) -> Steps:
    """How to get from the shards in `ended`, each with whether it has ended, to those `wanted`."""
    unwanted = sorted(ended.keys() - set(wanted))
    return Steps(
        start=tuple(sorted(set(wanted) - ended.keys())),
        stop=tuple(key for key in unwanted if not ended[key]),
        forget=tuple(key for key in unwanted if ended[key]),
    )
