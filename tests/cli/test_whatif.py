"""`ullage whatif`: what is asked of the master, and what is shown of its answer."""

from __future__ import annotations

import pytest

from tests.cli.canned import CannedMaster, instance, node
from tests.cli.conftest import Ullage
from ullage.v1 import event_service_pb2, model_pb2

RUNNING = instance("i-123", model_pb2.INSTANCE_STATE_RUNNING, model_pb2.SHARD_PHASE_RUNNING)


@pytest.fixture(autouse=True)
def two_nodes(master: CannedMaster) -> None:
    master.state.nodes.extend([node("aaaa-1", "node-1"), node("bbbb-2", "node-2")])
    master.instance.CopyFrom(RUNNING)


def test_every_option_reaches_the_question(ullage: Ullage, master: CannedMaster) -> None:
    options = ["--at", "7", "--without", "node-2", "--admission", "strict", "--context", "512", "--derate", "0.25"]
    said = ullage("whatif", *options, "m")
    assert said.code == 0
    assert said.out.startswith("at sequence 7 m would have gone:")
    spec = model_pb2.PlacementSpec(
        model_id="m", context_tokens=512, admission=model_pb2.ADMISSION_STRICT, warning_factor=0.25
    )
    assert master.whatifs == [event_service_pb2.WhatIfRequest(at_sequence=7, spec=spec, without_node_ids=["bbbb-2"])]


def test_what_is_not_said_is_not_asked(ullage: Ullage, master: CannedMaster) -> None:
    assert ullage("whatif", "m").code == 0
    assert master.whatifs == [event_service_pb2.WhatIfRequest(spec=model_pb2.PlacementSpec(model_id="m"))]
