"""Which nodes reach which, in words: the proof of a refusal for want of ways."""

from __future__ import annotations

from services.master.allocator.budget import Budgets
from services.master.allocator.naming import listed


def unreached(budgets: Budgets) -> str:
    """That the weighed nodes fall into groups, or which ways between them are missing."""
    found = groups(budgets)
    survey = budgets.survey
    if len(found) > 1:
        texts = [f"{{{listed([survey.names[row] for row in group])}}}" for group in found]
        return f"its nodes fall into groups that do not reach each other both ways: {listed(texts)}"
    names = dict(zip(survey.node_ids, survey.names, strict=True))
    weighed = {survey.node_ids[row] for row in budgets.weighed.tolist()}
    missing = [
        f"{survey.names[row]} does not reach {listed(sorted(names[to] for to in survey.blocked[row] & weighed))}"
        for row in sorted(survey.blocked)
        if survey.node_ids[row] in weighed and survey.blocked[row] & weighed
    ]
    return f"no order of its nodes has a way from each to the next: {listed(missing)}"


def groups(budgets: Budgets) -> list[list[int]]:
    """The weighed nodes by whom they reach in both directions, over others if need be; each group by id."""
    rows = budgets.weighed.tolist()
    onward = {row: frozenset(budgets.row(to) for to in _missed(budgets, row)) for row in rows}
    backward: dict[int, set[int]] = {row: set() for row in rows}
    for row, missed in onward.items():
        for to in missed:
            backward[to].add(row)
    left, found = set(rows), []
    while left:
        first = min(left)
        group = _reached(first, left, onward) & _reached(first, left, backward)
        found.append(sorted(group))
        left -= group
    return found


def _missed(budgets: Budgets, row: int) -> frozenset[str]:
    """The weighed nodes that a node tried and did not reach."""
    weighed = {budgets.survey.node_ids[each] for each in budgets.weighed.tolist()}
    return budgets.survey.blocked.get(row, frozenset()) & weighed


def _reached(first: int, among: set[int], missed: dict[int, frozenset[int]] | dict[int, set[int]]) -> set[int]:
    """Whom a node reaches, over whatever others, where everybody reaches everybody but those it missed."""
    unseen, todo = among - {first}, [first]
    while todo:
        found = unseen - missed[todo.pop()]
        unseen -= found
        todo.extend(found)
    return among - unseen
