"""What people type for a node or an instance, and what they read for one.

A node goes by its node_id, its friendly name, or the beginning of its node_id; an instance by its id, the
beginning of it, or its model's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from services.cli.failure import CommandError, ExitCode
from ullage.v1 import model_pb2, node_pb2, state_pb2

SHORT_CHARACTERS: Final = 8


def node_name(identity: node_pb2.NodeIdentity) -> str:
    """The friendly name, or the beginning of the id of a node that has not said its name."""
    return identity.friendly_name or identity.node_id[:SHORT_CHARACTERS]


def node_names(state: state_pb2.ClusterState) -> dict[str, str]:
    """Every node's name by its id."""
    return {node.identity.node_id: node_name(node.identity) for node in state.nodes}


def named(names: Mapping[str, str], node_id: str) -> str:
    """The name of a node that may have left the cluster since."""
    return names.get(node_id) or node_id[:SHORT_CHARACTERS]


def find_node_id(state: state_pb2.ClusterState, typed: str) -> str:
    """The node_id that `typed` stands for. Raises CommandError when none does, or more than one."""
    identities = sorted((node.identity for node in state.nodes), key=node_name)
    exact = [one.node_id for one in identities if typed in {one.node_id, one.friendly_name}]
    matches = exact or [one.node_id for one in identities if one.node_id.startswith(typed)]
    known = ", ".join(f"{node_name(one)} ({one.node_id})" for one in identities) or "none yet"
    return _single("node", typed, matches, known)


def find_instance(instances: Sequence[model_pb2.Instance], typed: str) -> model_pb2.Instance:
    """The instance whose id is or begins with `typed`. Raises CommandError when none does, or more than one."""
    exact = [one.instance_id for one in instances if one.instance_id == typed]
    matches = exact or [one.instance_id for one in instances if one.instance_id.startswith(typed)]
    known = ", ".join(f"{one.instance_id} ({one.model.model_id})" for one in instances) or "none yet"
    instance_id = _single("instance", typed, matches, known)
    return next(one for one in instances if one.instance_id == instance_id)


def _single(noun: str, typed: str, matches: Iterable[str], known: str) -> str:
    # Every id begins with nothing, which is a script's variable without a value.
    match list(matches) if typed else []:
        case [one]:
            return one
        case []:
            raise CommandError(f"no {noun} is called {typed!r}: there is {known}", ExitCode.NOT_FOUND)
        case several:
            meant = ", ".join(several)
            raise CommandError(f"{typed!r} may be any of {meant}: type more of the {noun}'s id", ExitCode.USAGE)
