"""Names in a row and numbers of things, as people say them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NAMES_MAX: Final = 12
"""A sentence with more names than this is not read."""


def listed(names: Sequence[str]) -> str:
    """The names, the last joined by "and"; of a great many the first, and how many more there are."""
    if len(names) > NAMES_MAX:
        names = [*names[:NAMES_MAX], f"{len(names) - NAMES_MAX} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)


def counted(count: int, noun: str) -> str:
    """`count` and `noun`, in the plural where it is not one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
