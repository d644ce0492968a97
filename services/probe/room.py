"""The signs of a machine that says what is available: the room left, stalls, swap, and hits on limits.

With T the total, the bounds on the room left are W = 10 % of T within 1 and 8 GiB for WARNING and K = 5 % of T
within 0.5 and 4 GiB for CRITICAL; but never above T/4 and T/8, or a small container could be nothing else.

10 and 5 % are earlyoom's; the most keeps a server from warning with 51 of its 512 GiB left. 10 % of stalls (some) lie
between GLib's 3.5 to 5 and the 15 of the kernel's own example. 5 and 20 % (full) lie around the 5 and 15 at which
freezr acts, and below the 40 to 60 at which nohang and systemd-oomd kill. 90 % of swap is systemd-oomd's.

What the shards of this node hold was placed there on purpose, so T is taken without it: a node that was
filled as far as the estimators allow is not pressed by that alone. Stalls and swap count whoever caused them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from services.probe.reading import Reading
from services.probe.signs import CRITICAL, GIB, NORMAL, WARNING, Level, Reason, gib, worst
from services.probe.stalls import Stalls

SOME_WARNING_PCT: Final = 10.0
FULL_WARNING_PCT: Final = 5.0
FULL_CRITICAL_PCT: Final = 20.0
SWAP_FULL_PCT: Final = 90.0
COMMIT_WARNING_PCT: Final = 10
COMMIT_CRITICAL_PCT: Final = 5

_REST_BYTES_MIN: Final = 4 * GIB
"""The bounds of a machine this large are the least; smaller ones are not lowered by what the shards hold."""


@lru_cache(maxsize=16)  # The total hardly ever changes.
def warning_bound_bytes(total_bytes: int) -> int:
    """W: with less room than this, a node of `total_bytes` is under WARNING."""
    return max(1, min(max(total_bytes // 10, GIB), 8 * GIB, total_bytes // 4))


@lru_cache(maxsize=16)
def critical_bound_bytes(total_bytes: int) -> int:
    """K: with less room than this, a node of `total_bytes` is under CRITICAL."""
    return max(1, min(max(total_bytes // 20, GIB // 2), 4 * GIB, total_bytes // 8))


_ALARM: Final = Reason(WARNING, "psi_trigger", "the kernel's trigger: some work waited for memory for 15 % of 2 s")
_RECLAIM: Final = Reason(WARNING, "reclaim", "most of what the kernel would take back in the cgroup cannot be had")


class Before(NamedTuple):
    """What the signs need of the reading before."""

    stalling: Level | None = None
    """The level of its stalls, None where there was no reading."""
    oom_count: int = 0
    """How many events since then say that the cgroup ran out of memory."""
    held_count: int = 0
    """How often it was held at its limit."""


class RoomSigns:
    """The signs of one reading whose total and available memory are known."""

    def __init__(
        self, reading: Reading, stalls: Stalls, total_bytes: int, available_bytes: int, before: Before
    ) -> None:
        rest = max(total_bytes - (reading.own_bytes or 0), min(total_bytes, _REST_BYTES_MIN))
        self._reading = reading
        self._some_pct, self._full_pct = stalls.some_pct or 0.0, stalls.full_pct or 0.0
        self._full_lately_pct = stalls.full_avg10_pct or 0.0
        self._available_bytes = available_bytes
        self._warning_bytes = warning_bound_bytes(rest)
        self._critical_bytes = critical_bound_bytes(rest)
        # More than half is left: stalls and limit hits then come from a backup or a cold cache (GLib's guard).
        self._ample = available_bytes > total_bytes // 2
        stalling = self._stall_reasons()
        self.stalling: Level = worst(stalling)
        self.reasons: list[Reason] = []
        # Nearly always nothing is the matter, and each of these is quickly seen.
        if available_bytes < self._warning_bytes:
            self.reasons.append(self._room_reason())
        if stalling or reading.stall_alarm:
            self.reasons += self._confirmed(stalling, before.stalling)
        if reading.swap_total_bytes:
            self.reasons += self._swap_reasons()
        if reading.memory_low or reading.commit_limit_bytes:
            self.reasons += self._commit_reasons()
        if before.oom_count > 0 or before.held_count > 0:
            self.reasons += self._event_reasons(before.oom_count, before.held_count)

    def _room_reason(self) -> Reason:
        critical = self._available_bytes < self._critical_bytes
        bound = self._critical_bytes if critical else self._warning_bytes
        detail = f"{gib(self._available_bytes)} available, below {gib(bound)}"
        return Reason(CRITICAL if critical else WARNING, "available", detail)

    def _stall_reasons(self) -> list[Reason]:
        """What the stalls of this reading say, were they to last; as short a look is the alarm of a v1 cgroup."""
        some, full, lately = self._some_pct, self._full_pct, self._full_lately_pct
        reasons: list[Reason] = []
        if self._reading.reclaim_alarm and not self._ample:
            reasons.append(_RECLAIM)
        if not (some or full or lately):
            return reasons
        if full >= FULL_CRITICAL_PCT or lately >= FULL_CRITICAL_PCT:
            pct = full if full >= FULL_CRITICAL_PCT else lately
            level = WARNING if self._ample else CRITICAL
            reasons.append(Reason(level, "psi_full", _stalled("all", pct, FULL_CRITICAL_PCT)))
        elif full >= FULL_WARNING_PCT:
            reasons.append(Reason(WARNING, "psi_full", _stalled("all", full, FULL_WARNING_PCT)))
        if some >= SOME_WARNING_PCT:
            reasons.append(Reason(WARNING, "psi_some", _stalled("some", some, SOME_WARNING_PCT)))
        return reasons

    def _confirmed(self, stalling: list[Reason], before: Level | None) -> list[Reason]:
        """The stalls as far as the reading before showed them too; all of them where there is none before.

        The kernel's trigger has watched for a whole window, and needs no second look.
        """
        alarm = [_ALARM] if self._reading.stall_alarm else []
        if before is None:
            return [*stalling, *alarm]
        allowed = max(before, WARNING if alarm else NORMAL)
        if allowed == NORMAL:
            return []
        confirmed = [Reason(min(reason.level, allowed), reason.signal, reason.detail) for reason in stalling]
        return confirmed or alarm

    def _swap_reasons(self) -> list[Reason]:
        """Swap that is full while the room is short, or while what went there would not fit back."""
        total, available = self._reading.swap_total_bytes, self._reading.swap_available_bytes
        # The machine's swap is not this cgroup's.
        if not total or available is None or self._reading.cgroup_limit_bytes is not None:
            return []
        used = total - available
        if used * 100 <= total * SWAP_FULL_PCT:
            return []
        detail = f"{gib(used)} of {gib(total)} swap used with {gib(self._available_bytes)} available"
        if self._available_bytes < self._warning_bytes:
            return [Reason(CRITICAL, "swap", detail)]
        return [Reason(WARNING, "swap", detail)] if used > self._available_bytes else []

    def _commit_reasons(self) -> list[Reason]:
        """What Windows says: its own signal, and the share of what may be promised that is left."""
        reasons = []
        if self._reading.memory_low:
            reasons.append(Reason(CRITICAL, "memory_low", "Windows signals that physical memory runs out"))
        limit, left = self._reading.commit_limit_bytes, self._reading.commit_available_bytes
        if limit and left is not None and left * 100 < limit * COMMIT_WARNING_PCT:
            level = CRITICAL if left * 100 < limit * COMMIT_CRITICAL_PCT else WARNING
            reasons.append(Reason(level, "commit", f"{gib(left)} of {gib(limit)} may still be committed"))
        return reasons

    def _event_reasons(self, oom_count: int, held_count: int) -> list[Reason]:
        reasons = []
        if oom_count > 0:
            # The end of the memory and each process that is killed for it count one by one.
            detail = f"the cgroup ran out of memory since the last look ({oom_count} events)"
            reasons.append(Reason(CRITICAL, "oom_kill", detail))
        # Filling the page cache hits the limit as well, and costs nobody anything while there is room.
        if held_count > 0 and not self._ample:
            reasons.append(Reason(WARNING, "cgroup_limit", f"the cgroup was held at its limit {held_count} times"))
        return reasons

    def pressure_pct(self) -> float:
        """See Verdict."""
        return max(self._room_pct(), min(5 * self._some_pct, 75.0), min(4 * self._full_pct, 100.0))

    def _room_pct(self) -> float:
        left, warning, critical = self._available_bytes, self._warning_bytes, self._critical_bytes
        if left >= warning:
            return max(0.0, 50.0 * (2 * warning - left) / warning)
        if left >= critical:
            return 50.0 + 30.0 * (warning - left) / (warning - critical)
        return 80.0 + 20.0 * (critical - left) / critical

    def is_calm(self, level: Level) -> bool:
        """The bounds for leaving `level` hold; they lie beyond those for entering it."""
        if level == CRITICAL:
            return self._available_bytes * 2 > self._critical_bytes * 3 and self._full_pct < 5.0
        return self._available_bytes * 4 > self._warning_bytes * 5 and self._some_pct < 3.0 and self._full_pct < 1.0

    def calm_words(self, level: Level) -> str:
        if level == CRITICAL:
            return f"{gib(self._critical_bytes * 3 // 2)} have been available and full stalls are below 5 %"
        bound = gib(self._warning_bytes * 5 // 4)
        return f"{bound} have been available and stalls are below 3 % (some) and 1 % (full)"


def _stalled(what: str, pct: float, bound_pct: float) -> str:
    return f"{what} work waits for memory {pct:.0f} % of the time, bound {bound_pct:.0f} %"
