"""The signs of macOS: the kernel's own level, and the swap it says nothing of.

Rules this module lives by:
- The kernel's level is a share of compressed memory: WARNING where the compressor holds more than half of all
  that is not wired, CRITICAL above 0.657 of it (xnu, doc/vm/memorystatus_notify.md). It has its own hysteresis,
  and stays NORMAL while the machine swaps: so the swap is judged here, and the worse of both counts.
- Free memory is no sign. macOS keeps next to none free, and is well.
- A level of the kernel that is none of 1, 2 and 4, or cannot be asked, makes the level UNKNOWN. What its rule makes
  of the page counts is then told with the reason, and decides nothing.
- Swap files are made when they are needed, so what is used of them is held against the RAM and not against them.

The bounds on swap and on the compressor's growth were not measured on a Mac: where each comes from stands with it,
and what is said of them in a level's reasons is in the log. They err on the side of a WARNING.
"""

from __future__ import annotations

from typing import Final

from services.probe.flows import Flows, rise_bytes
from services.probe.reading import Darwin, Pages, Reading
from services.probe.signs import CRITICAL, NORMAL, UNKNOWN, WARNING, Level, Reason, gib
from ullage.v1 import node_pb2

SWAP_WARNING_PCT: Final = 25
"""Swap used, of the RAM. Somebody's rule for a language model on a Mac warns at 25 % of the swap files (continuum
3877); those grow as they fill, so their share says little and the RAM stands in for them."""

SWAPPING_SECONDS: Final = 2.0
SWAPPING_WARNING_BYTES: Final = 1 << 20
"""Written to swap within SWAPPING_SECONDS. A Mac that is well writes none for days; less than this is a hiccup."""

THRASHING_SECONDS: Final = 5.0
THRASHING_CRITICAL_BYTES: Final = 5 * (64 << 20)
"""Written to swap within THRASHING_SECONDS: 64 MiB a second. A guess, of a kind with a disk that is kept busy."""

COMPRESSING_SECONDS: Final = 10.0
COMPRESSING_WARNING_PCT: Final = 5
"""By how much the compressor grew within COMPRESSING_SECONDS, of the RAM. A guess: of a model that was given too much,
a third of the RAM went into the compressor within 15 s (colibri 1614), which is four times as fast."""

_LEVELS: Final = frozenset({NORMAL, WARNING, CRITICAL})


def kernel_rule(pages: Pages) -> Level | None:
    """The level the kernel reaches from NORMAL with these pages, None where a count is missing.

    With U all that is neither wired nor the compressor's and N all that is not wired: WARNING where U < N/2,
    CRITICAL where U < 1.2 N 10/35 (xnu, vm_pageout.c and vm_compressor.c).
    """
    uncompressed, unwired = pages.uncompressed_bytes, pages.unwired_bytes
    if uncompressed is None or not unwired:
        return None
    if uncompressed * 35 < unwired * 12:
        return CRITICAL
    return WARNING if uncompressed * 2 < unwired else NORMAL


class DarwinSigns:
    """The signs of one reading of macOS."""

    stalling: Level = NORMAL

    def __init__(self, reasons: list[Reason], compressor_share: float) -> None:
        self.reasons = reasons
        self._compressor_share = compressor_share

    @classmethod
    def of(cls, reading: Reading, darwin: Darwin, flows: Flows, now_s: float) -> DarwinSigns | Reason:
        """The signs of what `darwin` says in `reading`, or the reason why there are none."""
        pages, level = darwin.pages, darwin.kernel_level
        if level is None:
            return Reason(UNKNOWN, "kernel_level", _unasked(pages))
        if level not in _LEVELS:
            return Reason(UNKNOWN, "kernel_level", "the kernel's pressure level is none of 1, 2 and 4")
        reasons = [] if level == NORMAL else [Reason(level, "kernel_level", "the kernel says so")]
        total = reading.ram_total_bytes
        if total:
            reasons.extend(_swap_reasons(reading, total))
            reasons.extend(_flow_reasons(pages, flows, total, now_s))
        unwired = pages.unwired_bytes
        return cls(reasons, (pages.compressor_bytes or 0) / unwired if unwired else 0.0)

    def pressure_pct(self) -> float:
        """By the compressor's share of all that is not wired: 50 at 1/2, 80 at 23/35, as the kernel's levels."""
        share, warning, critical = self._compressor_share, 1 / 2, 23 / 35
        if share <= warning:
            return 100.0 * share
        if share <= critical:
            return 50.0 + 30.0 * (share - warning) / (critical - warning)
        return min(100.0, 80.0 + 20.0 * (share - critical) / (1 - critical))

    def is_calm(self, level: Level) -> bool:
        """Always: the kernel's level has bounds of its own for leaving it."""
        return True

    def calm_words(self, level: Level) -> str:
        return "nothing has said so any more"


def _unasked(pages: Pages) -> str:
    """Why there is no level, with what a person can go by who wants the node used all the same."""
    words = "the kernel's pressure level cannot be read"
    level = kernel_rule(pages)
    if level is None:
        return words
    name = node_pb2.PressureLevel.Name(level).removeprefix("PRESSURE_LEVEL_")
    return f"{words}; by its rule the page counts would make it {name}"


def _swap_reasons(reading: Reading, total_bytes: int) -> list[Reason]:
    if reading.swap_total_bytes is None or reading.swap_available_bytes is None:
        return []
    used = reading.swap_total_bytes - reading.swap_available_bytes
    if used * 100 <= total_bytes * SWAP_WARNING_PCT:
        return []
    return [Reason(WARNING, "swap", f"{gib(used)} of swap used, more than {SWAP_WARNING_PCT} % of the memory")]


def _flow_reasons(pages: Pages, flows: Flows, total_bytes: int, now_s: float) -> list[Reason]:
    reasons = []
    swapped, compressor = pages.swapped_out_bytes, pages.compressor_bytes
    lately = rise_bytes(flows.swapped_out, SWAPPING_SECONDS, swapped, now_s)
    longer = rise_bytes(flows.swapped_out, THRASHING_SECONDS, swapped, now_s)
    grown = rise_bytes(flows.compressor, COMPRESSING_SECONDS, compressor, now_s)
    if longer is not None and longer > THRASHING_CRITICAL_BYTES:
        reasons.append(Reason(CRITICAL, "swapping", f"{gib(longer)} written to swap in {THRASHING_SECONDS:.0f} s"))
    elif lately is not None and lately > SWAPPING_WARNING_BYTES:
        reasons.append(Reason(WARNING, "swapping", f"{gib(lately)} written to swap in {SWAPPING_SECONDS:.0f} s"))
    if grown is not None and grown * 100 > total_bytes * COMPRESSING_WARNING_PCT:
        detail = f"the compressor grew by {gib(grown)} in {COMPRESSING_SECONDS:.0f} s"
        reasons.append(Reason(WARNING, "compressing", detail))
    return reasons
