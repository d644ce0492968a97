"""Whether a decision still stands on the nodes as they have become while it was made.

Rules this module lives by:
- Only the nodes it uses count: that others have changed makes a decision neither wrong nor over-committed.
- It costs as much as the decision has nodes, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from services.master.allocator.budget import Budgets
from services.master.allocator.request import Request
from services.master.allocator.roster import Roster
from services.master.allocator.survey import Survey
from services.master.state import State
from ullage.v1 import model_pb2

HOLDERS_LOOKED_AT: Final = 8
"""Of how many nodes with the model's files it is asked whether they are still heard."""


def stands(
    decision: model_pb2.Placement,
    decided_on: Survey,
    state: State,
    request: Request,
    is_silent: Callable[[str], bool],
) -> bool:
    """Every node used may still be used, reaches the next and has the bytes; a forced decision asked for no more."""
    if decided_on.sequence == state.sequence:
        return True
    used = [shard.node_id for shard in decision.shards]
    if not state.nodes.keys() >= set(used):
        return False
    if decision.HasField("forced_past"):
        return True
    among = frozenset([*used, *_holders(decided_on, state, used, request.model.model_id)])
    now = Roster(state, among).survey(request.model.model_id)
    budgets = Budgets(now, request, {node_id for node_id in among if is_silent(node_id)})
    ring = zip(used, [*used[1:], used[0]], strict=True)
    return all(to not in now.blocked.get(now.rows[sender], ()) for sender, to in ring) and all(
        _holds(budgets, shard) for shard in decision.shards
    )


def _holders(survey: Survey, state: State, used: list[str], model_id: str) -> Iterator[str]:
    """Nodes that have the model's files, where one of those used has not: it fetches its part from them."""
    runners = (state.nodes[node_id].runner for node_id in used)
    if all(runner is not None and model_id in runner.model_ids for runner in runners):
        return iter(())
    return (survey.node_ids[row] for row in np.flatnonzero(survey.has_model)[:HOLDERS_LOOKED_AT])


def _holds(budgets: Budgets, shard: model_pb2.Shard) -> bool:
    row = budgets.row(shard.node_id)
    return not budgets.left_out[row] and shard.bytes.total_bytes - shard.bytes.overhead_bytes <= budgets.room_bytes[row]
