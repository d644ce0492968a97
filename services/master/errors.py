"""Everything the master refuses, as types. `servicers/errors.py` gives each its gRPC status, once.

MasterError
├── Unknown              the thing named is not there
│   ├── UnknownModel
│   ├── UnknownInstance
│   └── UnknownNode
├── InvalidRequest       the request contradicts itself or the protocol; sending it again is no use
├── Conflict             something else is in the way
│   ├── RequestIdReused
│   └── NodeAlreadyLive
├── NotNow               the thing is in a state that does not allow it; the message says what to do first
├── OutOfRange           a place in the log that is not there
│   └── Compacted
├── Refused              a placement, with its proof
├── LogFull              the disk takes no more facts; what was acknowledged is safe
├── SubscriberTooSlow    a reader fell behind what is kept for it
└── Unavailable          the master is starting or stopping
    └── LogFailed        the log cannot be written any more
"""

from __future__ import annotations

from ullage.v1 import model_pb2


class MasterError(Exception):
    """A refusal a caller is meant to read: str() says what is wrong and what to do."""


class Unknown(MasterError):
    """The thing named is not there."""


class UnknownModel(Unknown):
    def __init__(self, model_id: str) -> None:
        super().__init__(f"no model is called {model_id!r}: add it with `ullage models add`, see `ullage models list`")


class UnknownInstance(Unknown):
    def __init__(self, instance_id: str) -> None:
        super().__init__(f"no instance is called {instance_id!r}: see `ullage status`")


class UnknownNode(Unknown):
    def __init__(self, node_id: str) -> None:
        super().__init__(f"no node is called {node_id!r}: see `ullage status`")


class InvalidRequest(MasterError):
    """The request contradicts itself or the protocol; sending it again is no use."""


class Conflict(MasterError):
    """Something else is in the way."""


class RequestIdReused(Conflict):
    def __init__(self, request_id: str, instance_id: str) -> None:
        super().__init__(
            f"request_id {request_id!r} was answered with instance {instance_id} for another spec: use a new request_id"
        )


class NodeAlreadyLive(Conflict):
    def __init__(self, node_id: str, boot_id: str) -> None:
        super().__init__(
            f"node {node_id} is connected and alive as boot {boot_id}: two machines share one node_id "
            "(a copied disk?); delete the node_id file on one of them and start it again"
        )


class NotNow(MasterError):
    """The thing is in a state that does not allow it; the message says what to do first."""


class OutOfRange(MasterError):
    """A place in the log that is not there."""


class Compacted(OutOfRange):
    def __init__(self, start: int) -> None:
        super().__init__(
            f"compacted: start at {start}; before it samples are missing, ask for what is retained if that is enough"
        )
        self.start = start


class Refused(MasterError):
    """A placement that cannot be, with its proof."""

    def __init__(self, refusal: model_pb2.Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class LogFull(MasterError):
    """The disk takes no more facts; what was acknowledged is safe."""


class SubscriberTooSlow(MasterError):
    def __init__(self, last_sequence: int) -> None:
        super().__init__(
            f"the reader fell too far behind and was cut off; follow again from sequence {last_sequence + 1}"
        )
        self.last_sequence = last_sequence


class Unavailable(MasterError):
    """The master is starting or stopping."""


class LogFailed(Unavailable):
    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the log cannot be written any more ({reason}); what was acknowledged is safe: "
            "see to the disk, and start the master again"
        )
