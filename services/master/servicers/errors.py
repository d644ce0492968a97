"""The one place where the master's errors become gRPC statuses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from grpc import StatusCode

from services.log_format import CorruptEventError
from services.master import errors
from services.rpc import RpcError
from ullage.v1 import model_pb2

_CODES: Final[dict[type[errors.MasterError], StatusCode]] = {
    errors.Unknown: StatusCode.NOT_FOUND,
    errors.InvalidRequest: StatusCode.INVALID_ARGUMENT,
    errors.Conflict: StatusCode.ALREADY_EXISTS,
    errors.NotNow: StatusCode.FAILED_PRECONDITION,
    errors.OutOfRange: StatusCode.OUT_OF_RANGE,
    errors.LogFull: StatusCode.RESOURCE_EXHAUSTED,
    errors.SubscriberTooSlow: StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: StatusCode.UNAVAILABLE,
}

_REFUSAL_CODES: Final[dict[model_pb2.RefusalReason.ValueType, StatusCode]] = {
    model_pb2.REFUSAL_REASON_NO_NODES: StatusCode.UNAVAILABLE,
    model_pb2.REFUSAL_REASON_NO_ELIGIBLE_NODES: StatusCode.UNAVAILABLE,
    model_pb2.REFUSAL_REASON_INSUFFICIENT_MEMORY: StatusCode.RESOURCE_EXHAUSTED,
    model_pb2.REFUSAL_REASON_FRAGMENTED: StatusCode.RESOURCE_EXHAUSTED,
    model_pb2.REFUSAL_REASON_LAYER_TOO_LARGE: StatusCode.RESOURCE_EXHAUSTED,
    model_pb2.REFUSAL_REASON_ENDPOINT_TOO_LARGE: StatusCode.RESOURCE_EXHAUSTED,
    model_pb2.REFUSAL_REASON_BLOCKED_BY_PROMISES: StatusCode.RESOURCE_EXHAUSTED,
    model_pb2.REFUSAL_REASON_TOO_FEW_NODES: StatusCode.FAILED_PRECONDITION,
    model_pb2.REFUSAL_REASON_CONTRADICTORY_CONSTRAINTS: StatusCode.INVALID_ARGUMENT,
    model_pb2.REFUSAL_REASON_UNKNOWN_NODE: StatusCode.NOT_FOUND,
    model_pb2.REFUSAL_REASON_NO_PATH: StatusCode.FAILED_PRECONDITION,
    model_pb2.REFUSAL_REASON_TENSOR_INDIVISIBLE: StatusCode.INVALID_ARGUMENT,
    model_pb2.REFUSAL_REASON_TENSOR_NOT_RUNNABLE: StatusCode.FAILED_PRECONDITION,
    model_pb2.REFUSAL_REASON_CONTEXT_TOO_LONG: StatusCode.INVALID_ARGUMENT,
    model_pb2.REFUSAL_REASON_MODEL_INCOMPLETE: StatusCode.FAILED_PRECONDITION,
    model_pb2.REFUSAL_REASON_INVALID_REQUEST: StatusCode.INVALID_ARGUMENT,
}


def to_rpc_error(error: errors.MasterError) -> RpcError:
    """The status `error` leaves the master with."""
    if isinstance(error, errors.Refused):
        refusal = error.refusal
        reason = model_pb2.RefusalReason.Name(refusal.reason).removeprefix("REFUSAL_REASON_")
        return RpcError(_REFUSAL_CODES[refusal.reason], refusal.message, reason=reason, details=[refusal])
    code = next(code for kind, code in _CODES.items() if isinstance(error, kind))
    return RpcError(code, str(error), reason=re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).upper())


@contextmanager
def translated() -> Iterator[None]:
    """Run a call's body: a MasterError in it leaves as the status it stands for, and so does a damaged log."""
    try:
        yield
    except CorruptEventError as error:
        message = f"{error}; restore the log from a copy, or read it up to {error.sequence - 1}"
        raise RpcError(StatusCode.DATA_LOSS, message, reason="CORRUPT_EVENT") from error
    except errors.MasterError as error:
        raise to_rpc_error(error) from error
