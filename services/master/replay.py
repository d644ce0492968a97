"""Folding the log into a state, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
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
        first = state.sequence + 1
        page = log.read_facts(first, min(last, state.sequence + PAGE_EVENTS))
        times, crcs, payloads = zip(*page, strict=True)
        facts = log_format.facts(first, crcs, payloads)
        for sequence, recorded_at_ns, fact in zip(count(first), times, facts, strict=False):
            apply_fact(state, sequence, recorded_at_ns, fact)
        yield state.sequence
