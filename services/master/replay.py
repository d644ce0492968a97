"""Folding the log into a state, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from services import log_format
from services.master.event_log import LogReader
from services.master.state import State, apply_fact

PAGE_EVENTS: Final = 2048
"""Events between two breaths: some milliseconds."""


def fold(log: LogReader, state: State, last: int) -> Iterator[int]:
    """Apply what follows `state`'s sequence, up to `last`, yielding the sequence reached after each page.

    Raises CorruptEventError at the first event that is not there or not what was stored.
    """
    while state.sequence < last:
        page = log.read_facts(state.sequence + 1, min(last, state.sequence + PAGE_EVENTS))
        for sequence, recorded_at_ns, crc, payload in page:
            if sequence != state.sequence + 1:
                raise log_format.CorruptEventError(state.sequence + 1, "it is missing")
            apply_fact(state, sequence, recorded_at_ns, log_format.fact(sequence, crc, payload))
        if not page:
            raise log_format.CorruptEventError(state.sequence + 1, "it is missing")
        yield state.sequence
