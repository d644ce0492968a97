"""A placement past a refusal, because somebody answers for it.

Rules this module lives by:
- Only what more memory or a fresher reading could mend is forced; a node without a runner gets nothing even so.
- Nodes that would be left out are used only where the others cannot do it.
- What is over-committed is spread: every node by the same part of its own size, and by no more than needed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Final

import numpy as np

from services.master.allocator.budget import Budgets, View
from services.master.allocator.capacity import ROOM_BYTES_MAX
from services.master.allocator.case import Case
from services.master.allocator.problem import QUESTION_STEPS_MAX
from services.master.allocator.solution import Solution
from services.master.allocator.survey import Ints

PARTS: Final = 1024
"""In how many parts of its own size a node's room is widened."""

WIDENED_PARTS_MAX: Final = PARTS * PARTS
"""A thousand times its size: whoever needs more has made a mistake, which force does not lift."""

EXACT_SIZE_MAX: Final = 2**42
"""Up to this size a part of it can be reckoned to the byte."""

SIZE_ASSUMED_BYTES: Final = 1024**3
"""Stands for the size of a node that has never said it."""


def forced(case: Case) -> tuple[Case, tuple[Solution, ...]]:
    """The case as it was forced, with its solutions; none where no memory would do."""
    lifted = case.seen(View(lifted=True))
    solutions = lifted.solutions()
    if solutions:
        return lifted, solutions
    for each in (replace(one, steps_max=QUESTION_STEPS_MAX) for one in _wideable(case)):
        rooms = _least_rooms(each)
        if rooms is not None:
            return each, each.solutions_in(rooms)
    return case, ()


def forcible(case: Case) -> bool:
    """A forced request would be placed, if not on the nodes as they are then with more room than they have."""
    return any(each.fit_in(_widened(each.budgets, WIDENED_PARTS_MAX)).holds for each in _wideable(case))


def _wideable(case: Case) -> tuple[Case, Case]:
    """The case on the nodes that may be used, and on all: their rooms are no bounds any more."""
    return case.seen(View(with_cut_off=True)), case.seen(View(lifted=True, with_cut_off=True))


def _least_rooms(case: Case) -> Ints | None:
    """The rooms, widened by equal parts, in which the model just fits; None where it fits in none."""
    if not case.fit_in(_widened(case.budgets, WIDENED_PARTS_MAX)).holds:
        return None
    fits = range(WIDENED_PARTS_MAX)
    parts = bisect_left(fits, True, key=lambda count: case.fit_in(_widened(case.budgets, count)).holds)  # noqa: FBT003 - the first yes
    return _widened(case.budgets, parts)


def _widened(budgets: Budgets, parts: int) -> Ints:
    """The rooms with so many parts of each node's own size more."""
    total = budgets.survey.ram_total
    own_sizes = np.where(total.known & (total.bytes > 0), total.bytes, budgets.room_bytes)
    own_sizes = np.where(own_sizes > 0, own_sizes, SIZE_ASSUMED_BYTES)
    # Divided first where the product would not be a number of 64 bits.
    more = np.where(own_sizes > EXACT_SIZE_MAX, own_sizes // PARTS * parts, own_sizes * parts // PARTS)
    return np.minimum(budgets.room_bytes + more, ROOM_BYTES_MAX)
