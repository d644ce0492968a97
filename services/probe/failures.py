"""What could not be read: logged once for each kind, counted every time, and never raised into the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import structlog

T = TypeVar("T")

log = structlog.get_logger()


class Failures:
    """The readings that failed, by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: dict[str, str] = {}
        """The last error of each kind, in words."""

    def add(self, kind: str, error: Exception) -> None:
        """Count a failure; the first of its kind is logged, since the others say nothing new."""
        self.counts[kind] += 1
        self.errors[kind] = f"{type(error).__name__}: {error}"
        if self.counts[kind] == 1:
            log.warning("cannot read", what=kind, error=self.errors[kind])

    def guard(self, kind: str, read: Callable[[], T]) -> T | None:
        """What `read` returns, or None when it fails in whatever way: psutil raises nearly anything."""
        try:
            return read()
        except Exception as error:
            self.add(kind, error)
            return None
