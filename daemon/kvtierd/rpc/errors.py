"""How refusals are sent: one table from reason to gRPC status, and the structured detail."""

from typing import Any, NoReturn

import grpc
import grpc.aio
from kvtier.v1 import types_pb2

from kvtierd.core.errors import Reason, Refusal
from kvtierd.rpc.contract import ERROR_METADATA

_C = grpc.StatusCode

_STATUS = {
    Reason.UNKNOWN_TOKEN: _C.UNAUTHENTICATED,
    Reason.UNKNOWN_LEASE: _C.NOT_FOUND,
    Reason.FOREIGN: _C.PERMISSION_DENIED,
    Reason.SESSION_EXISTS: _C.ALREADY_EXISTS,
    Reason.UNKNOWN_TRANSFER: _C.NOT_FOUND,
    Reason.ROLE: _C.PERMISSION_DENIED,
    Reason.NOT_OPERATOR: _C.PERMISSION_DENIED,
    Reason.ALREADY_REGISTERED: _C.ALREADY_EXISTS,
    Reason.QUEUE_FULL: _C.RESOURCE_EXHAUSTED,
    Reason.LEASE_LIMIT: _C.RESOURCE_EXHAUSTED,
    Reason.DRAINING: _C.UNAVAILABLE,
    Reason.WORKER_UNAVAILABLE: _C.UNAVAILABLE,
    Reason.SLOT_TOO_LARGE: _C.FAILED_PRECONDITION,
    Reason.CANCELLED: _C.CANCELLED,
    Reason.REVOKED: _C.ABORTED,
    Reason.GATE_DEADLINE: _C.DEADLINE_EXCEEDED,
    Reason.WORKER_LOST: _C.UNAVAILABLE,
    Reason.COPY_FAILED: _C.ABORTED,
    Reason.CORRUPT: _C.DATA_LOSS,
    Reason.DEADLINE: _C.DEADLINE_EXCEEDED,
    Reason.INTERNAL: _C.INTERNAL,
}
ARGUMENTS_END, STATE_END = 30, 60
"""The numbers below the first are of arguments, and those below the second of state. All of them have the
status of their kind, as the contract says, unless they are in the table."""


def status_of(reason: Reason) -> grpc.StatusCode:
    """The gRPC status of a call that was refused for this reason. KeyError for one that has none."""
    if reason in _STATUS or not 0 < reason < STATE_END:
        return _STATUS[reason]
    return _C.INVALID_ARGUMENT if reason < ARGUMENTS_END else _C.FAILED_PRECONDITION


def to_error(refusal: Refusal) -> types_pb2.Error:
    """The refusal as it is sent in replies, on the stream and on the side socket."""
    return types_pb2.Error(
        reason=types_pb2.Reason.ValueType(int(refusal.reason)),
        field=refusal.field,
        value=refusal.value,
        message=refusal.message,
    )


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", refusal: Refusal) -> NoReturn:
    """Ends a unary call with the refusal's status and text, and with its structure in the trailing
    metadata."""
    detail = to_error(refusal).SerializeToString()
    await context.abort(status_of(refusal.reason), str(refusal), ((ERROR_METADATA, detail),))
    raise AssertionError("abort returned")
