"""A placement past a refusal, because somebody answers for it.

Rules this module lives by:
- Only what more memory or a fresher reading could mend is forced; a node without a runner gets nothing even so.
- Nodes that would be left out are used only where the others cannot do it.
- What is over-committed is spread: every node by the same part of its own size, and by no more than needed.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from services.master.allocator.budget import Budget, View
from services.master.allocator.case import Case
from services.master.allocator.solution import Solution

PARTS: Final = 1024
"""In how many parts of its own size a node's room is widened."""

WIDENED_PARTS_MAX: Final = PARTS * PARTS
"""A thousand times its size: whoever needs more has made a mistake, which force does not lift."""

SIZE_ASSUMED_BYTES: Final = 1024**3
"""Stands for the size of a node that has never said it."""


def forced(case: Case) -> tuple[Case, tuple[Solution, ...]]:
    """The case as it was forced, with its solutions; none where no memory would do."""
    lifted = case.seen(View(lifted=True))
    solutions = lifted.solutions()
    if solutions:
        return lifted, solutions
    for each in (case, lifted):
        rooms = _least_rooms(each)
        if rooms is not None:
            return each, each.solutions_for(each.candidates_in(rooms))
    return case, ()


def _least_rooms(case: Case) -> dict[str, int] | None:
    """The rooms, widened by equal parts, in which the model just fits; None where it fits in none."""
    if not case.fits_in(_rooms(case, WIDENED_PARTS_MAX)):
        return None
    parts = bisect_left(range(WIDENED_PARTS_MAX), True, key=lambda count: case.fits_in(_rooms(case, count)))  # noqa: FBT003 - the first yes
    return _rooms(case, parts)


def _rooms(case: Case, parts: int) -> dict[str, int]:
    return {budget.node_id: _widened(budget, parts) for budget in case.weighed}


def _widened(budget: Budget, parts: int) -> int:
    own_size = budget.ram_total_bytes or budget.budget_bytes or SIZE_ASSUMED_BYTES
    return (budget.budget_bytes or 0) + own_size * parts // PARTS
