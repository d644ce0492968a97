"""Folding the log into a state, page by page, from the latest checkpoint or from the beginning."""

from __future__ import annotations

from collections.abc import Iterator

import structlog

from services.master.checkpoint import RELEASE, restored
from services.master.glimpse import glimpsed
from services.master.log_reader import LogReader
from services.master.state import State, apply_facts, lasting

log = structlog.get_logger()


def fold(reader: LogReader, state: State, last: int) -> Iterator[int]:
    """Apply what follows `state`'s sequence, up to `last`, yielding the sequence reached after each page.

    Every row is checked, but a sample that leaves nothing behind at the page's end is not read. Raises
    CorruptEventError at the first page with an event that is not there or not what was stored.
    """
    for page in reader.pages(state.sequence + 1, last):
        page.check()
        apply_facts(state, page.facts(lasting(glimpsed(page.payloads))))
        state.sequence = page.reached
        yield state.sequence


def nearest(reader: LogReader, last: int) -> State:
    """The state at the latest checkpoint up to `last` that this release made; an empty one where there is none."""
    for made in reader.checkpoints(last):
        if made.ullage_version == RELEASE:
            return restored(made)
        log.info("a checkpoint of another release is passed over", sequence=made.sequence, release=made.ullage_version)
    return State()


def state_at(reader: LogReader, sequence: int) -> State:
    """The state at `sequence`. Raises CorruptEventError as `fold` does."""
    state = nearest(reader, sequence)
    for _ in fold(reader, state, sequence):
        pass
    return state
