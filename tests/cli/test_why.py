"""`ullage why`: a decision is compared with the one that is made today, as strictly as their rules allow."""

from __future__ import annotations

import json

import pytest

from tests.cli.canned import CannedMaster, instance
from tests.cli.conftest import Ullage
from ullage.v1 import event_service_pb2, model_pb2

RUNNING = instance("i-123", model_pb2.INSTANCE_STATE_RUNNING, model_pb2.SHARD_PHASE_RUNNING)
OTHER = instance("i-123", model_pb2.INSTANCE_STATE_RUNNING, model_pb2.SHARD_PHASE_RUNNING, node_ids=["aaaa-1"])


def explained(
    recorded_rules: int | None, derived: model_pb2.Placement | None
) -> event_service_pb2.ExplainPlacementResponse:
    """What a master of rules 2 says of a decision."""
    return event_service_pb2.ExplainPlacementResponse(
        spec=RUNNING.spec,
        recorded=RUNNING.placement,
        derived=derived,
        equal=derived == RUNNING.placement,
        recorded_rules_version=recorded_rules,
        derived_rules_version=2,
    )


@pytest.fixture(autouse=True)
def placed(master: CannedMaster) -> None:
    master.state.instances.append(RUNNING)


@pytest.mark.parametrize(
    ("recorded_rules", "derived", "said"),
    [
        (2, RUNNING.placement, "decided again from that state it is the same"),
        (1, RUNNING.placement, "decided by the allocator's rules 1; by rules 2 of this release it is the same"),
        (1, OTHER.placement, "decided by the allocator's rules 1; by rules 2 of this release it is another"),
        (1, None, "decided by the allocator's rules 1; by rules 2 of this release it would be refused"),
        (
            None,
            OTHER.placement,
            "decided by the allocator's rules of before they were numbered; by rules 2 of this release it is another",
        ),
    ],
)
def test_a_decision_by_other_rules_may_be_another_one_today(
    ullage: Ullage, master: CannedMaster, recorded_rules: int | None, derived: model_pb2.Placement | None, said: str
) -> None:
    master.explanation = explained(recorded_rules, derived)
    answer = ullage("why", "i-123")
    assert answer.code == 0
    assert said in answer.out
    assert answer.err == ""


@pytest.mark.parametrize("derived", [OTHER.placement, None])
def test_a_decision_that_the_same_rules_do_not_make_again_is_an_error(
    ullage: Ullage, master: CannedMaster, derived: model_pb2.Placement | None
) -> None:
    master.explanation = explained(2, derived)
    answer = ullage("why", "i-123")
    assert answer.code == 1
    assert "the log is not what was stored (see `ullage log verify`)" in answer.err
    refused = ullage("why", "i-123", "--json")
    assert refused.code == 1
    assert json.loads(refused.err)["error"]["reason"] == "NOT_EQUAL"
