import pytest

from services.cli.failure import CommandError, ExitCode
from services.cli.names import find_instance, find_node_id
from tests.cli.canned import instance, node
from ullage.v1 import model_pb2, state_pb2

STATE = state_pb2.ClusterState(nodes=[node("aaaa-1", "node-1"), node("aabb-2", "node-2"), node("cccc-3")])


@pytest.mark.parametrize("typed", ["aabb-2", "node-2", "aab"])
def test_a_node_goes_by_its_id_its_name_or_the_beginning_of_its_id(typed: str) -> None:
    assert find_node_id(STATE, typed) == "aabb-2"


def test_an_unknown_node_is_not_found_and_the_known_ones_are_named() -> None:
    known = r"no node is called 'x': there is cccc-3 \(cccc-3\), node-1 \(aaaa-1\), node-2 \(aabb-2\)"
    with pytest.raises(CommandError, match=known) as caught:
        find_node_id(STATE, "x")
    assert caught.value.exit_code is ExitCode.NOT_FOUND


def test_a_beginning_that_two_nodes_share_is_not_guessed() -> None:
    with pytest.raises(CommandError, match="'aa' may be any of aaaa-1, aabb-2") as caught:
        find_node_id(STATE, "aa")
    assert caught.value.exit_code is ExitCode.USAGE


def test_nothing_stands_for_no_node_and_no_instance() -> None:
    # What `ullage release "$INSTANCE"` types where nothing set it: the only instance there is was released.
    running = instance("i-123", model_pb2.INSTANCE_STATE_RUNNING, model_pb2.SHARD_PHASE_RUNNING)
    with pytest.raises(CommandError, match="no instance is called ''"):
        find_instance([running], "")
    with pytest.raises(CommandError, match="no node is called ''"):
        find_node_id(state_pb2.ClusterState(nodes=[node("cccc-3")]), "")


def test_an_instance_goes_by_the_beginning_of_its_id() -> None:
    running = instance("i-123", model_pb2.INSTANCE_STATE_RUNNING, model_pb2.SHARD_PHASE_RUNNING)
    assert find_instance([running], "i-1").instance_id == "i-123"
    with pytest.raises(CommandError, match=r"no instance is called 'x': there is i-123 \(m\)"):
        find_instance([running], "x")
