"""One line of the table: a figure, what it is held against, and what it should reach."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Row:
    """A measured figure.

    `ratio` is value / floor, the number that survives a noisy machine. `target` bounds the ratio where there is a
    floor, else the value, from the side `better` names.
    """

    section: str
    name: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    target: float
    floor: float | None = None
    floor_name: str = ""

    @property
    def ratio(self) -> float | None:
        """The value over the floor, or None where there is no floor."""
        return None if self.floor is None else self.value / self.floor

    @property
    def holds(self) -> bool:
        """The target is reached."""
        measured = self.value if self.ratio is None else self.ratio
        return measured <= self.target if self.better == "lower" else measured >= self.target

    def to_json(self) -> dict[str, object]:
        """As it stands in results.json."""
        return asdict(self) | {"ratio": self.ratio, "holds": self.holds}
