"""What a judgement of memory pressure is made from: a level, the reasons for one, and the signs of a reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from ullage.v1 import node_pb2

Level: TypeAlias = node_pb2.PressureLevel.ValueType

NORMAL: Final = node_pb2.PRESSURE_LEVEL_NORMAL
WARNING: Final = node_pb2.PRESSURE_LEVEL_WARNING
CRITICAL: Final = node_pb2.PRESSURE_LEVEL_CRITICAL
UNKNOWN: Final = node_pb2.PRESSURE_LEVEL_UNKNOWN

GIB: Final = 1 << 30


class Reason(NamedTuple):
    """Why a level is what it is: the level this alone would give, a stable name, and words with numbers."""

    level: Level
    signal: str
    detail: str


class Signs(Protocol):
    """What the signals of one reading say, before any history but their own."""

    @property
    def reasons(self) -> Sequence[Reason]:
        """Why the reading alone would be more than NORMAL, as far as that counts already."""
        ...

    @property
    def stalling(self) -> Level:
        """The level of the stalls alone, which count when they are seen again."""
        ...

    def pressure_pct(self) -> float:
        """How near the reading is to the end, 0 to 100."""
        ...

    def is_calm(self, level: Level) -> bool:
        """Whether the bounds for leaving `level` hold."""
        ...

    def calm_words(self, level: Level) -> str:
        """Those bounds, for people: "2.00 GiB have been available"."""
        ...


def worst(reasons: Sequence[Reason]) -> Level:
    """The highest level of `reasons`, NORMAL where there is none."""
    return max(reason.level for reason in reasons) if reasons else NORMAL


def gib(size_bytes: int) -> str:
    """A size for people."""
    return f"{size_bytes / GIB:.2f} GiB"
