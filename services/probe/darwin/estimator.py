"""What a Mac can give, from what its pages are used for.

In bytes, with R what can be had without compressing (free + file-backed + purgeable; Apple's "fully
reclaimable"), N all that is not wired, c the compressor's own RAM, A the memory of programs (anonymous -
purgeable) less that of this node's own shards, rho how well memory compresses here (what the compressor stands
for over what it holds, within 1.5 and 3; 1.5 where it holds nothing), and a reserve of 2 % of the usable
memory, at least 1 GiB:

    strict   = min(R - reserve, N - 2.5 c)
    balanced = the most over u in [0, A/4] of min(R - reserve + u (1 - 1/rho), N - 2.5 (c + u/rho))
    ceiling  = total - wired - reserve

`u` is what would be compressed to make room. What is given becomes wired, so N shrinks by it while c grows by
u/rho; the second terms keep the uncompressed share of N at 0.6 and above, where the kernel says NORMAL again.
A quarter of what programs hold is as much as an attended machine gives up without a person noticing; a shard's
own memory is read for every token, and is never counted on.

Under WARNING nothing more is to be compressed, so balanced is strict. None exceeds the ceiling, nor the device's
limit: `iogpu.wired_limit_mb` where somebody set it, else 85 % of the memory, which is an assumption (Metal's own
limit was seen between 67 and 87 %); a runner on the node asks Metal, and its answer counts before an assumption.

On recorded machines (tests/recorded/vm_stat) it gives, strict/balanced in GiB: a 0.0/0.0, b 3.3/4.2, c 26.5/26.7,
e 6.8/10.0, g 7.4/12.5, j 21.1/24.6. Not tried on hardware.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from services.probe.reading import Darwin, Pages, Reading
from services.probe.signs import GIB, WARNING, Level

_RATIO_MIN: Final = 1.5
_RATIO_MAX: Final = 3.0
_COMPRESSIBLE_PARTS: Final = 4
"""One in so many bytes of programs may be compressed for a shard."""

_DEVICE_PCT_ASSUMED: Final = 85


class Figures(NamedTuple):
    """The three estimators, in bytes, and whether a coarser formula had to do."""

    strict_bytes: int | None = None
    balanced_bytes: int | None = None
    ceiling_bytes: int | None = None
    coarse: bool = False


def figures(reading: Reading, darwin: Darwin, level: Level) -> Figures:
    """What a Mac under `level` can give; unknown where neither its pages nor an available figure are known."""
    total, pages = reading.ram_total_bytes, darwin.pages
    reserve = max(GIB, (darwin.usable_bytes or total or 0) // 50)
    if pages.reclaimable_bytes is None or not total:
        return _by_subtraction(reading, reserve)
    strict, coarse = _strict_bytes(pages, reserve)
    balanced = strict if level == WARNING or coarse else _balanced_bytes(pages, reserve, reading.own_bytes or 0)
    # Never below balanced, save for the device's limit, which is nobody's opinion.
    ceiling = balanced if pages.wired_bytes is None else max(balanced, total - pages.wired_bytes - reserve)
    if reading.device_limit_bytes is not None:
        ceiling = min(ceiling, reading.device_limit_bytes)
    return Figures(min(strict, ceiling), min(balanced, ceiling), ceiling, coarse)


def device_limit_bytes(wired_limit_mb: int | None, total_bytes: int | None) -> tuple[int | None, bool]:
    """The most Metal lets a process use, and whether that is assumed; `wired_limit_mb` 0 is the driver's default."""
    if total_bytes is None:
        return None, False
    if wired_limit_mb:
        return min(wired_limit_mb << 20, total_bytes), False
    return total_bytes * _DEVICE_PCT_ASSUMED // 100, True


def _by_subtraction(reading: Reading, reserve: int) -> Figures:
    """Total less used, where that is all there is (macmon): what programs could have without compressing."""
    available = reading.available_bytes
    if available is None:
        return Figures()
    given = max(0, available - reserve)
    return Figures(given, given, given, coarse=True)


def _strict_bytes(pages: Pages, reserve: int) -> tuple[int, bool]:
    """The strict figure, and whether the compressor's part in it is unknown."""
    reclaimable, unwired, compressor = pages.reclaimable_bytes or 0, pages.unwired_bytes, pages.compressor_bytes
    if unwired is None or compressor is None:
        return max(0, reclaimable - reserve), True
    return max(0, min(reclaimable - reserve, unwired - compressor * 5 // 2)), False


def _balanced_bytes(pages: Pages, reserve: int, own_bytes: int) -> int:
    """The highest point of the lower of two lines in u: one rises, the other falls."""
    rising, falling = (pages.reclaimable_bytes or 0) - reserve, pages.unwired_bytes or 0
    compressor = pages.compressor_bytes or 0
    falling -= compressor * 5 // 2
    ratio = compression_ratio(pages)
    programs = max(0, (pages.anonymous_bytes or 0) - (pages.purgeable_bytes or 0) - own_bytes)
    rise, fall = 1 - 1 / ratio, 2.5 / ratio
    crossing = max(0.0, (falling - rising) / (rise + fall))
    compressed = min(programs // _COMPRESSIBLE_PARTS, int(crossing))
    return max(0, min(rising + int(compressed * rise), falling - int(compressed * fall)))


def compression_ratio(pages: Pages) -> float:
    """How many bytes the compressor keeps in one, within what is prudent to count on."""
    held, stored = pages.compressor_bytes, pages.compressed_bytes
    return _RATIO_MIN if not held or not stored else min(max(stored / held, _RATIO_MIN), _RATIO_MAX)
