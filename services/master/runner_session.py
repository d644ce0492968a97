"""One connection of a runner: what it has been told, and what there is to tell it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from services.master import dispatch, errors
from services.master.cluster import Cluster
from ullage.v1 import dispatch_service_pb2, model_pb2


class RunnerSession:
    """What goes to one runner over one connection: everything first, then every change, each on the one before."""

    def __init__(self, node_id: str, boot_id: str, cluster: Cluster, heard_at: float) -> None:
        self.node_id = node_id
        self.boot_id = boot_id
        self.heard_at = heard_at
        """When the runner last spoke, by the master's monotonic clock."""
        self.dialled_at = heard_at
        """When it was last to measure all its links."""
        self._cluster = cluster
        self._acknowledgement_due = False
        self._dials: list[dispatch_service_pb2.Peer] = []
        self._known: frozenset[dispatch.Key] = frozenset()
        self._version = 0
        self._overdrawn: list[model_pb2.ShardStatus] = []
        """As it was last told; nothing, after the complete set."""
        self._woken = asyncio.Event()
        self._ended = False
        self._error: errors.MasterError | None = None

    @property
    def source(self) -> str:
        """The name its facts are stored under."""
        return f"runner/{self.node_id}/{self.boot_id}"

    def wake(self) -> None:
        """Have it look whether its assignments changed."""
        self._woken.set()

    def acknowledge(self) -> None:
        """Tell it how far its facts are durable, soon; also when that is no further, so that it hears the master."""
        self._acknowledgement_due = True
        self._woken.set()

    def dial(self, peers: Sequence[dispatch_service_pb2.Peer]) -> None:
        """Have it dial these and report the links."""
        self._dials.extend(peers)
        self._woken.set()

    def end(self, error: errors.MasterError | None = None) -> None:
        """End the stream: in peace, or with `error`."""
        self._ended = True
        self._error = self._error or error
        self._woken.set()

    async def responses(self) -> AsyncIterator[dispatch_service_pb2.SessionResponse]:
        """What the runner is to be sent, until the session ends. Raises the error it ended with."""
        yield self._complete()
        while True:
            await self._woken.wait()
            self._woken.clear()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            for response in self._pending():
                yield response

    def _complete(self) -> dispatch_service_pb2.SessionResponse:
        wanted = dispatch.assignments(self._cluster.state, self.node_id)
        self._known = frozenset(wanted)
        self._version = 1
        complete = dispatch_service_pb2.AssignmentSet(version=self._version, assignments=wanted.values())
        return self._response(complete=complete)

    def _pending(self) -> list[dispatch_service_pb2.SessionResponse]:
        responses = []
        if (change := self._change()) is not None:
            responses.append(self._response(incremental=change))
        if (overdrawn := dispatch.overdrawn(self._cluster.state, self.node_id)) != self._overdrawn:
            self._overdrawn = overdrawn
            told = dispatch_service_pb2.OverdrawnShards(shards=overdrawn)
            responses.append(self._response(overdrawn=told))
        if self._dials:
            responses.append(self._response(dial=dispatch_service_pb2.DialRequest(peers=self._dials)))
            self._dials = []
        if self._acknowledgement_due and not responses:
            responses.append(self._response())
        self._acknowledgement_due = False
        return responses

    def _change(self) -> dispatch_service_pb2.AssignmentChange | None:
        # The keys are compared before anything is built: most wake-ups change nothing here.
        if dispatch.assigned_keys(self._cluster.state, self.node_id) == self._known:
            return None
        wanted = dispatch.assignments(self._cluster.state, self.node_id)
        reasons = dispatch.reasons(self._cluster.state, self._known)
        change = dispatch.change(self._known, wanted, self._version, reasons)
        if change is not None:
            self._known, self._version = frozenset(wanted), change.results_in_version
        return change

    def _response(
        self,
        *,
        complete: dispatch_service_pb2.AssignmentSet | None = None,
        incremental: dispatch_service_pb2.AssignmentChange | None = None,
        dial: dispatch_service_pb2.DialRequest | None = None,
        overdrawn: dispatch_service_pb2.OverdrawnShards | None = None,
    ) -> dispatch_service_pb2.SessionResponse:
        return dispatch_service_pb2.SessionResponse(
            acknowledged_source_sequence=self._cluster.acknowledged(self.source),
            complete=complete,
            incremental=incremental,
            dial=dial,
            overdrawn=overdrawn,
        )
