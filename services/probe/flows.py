"""How much a counter or a size rose lately, from marks of our own: what Darwin writes to swap, and compresses."""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

from services.probe.reading import Pages

_SPAN_SECONDS: Final = 10.0
"""The longest window anybody looks back over."""

_MARK_SECONDS: Final = 0.4
"""Marks are no closer than this, so that there are never more than some 25, however often it is read."""

Marks: TypeAlias = tuple[tuple[float, int], ...]
"""When, and what it stood at; the oldest first."""


class Flows(NamedTuple):
    """What was seen of the last seconds."""

    swapped_out: Marks = ()
    compressor: Marks = ()


NO_FLOWS: Final = Flows()


def follow(before: Flows, pages: Pages, now_s: float) -> Flows:
    """`before` with the reading of `now_s`, without what is too old to matter."""
    return Flows(
        _marked(before.swapped_out, pages.swapped_out_bytes, now_s),
        _marked(before.compressor, pages.compressor_bytes, now_s),
    )


def rise_bytes(marks: Marks, seconds: float, now_bytes: int | None, now_s: float) -> int | None:
    """By how much it rose in the last `seconds`, None where there is no mark that old.

    Of a mark that is older, since nothing was read for so long, it is the part that falls to `seconds`.
    """
    old = [mark for mark in marks if now_s - mark[0] >= seconds]
    if now_bytes is None or not old:
        return None
    at_s, value = old[-1]
    return int((now_bytes - value) * seconds / (now_s - at_s))


def _marked(marks: Marks, value: int | None, now_s: float) -> Marks:
    if value is None:
        return ()
    first = 0
    while first + 1 < len(marks) and now_s - marks[first + 1][0] >= _SPAN_SECONDS:
        first += 1
    if marks and now_s - marks[-1][0] < _MARK_SECONDS:
        return marks[first:]
    return (*marks[first:], (now_s, value))
