"""How much work stalled on memory lately, from the kernel's counters over a window of our own.

The kernel's averages lag: a total stall shows as 18 % after 2 s and 63 % after 10 s. The counters do not.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from services.probe.reading import Stall

WINDOW_SECONDS: Final = 2.0
"""Short enough to see a rise at once, long enough to see over one hiccup."""

_WINDOW_SECONDS_MIN: Final = 0.4
"""A shorter window says nothing yet: the kernel's average over 10 s stands in for it."""

_MARK_SECONDS: Final = 0.2
"""Marks are no closer than this, so that there are never more than a dozen, however often it is read."""


class Mark(NamedTuple):
    """What the counters of one file stood at, and when."""

    at_s: float
    some_us: int | None
    full_us: int | None


class Stalls(NamedTuple):
    """The shares of the window in which work stalled, in per cent; None where the kernel does not say.

    Of the machine and the process's own cgroup it is the worse that counts.
    """

    some_pct: float | None = None
    full_pct: float | None = None
    full_avg10_pct: float | None = None
    host_marks: tuple[Mark, ...] = ()
    cgroup_marks: tuple[Mark, ...] = ()


def measure(before: Stalls, host: Stall | None, cgroup: Stall | None, now_s: float) -> Stalls:
    """The stalls at `now_s`, where `before` was measured at the reading before."""
    host_marks = _marked(before.host_marks, host, now_s)
    host_some, host_full = _shares(host_marks, host, now_s)
    if cgroup is None:
        return Stalls(host_some, host_full, _full_avg10_pct(host), host_marks)
    cgroup_marks = _marked(before.cgroup_marks, cgroup, now_s)
    cgroup_some, cgroup_full = _shares(cgroup_marks, cgroup, now_s)
    return Stalls(
        some_pct=_most(host_some, cgroup_some),
        full_pct=_most(host_full, cgroup_full),
        full_avg10_pct=_most(_full_avg10_pct(host), _full_avg10_pct(cgroup)),
        host_marks=host_marks,
        cgroup_marks=cgroup_marks,
    )


def _marked(marks: tuple[Mark, ...], stall: Stall | None, now_s: float) -> tuple[Mark, ...]:
    """`marks` with one for now where it is due, beginning with the youngest that is a whole window old."""
    if stall is None:
        return ()
    some_us, full_us = stall.some_total_us, stall.full_total_us
    # Counters that went back are not those of the last mark: they started again, or are of another cgroup.
    if not marks or (some_us or 0) < (marks[-1].some_us or 0) or (full_us or 0) < (marks[-1].full_us or 0):
        return (Mark(now_s, some_us, full_us),)
    first, start_s = 0, now_s - WINDOW_SECONDS
    while first + 1 < len(marks) and marks[first + 1].at_s <= start_s:
        first += 1
    if now_s - marks[-1].at_s < _MARK_SECONDS:
        return marks[first:]
    return (*marks[first:], Mark(now_s, some_us, full_us))


def _shares(marks: tuple[Mark, ...], stall: Stall | None, now_s: float) -> tuple[float | None, float | None]:
    """The shares of `some` and of `full` from the first mark until now."""
    if stall is None:
        return None, None
    start = marks[0]
    seconds = now_s - start.at_s
    if seconds < _WINDOW_SECONDS_MIN:
        return stall.some_avg10_pct, stall.full_avg10_pct
    return _share(start.some_us, stall.some_total_us, seconds), _share(start.full_us, stall.full_total_us, seconds)


def _share(start_us: int | None, end_us: int | None, seconds: float) -> float | None:
    if start_us is None or end_us is None:
        return None
    return min((end_us - start_us) / (seconds * 10_000), 100.0)


def _full_avg10_pct(stall: Stall | None) -> float | None:
    return None if stall is None else stall.full_avg10_pct


def _most(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)
