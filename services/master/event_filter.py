"""What a reader of events wants to see."""

from __future__ import annotations

from collections.abc import Iterator

from services import log_format
from services.master import errors
from ullage.v1 import event_pb2, event_service_pb2


class EventFilter:
    """An EventFilter of the protocol, ready to be asked. An empty list in it lets everything through."""

    def __init__(self, asked: event_service_pb2.EventFilter) -> None:
        """Raises InvalidRequest for a kind there is none of."""
        unknown = sorted(set(asked.kinds) - log_format.KIND_NUMBERS.keys())
        if unknown:
            known = ", ".join(log_format.KIND_NUMBERS)
            raise errors.InvalidRequest(f"no kind of event is called {', '.join(unknown)}: there are {known}")
        self.kinds = frozenset(asked.kinds)
        self.kind_numbers = frozenset(log_format.KIND_NUMBERS[kind] for kind in asked.kinds)
        self._node_ids = frozenset(asked.node_ids)
        self._instance_ids = frozenset(asked.instance_ids)
        self.passes_all = not (self.kinds or self._node_ids or self._instance_ids)
        self.key = (self.kinds, self._node_ids, self._instance_ids)
        """Equal for filters that let the same through."""

    def passes(self, fact: event_pb2.Fact) -> bool:
        """The reader wants to see `fact`."""
        return self.passes_all or (
            (not self.kinds or fact.WhichOneof("fact") in self.kinds)
            and (not self._node_ids or not self._node_ids.isdisjoint(node_ids(fact)))
            and (not self._instance_ids or instance_id(fact) in self._instance_ids)
        )


def node_ids(fact: event_pb2.Fact) -> Iterator[str]:  # noqa: C901 - an arm for each fact
    """The nodes a fact is about."""
    match fact.WhichOneof("fact"):
        case "memory_sampled":
            yield fact.memory_sampled.node_id
        case "system_sampled":
            yield fact.system_sampled.node_id
        case "node_announced":
            yield fact.node_announced.identity.node_id
        case "runner_announced":
            yield fact.runner_announced.profile.node_id
        case "node_suspected":
            yield fact.node_suspected.node_id
        case "node_lost":
            yield fact.node_lost.node_id
        case "node_removed":
            yield fact.node_removed.node_id
        case "link_measured":
            yield from (fact.link_measured.link.from_node_id, fact.link_measured.link.to_node_id)
        case "shard_status_changed":
            yield fact.shard_status_changed.status.node_id
        case "instance_placed":
            yield from (shard.node_id for shard in fact.instance_placed.placement.shards)
        case "placement_refused":
            yield from (node.node_id for node in fact.placement_refused.refusal.nodes)
        case (
            "master_started"
            | "model_registered"
            | "model_removed"
            | "instance_released"
            | "generation_started"
            | "generation_finished"
            | "log_compacted"
            | None
        ):
            return


def instance_id(fact: event_pb2.Fact) -> str | None:
    """The instance a fact is about, if it is about one."""
    match fact.WhichOneof("fact"):
        case "instance_placed":
            return fact.instance_placed.instance_id
        case "shard_status_changed":
            return fact.shard_status_changed.status.instance_id
        case "instance_released":
            return fact.instance_released.instance_id
        case "generation_started":
            return fact.generation_started.instance_id
        case "generation_finished":
            return fact.generation_finished.instance_id
        case _:
            return None
