"""Where a model goes: a pure decision from the state and the request, or a refusal with its proof.

`place` is all that most need; who decides often keeps a `Roster` and calls `decide`. Inside, `request` says what is
asked, `roster` what nodes say of themselves, `budget` what each can give, `demand` what a shard takes, `hops` what ways
there are. `capacity`, `chains`, `routes` and `arrangement` find out whether nodes can hold a model at all; `pool`,
`filling` and `shortlist` propose a few of many, `exact` weighs every set and order of these, `cuts` where to cut, and
`search` puts that together. `placement`, `refusal` and `tensor` put the answer into the form in which it is recorded.

Rules this package lives by:
- Pure and deterministic: no clock, no randomness, no I/O; the same state and request give the same answer.
- Whole bytes everywhere; what is promised never exceeds a node's budget unless that was forced.
- More memory or another node never turns a yes into a no.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from services.master.allocator.case import Case
from services.master.allocator.force import forced
from services.master.allocator.placement import placement
from services.master.allocator.refusal import refuse
from services.master.allocator.request import Complaint, Request, understand
from services.master.allocator.roster import Roster
from services.master.allocator.search import RUNNERS_UP_MAX
from services.master.allocator.standing import stands
from services.master.allocator.survey import Survey
from services.master.allocator.tensor import not_runnable
from services.master.state import State
from ullage.v1 import model_pb2

__all__ = ["RULES_VERSION", "Complaint", "Request", "Roster", "Survey", "decide", "place", "stands", "understand"]

RULES_VERSION: Final = 4
"""Which rules decide here: raised by whoever changes what is decided for the same state and request.

A decision that was recorded under another number need not come out the same when it is made again.
"""


def place(
    state: State, spec: model_pb2.PlacementSpec, silent_node_ids: Collection[str]
) -> model_pb2.Placement | model_pb2.Refusal:
    """Where the model asked for goes, or why it goes nowhere.

    `silent_node_ids` are the nodes not heard of late, which the state does not know.
    """
    return decide(Roster(state).survey(spec.model_id), understand(state, spec), spec, silent_node_ids)


def decide(
    survey: Survey,
    request: Request | Complaint,
    spec: model_pb2.PlacementSpec,
    silent_node_ids: Collection[str],
    runners_up: int = RUNNERS_UP_MAX,
) -> model_pb2.Placement | model_pb2.Refusal:
    """The same for nodes that were surveyed before, and a request that was understood: in whatever thread.

    With at most so many runners-up.
    """
    if isinstance(request, Complaint):
        return model_pb2.Refusal(
            reason=request.reason, message=request.text, retryable=False, decided_at_sequence=survey.sequence
        )
    case = Case(survey, request, frozenset(silent_node_ids), runners_up=runners_up)
    if request.tensor:
        return not_runnable(case)
    solutions = case.solutions()
    smaller = survey.as_stored()
    if not solutions and smaller is not survey:
        # Slower beats not at all.
        case = Case(smaller, request, frozenset(silent_node_ids), runners_up=runners_up)
        solutions = case.solutions()
    if solutions:
        return placement(case, solutions)
    refusal = refuse(case)
    return _past(refusal, case) if spec.force else refusal


def _past(refusal: model_pb2.Refusal, case: Case) -> model_pb2.Placement | model_pb2.Refusal:
    """The placement that a forced request gets in spite of `refusal`; the refusal where there is no way at all."""
    forced_case, solutions = forced(case)
    if not solutions:
        return refusal
    decision = placement(forced_case, solutions)
    decision.forced_past.CopyFrom(refusal)
    reason = model_pb2.RefusalReason.Name(refusal.reason).removeprefix("REFUSAL_REASON_")
    decision.explanation = f"Forced past {reason}: {decision.explanation}"
    return decision
