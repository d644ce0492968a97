"""Whether a decision still stands on the nodes as they have become while it was made.

Rules this module lives by:
- Only the nodes it uses count: that others have changed makes a decision neither wrong nor over-committed.
- A way that was measured meanwhile may have been seen or not, so that the decision could not be derived again.
"""

from __future__ import annotations

from collections.abc import Collection

from services.master.allocator.budget import Budgets
from services.master.allocator.request import Request
from services.master.allocator.roster import Survey
from ullage.v1 import model_pb2


def stands(
    decision: model_pb2.Placement, decided_on: Survey, now: Survey, request: Request, silent_node_ids: Collection[str]
) -> bool:
    """Every node used may still be used, and still has the bytes; a forced decision asked for no more."""
    if decided_on.sequence == now.sequence:
        return True
    if decided_on.links_changed_at != now.links_changed_at:
        return False
    if any(shard.node_id not in now.rows for shard in decision.shards):
        return False
    if decision.HasField("forced_past"):
        return True
    budgets = Budgets(now, request, silent_node_ids)
    return all(_holds(budgets, shard) for shard in decision.shards)


def _holds(budgets: Budgets, shard: model_pb2.Shard) -> bool:
    row = budgets.row(shard.node_id)
    return not budgets.left_out[row] and shard.bytes.total_bytes - shard.bytes.overhead_bytes <= budgets.room_bytes[row]
