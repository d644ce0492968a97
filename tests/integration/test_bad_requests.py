"""What cannot be done is refused with words that help, and a code that scripts can use."""

from __future__ import annotations

import pytest

from tests.integration.cluster import Cluster
from tests.integration.conftest import MODEL

pytestmark = pytest.mark.model


def test_an_unknown_model_is_exit_code_4(shared: Cluster) -> None:
    error = shared.refused("place", "gpt-9", code=4)
    assert error["reason"] == "UNKNOWN_MODEL"
    assert "add it with `ullage models add`" in error["message"]


def test_an_unknown_node_is_exit_code_4_and_the_known_ones_are_named(shared: Cluster) -> None:
    error = shared.refused("place", MODEL, "--exclude", "node-9", code=4)
    assert error["message"].startswith("no node is called 'node-9': there is node-1 (")


def test_a_context_longer_than_the_models_own_is_refused(shared: Cluster) -> None:
    error = shared.refused("place", MODEL, "--context", "999999", code=3)
    assert error["reason"] == "CONTEXT_TOO_LONG"


def test_a_model_too_large_for_the_cluster_is_refused_with_every_nodes_numbers(released: Cluster) -> None:
    error = released.refused("place", MODEL, "--context", "8192", "--sequences", "64", code=3)
    refusal = error["refusal"]
    assert int(refusal["needed_bytes"]) > int(refusal["offered_bytes"])
    assert sorted(node["friendly_name"] for node in refusal["nodes"]) == ["node-1", "node-2", "node-3"]
    assert all(int(node["available_bytes"]) == 1500 * 2**20 for node in refusal["nodes"])
    assert refusal["remedies"]


def test_constraints_that_contradict_each_other_are_refused(released: Cluster) -> None:
    error = released.refused("place", MODEL, "--min-nodes", "3", "--max-nodes", "2", code=3)
    assert error["reason"] == "CONTRADICTORY_CONSTRAINTS"


def test_a_prompt_longer_than_the_context_is_refused_and_the_instance_goes_on(released: Cluster) -> None:
    released.ullage("place", MODEL, "--context", "64", "--max-nodes", "1")
    error = released.refused("generate", MODEL, "word " * 100, "--raw", code=1)
    assert "64" in error["message"]
    empty = released.refused("generate", MODEL, "", "--raw", code=1)
    assert "prompt" in empty["message"]
    wrong = released.refused("generate", MODEL, "Hello", "--top-p", "1.5", code=1)
    assert "top_p" in wrong["message"]
    assert released.generate(MODEL, "Hello", "--raw", "--max-tokens", "2")["text"]


def test_the_same_request_id_gives_the_same_instance_and_never_another(released: Cluster) -> None:
    first = released.ask("place", MODEL, "--context", "64", "--request-id", "once", "--max-nodes", "1")
    second = released.ask("place", MODEL, "--context", "64", "--request-id", "once", "--max-nodes", "1")
    assert second["instance_id"] == first["instance_id"]
    error = released.refused("place", MODEL, "--context", "128", "--request-id", "once", code=1)
    assert error["reason"] == "REQUEST_ID_REUSED"
    released.ullage("release", first["instance_id"])
