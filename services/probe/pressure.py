"""How hard a node's memory is pressed: a level with its reasons, from what it read now and judged before.

Rules this module lives by:
- `judge` is a pure function of the previous verdict, the reading and the time.
- The raw level is the worst of four signals: the room left, stalls, swap, and hits on the cgroup's limits.
- A rise counts at once; stalls alone must be seen in two readings in a row. A first reading has no history
  and takes its raw level.
- A fall goes one step at a time, after the bounds for leaving have held without a break: 10 s for CRITICAL,
  30 s for WARNING. They lie beyond the bounds for entering, so that a level does not flap.
- Stall information that is missing takes away one signal. A total or an available figure that is missing
  makes the level UNKNOWN; what was known before counts again when the figures are back.
- An operator's override says what a node may give. It does not come here: pressure is what was read.

With T the total, the bounds on the room left are W = 10 % of T within 1 and 8 GiB for WARNING and K = 5 % of T
within 0.5 and 4 GiB for CRITICAL; but never above T/4 and T/8, or a small container could be nothing else.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from services.probe.reading import Reading
from services.probe.stalls import Stalls, measure
from ullage.v1 import node_pb2

GIB: Final = 1 << 30

Level: TypeAlias = node_pb2.PressureLevel.ValueType

_NORMAL: Final = node_pb2.PRESSURE_LEVEL_NORMAL
_WARNING: Final = node_pb2.PRESSURE_LEVEL_WARNING
_CRITICAL: Final = node_pb2.PRESSURE_LEVEL_CRITICAL

SOME_WARNING_PCT: Final = 10.0
FULL_WARNING_PCT: Final = 5.0
FULL_CRITICAL_PCT: Final = 20.0
SWAP_FULL_PCT: Final = 90.0

HOLD_SECONDS: Final = {_CRITICAL: 10.0, _WARNING: 30.0}
_NEXT_LOWER: Final = {_CRITICAL: _WARNING, _WARNING: _NORMAL}
_PCT_FLOORS: Final = {_NORMAL: 0.0, _WARNING: 50.0, _CRITICAL: 80.0}


class Reason(NamedTuple):
    """Why a level is what it is: the level this alone would give, a stable name, and words with numbers."""

    level: Level
    signal: str
    detail: str


class History(NamedTuple):
    """What the next judgement needs of this one."""

    level: Level | None = None
    """The last level that was known; None before the first."""
    stalling: Level = _NORMAL
    """The level of the stalls alone, which count when they are seen again."""
    calm_since_s: float | None = None
    """Since when the bounds for leaving the level have held."""
    oom_events: int | None = None
    limit_events: int | None = None


class Verdict(NamedTuple):
    """A judgement.

    `pressure_pct` is how near this moment is to the end, without the level's memory: 0 with 2 W of room or
    more, 50 at W, 80 at K, 100 with none, in straight lines between; or, where that is more, 5 for each per
    cent of `some` stalls up to 75, or 4 for each per cent of `full` stalls; and at least 50 where any signal
    says WARNING, 80 where one says CRITICAL. None when the level is UNKNOWN.
    """

    level: Level
    pressure_pct: float | None = None
    reasons: tuple[Reason, ...] = ()
    """Empty under NORMAL."""
    stalls: Stalls = Stalls()
    history: History = History()


_FIRST: Final = Verdict(node_pb2.PRESSURE_LEVEL_UNKNOWN)


class _Room(NamedTuple):
    """What is left, and the bounds on it."""

    available_bytes: int
    warning_bytes: int
    critical_bytes: int
    ample: bool
    """More than half is left: stalls and limit hits then come from a backup or a cold cache (GLib's guard)."""

    @classmethod
    def of(cls, total_bytes: int, available_bytes: int) -> _Room:
        return cls(
            available_bytes=available_bytes,
            warning_bytes=warning_bound_bytes(total_bytes),
            critical_bytes=critical_bound_bytes(total_bytes),
            ample=available_bytes > total_bytes // 2,
        )


@lru_cache(maxsize=8)  # The total hardly ever changes.
def warning_bound_bytes(total_bytes: int) -> int:
    """W: with less room than this, a node of `total_bytes` is under WARNING."""
    return max(1, min(max(total_bytes // 10, GIB), 8 * GIB, total_bytes // 4))


@lru_cache(maxsize=8)
def critical_bound_bytes(total_bytes: int) -> int:
    """K: with less room than this, a node of `total_bytes` is under CRITICAL."""
    return max(1, min(max(total_bytes // 20, GIB // 2), 4 * GIB, total_bytes // 8))


def judge(previous: Verdict | None, reading: Reading, now_s: float) -> Verdict:
    """The level at `now_s`, in seconds of a clock that never goes back, after `previous`."""
    before = _FIRST if previous is None else previous
    stalls = measure(before.stalls, reading.host_stall, reading.cgroup_stall, now_s)
    total, available = reading.total_bytes, reading.available_bytes
    if not total or available is None:
        return _unknown(before.history, stalls)
    room = _Room.of(total, available)
    stalling = _stall_reasons(stalls, room)
    reasons = [
        *_room_reasons(room),
        *_confirmed(stalling, before.history),
        *_swap_reasons(reading, room),
        *_event_reasons(reading, before.history, room),
    ]
    raw = _worst(reasons)
    level, calm_since_s = _held(raw, before.history, room, stalls, now_s)
    if level > raw:
        reasons.append(_hold_reason(level, room))
    return Verdict(
        level=level,
        pressure_pct=_pressure_pct(room, stalls, raw),
        reasons=tuple(reasons),
        stalls=stalls,
        history=History(level, _worst(stalling), calm_since_s, reading.oom_events, reading.limit_events),
    )


def _unknown(before: History, stalls: Stalls) -> Verdict:
    level = node_pb2.PRESSURE_LEVEL_UNKNOWN
    reason = Reason(level, "available", "the total or the available memory could not be read")
    # Nothing is known to be calm meanwhile, so a hold starts anew.
    history = History(before.level, before.stalling, None, before.oom_events, before.limit_events)
    return Verdict(level, None, (reason,), stalls, history)


def _room_reasons(room: _Room) -> list[Reason]:
    left = f"{_gib(room.available_bytes)} available, below"
    if room.available_bytes < room.critical_bytes:
        return [Reason(_CRITICAL, "available", f"{left} {_gib(room.critical_bytes)}")]
    if room.available_bytes < room.warning_bytes:
        return [Reason(_WARNING, "available", f"{left} {_gib(room.warning_bytes)}")]
    return []


def _stall_reasons(stalls: Stalls, room: _Room) -> list[Reason]:
    """What the stalls of this reading say, were they to last."""
    worst = _WARNING if room.ample else _CRITICAL
    some, full, lately = stalls.some_pct or 0.0, stalls.full_pct or 0.0, stalls.full_avg10_pct or 0.0
    reasons = []
    if full >= FULL_CRITICAL_PCT:
        reasons.append(Reason(worst, "psi_full", _stalled("all", full, FULL_CRITICAL_PCT)))
    elif lately >= FULL_CRITICAL_PCT:
        reasons.append(Reason(worst, "psi_full", _stalled("all", lately, FULL_CRITICAL_PCT)))
    elif full >= FULL_WARNING_PCT:
        reasons.append(Reason(_WARNING, "psi_full", _stalled("all", full, FULL_WARNING_PCT)))
    if some >= SOME_WARNING_PCT:
        reasons.append(Reason(_WARNING, "psi_some", _stalled("some", some, SOME_WARNING_PCT)))
    return reasons


def _stalled(what: str, pct: float, bound_pct: float) -> str:
    return f"{what} work waits for memory {pct:.0f} % of the time, bound {bound_pct:.0f} %"


def _confirmed(stalling: list[Reason], before: History) -> list[Reason]:
    """The stalls as far as the reading before showed them too; all of them where there is none before."""
    if before.level is None:
        return stalling
    if before.stalling == _NORMAL:
        return []
    return [Reason(min(reason.level, before.stalling), reason.signal, reason.detail) for reason in stalling]


def _swap_reasons(reading: Reading, room: _Room) -> list[Reason]:
    """Swap that is full while the room is short, or while what went there would not fit back."""
    total, available = reading.swap_total_bytes, reading.swap_available_bytes
    # The machine's swap is not this cgroup's.
    if not total or available is None or reading.cgroup_limit_bytes is not None:
        return []
    used = total - available
    if used * 100 <= total * SWAP_FULL_PCT:
        return []
    detail = f"{_gib(used)} of {_gib(total)} swap used with {_gib(room.available_bytes)} available"
    if room.available_bytes < room.warning_bytes:
        return [Reason(_CRITICAL, "swap", detail)]
    return [Reason(_WARNING, "swap", detail)] if used > room.available_bytes else []


def _event_reasons(reading: Reading, before: History, room: _Room) -> list[Reason]:
    reasons = []
    if (count := _rise(before.oom_events, reading.oom_events)) > 0:
        reasons.append(Reason(_CRITICAL, "oom_kill", f"the cgroup ran out of memory {count} times since the last look"))
    # Filling the page cache hits the limit as well, and costs nobody anything while there is room.
    if (count := _rise(before.limit_events, reading.limit_events)) > 0 and not room.ample:
        reasons.append(Reason(_WARNING, "cgroup_limit", f"the cgroup was held at its limit {count} times"))
    return reasons


def _rise(before: int | None, now: int | None) -> int:
    return 0 if before is None or now is None else now - before


def _held(raw: Level, before: History, room: _Room, stalls: Stalls, now_s: float) -> tuple[Level, float | None]:
    """The level after a raw one, and since when the bounds for leaving it have held."""
    if before.level is None or raw >= before.level:
        return raw, None
    if not _is_calm(before.level, room, stalls):
        return before.level, None
    since_s = now_s if before.calm_since_s is None else before.calm_since_s
    if now_s - since_s < HOLD_SECONDS[before.level]:
        return before.level, since_s
    return max(raw, _NEXT_LOWER[before.level]), None


def _is_calm(level: Level, room: _Room, stalls: Stalls) -> bool:
    """The bounds for leaving `level` hold."""
    some, full = stalls.some_pct or 0.0, stalls.full_pct or 0.0
    if level == _CRITICAL:
        return room.available_bytes * 2 > room.critical_bytes * 3 and full < 5.0
    return room.available_bytes * 4 > room.warning_bytes * 5 and some < 3.0 and full < 1.0


def _hold_reason(level: Level, room: _Room) -> Reason:
    if level == _CRITICAL:
        bound, stalls = room.critical_bytes * 3 // 2, "full stalls are below 5 %"
    else:
        bound, stalls = room.warning_bytes * 5 // 4, "stalls are below 3 % (some) and 1 % (full)"
    hold = f"held until {_gib(bound)} have been available and {stalls} for {HOLD_SECONDS[level]:.0f} s"
    return Reason(level, "hold", hold)


def _pressure_pct(room: _Room, stalls: Stalls, raw: Level) -> float:
    """See Verdict."""
    some, full = stalls.some_pct or 0.0, stalls.full_pct or 0.0
    return max(_room_pct(room), min(5 * some, 75.0), min(4 * full, 100.0), _PCT_FLOORS[raw])


def _room_pct(room: _Room) -> float:
    left, warning, critical = room.available_bytes, room.warning_bytes, room.critical_bytes
    if left >= warning:
        return max(0.0, 50.0 * (2 * warning - left) / warning)
    if left >= critical:
        return 50.0 + 30.0 * (warning - left) / (warning - critical)
    return 80.0 + 20.0 * (critical - left) / critical


def _worst(reasons: list[Reason]) -> Level:
    return max(reason.level for reason in reasons) if reasons else _NORMAL


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / GIB:.2f} GiB"
