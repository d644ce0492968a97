"""How hard a node's memory is pressed: a level with its reasons, from what it read now and judged before.

Rules this module lives by:
- `judge` is a pure function of the previous verdict, the reading and the time.
- The raw level is the worst of the reading's signs: `room` knows those of machines that say what is available,
  `darwin.signs` those of macOS.
- A rise counts at once; stalls alone must be seen in two readings in a row. A first reading has no history
  and takes its raw level.
- A fall goes one step at a time, after the bounds for leaving have held without a break: 10 s for CRITICAL,
  30 s for WARNING. They lie beyond the bounds for entering, so that a level does not flap.
- Stall information that is missing takes away one signal. Signs that are missing altogether make the level
  UNKNOWN; what was known before counts again when they are back.
- An operator's override says what a node may give. It does not come here: pressure is what was read.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from services.probe.darwin.signs import DarwinSigns
from services.probe.flows import NO_FLOWS, Flows, follow
from services.probe.reading import Darwin, Reading
from services.probe.room import Before, RoomSigns
from services.probe.signs import CRITICAL, NORMAL, UNKNOWN, WARNING, Level, Reason, Signs, worst
from services.probe.stalls import Stalls, measure

HOLD_SECONDS: Final = {CRITICAL: 10.0, WARNING: 30.0}
_NEXT_LOWER: Final = {CRITICAL: WARNING, WARNING: NORMAL}
_PCT_FLOORS: Final = {NORMAL: 0.0, WARNING: 50.0, CRITICAL: 80.0}


class History(NamedTuple):
    """What the next judgement needs of this one."""

    level: Level | None = None
    """The last level that was known; None before the first."""
    stalling: Level = NORMAL
    """The level of the stalls alone, which count when they are seen again."""
    calm_since_s: float | None = None
    """Since when the bounds for leaving the level have held."""
    oom_events: int | None = None
    limit_events: int | None = None
    flows: Flows = NO_FLOWS


class Verdict(NamedTuple):
    """A judgement.

    `pressure_pct` is how near this moment is to the end, without the level's memory. Where the OS says what is
    available: 0 with 2 W of room or more, 50 at W, 80 at K, 100 with none, in straight lines between; or, where
    that is more, 5 for each per cent of `some` stalls up to 75, or 4 for each per cent of `full` stalls. On
    Darwin: by the compressor's share of all that is not wired, 0 at none, 50 and 80 where the kernel says
    WARNING and CRITICAL, 100 at all. And at least 50 where any signal says WARNING, 80 where one says CRITICAL.
    None when the level is UNKNOWN.
    """

    level: Level
    pressure_pct: float | None = None
    reasons: tuple[Reason, ...] = ()
    """Empty under NORMAL."""
    stalls: Stalls = Stalls()
    history: History = History()


_FIRST: Final = Verdict(UNKNOWN)


def judge(previous: Verdict | None, reading: Reading, now_s: float) -> Verdict:
    """The level at `now_s`, in seconds of a clock that never goes back, after `previous`."""
    before = _FIRST if previous is None else previous
    history = before.history
    stalls = measure(before.stalls, reading.host_stall, reading.cgroup_stall, now_s)
    flows = _flows(history.flows, reading.darwin, now_s)
    signs = _signs(reading, history, stalls, flows, now_s)
    if isinstance(signs, Reason):
        # Nothing is known to be calm meanwhile, so a hold starts anew.
        return Verdict(UNKNOWN, None, (signs,), stalls, history._replace(calm_since_s=None, flows=flows))
    raw = worst(signs.reasons)
    level, calm_since_s = _held(raw, history, signs, now_s)
    reasons = tuple(signs.reasons)
    if level > raw:
        hold = f"held until {signs.calm_words(level)} for {HOLD_SECONDS[level]:.0f} s"
        reasons = (*reasons, Reason(level, "hold", hold))
    return Verdict(
        level,
        max(signs.pressure_pct(), _PCT_FLOORS[raw]),
        reasons,
        stalls,
        History(level, signs.stalling, calm_since_s, reading.oom_events, reading.limit_events, flows),
    )


def _flows(before: Flows, darwin: Darwin | None, now_s: float) -> Flows:
    """The flows with this reading; one that tells again what was told before is no mark of now."""
    if darwin is None:
        return NO_FLOWS
    return before if darwin.is_copy else follow(before, darwin.pages, now_s)


def _signs(reading: Reading, before: History, stalls: Stalls, flows: Flows, now_s: float) -> Signs | Reason:
    """The signs of a reading, or the reason why there are none."""
    if reading.darwin is not None:
        return DarwinSigns.of(reading, reading.darwin, flows, now_s)
    total, available = reading.total_bytes, reading.available_bytes
    if not total or available is None:
        return Reason(UNKNOWN, "available", "the total or the available memory could not be read")
    seen_before = Before(
        None if before.level is None else before.stalling,
        _rise(before.oom_events, reading.oom_events),
        _rise(before.limit_events, reading.limit_events),
    )
    return RoomSigns(reading, stalls, total, available, seen_before)


def _rise(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else now - before


def _held(raw: Level, before: History, signs: Signs, now_s: float) -> tuple[Level, float | None]:
    """The level after a raw one, and since when the bounds for leaving it have held."""
    if before.level is None or raw >= before.level:
        return raw, None
    if not signs.is_calm(before.level):
        return before.level, None
    since_s = now_s if before.calm_since_s is None else before.calm_since_s
    if now_s - since_s < HOLD_SECONDS[before.level]:
        return before.level, since_s
    return max(raw, _NEXT_LOWER[before.level]), None
