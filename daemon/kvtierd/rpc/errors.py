"""How refusals are sent: one table from reason to gRPC status, and the structured detail."""

from typing import Any, NoReturn

import grpc
import grpc.aio
from kvtier.v1 import types_pb2

from kvtierd.core.errors import Reason, Refusal

ERROR_METADATA = "kvtier-error-bin"
"""Key of a refused unary call's trailing metadata; the value is a serialised kvtier.v1.Error."""

_C = grpc.StatusCode

STATUS: dict[Reason, grpc.StatusCode] = {
    Reason.HASH_LENGTH: _C.INVALID_ARGUMENT,
    Reason.BLOCK_ID_RANGE: _C.INVALID_ARGUMENT,
    Reason.BLOCK_ID_DUPLICATE: _C.INVALID_ARGUMENT,
    Reason.COUNT_MISMATCH: _C.INVALID_ARGUMENT,
    Reason.TOO_MANY_BLOCKS: _C.INVALID_ARGUMENT,
    Reason.UNKNOWN_GROUP: _C.INVALID_ARGUMENT,
    Reason.LAYOUT_INVALID: _C.INVALID_ARGUMENT,
    Reason.STRIDE_OVERFLOW: _C.INVALID_ARGUMENT,
    Reason.PLANE_BEYOND_MAPPING: _C.INVALID_ARGUMENT,
    Reason.MAPPING_NOT_SEALED: _C.INVALID_ARGUMENT,
    Reason.MAPPING_INVALID: _C.INVALID_ARGUMENT,
    Reason.WORD_INDEX_RANGE: _C.INVALID_ARGUMENT,
    Reason.TICKET_ORDER: _C.INVALID_ARGUMENT,
    Reason.NAMESPACE_INVALID: _C.INVALID_ARGUMENT,
    Reason.MODE_UNSUPPORTED: _C.INVALID_ARGUMENT,
    Reason.MALFORMED: _C.INVALID_ARGUMENT,
    Reason.DEVICE_UNKNOWN: _C.INVALID_ARGUMENT,
    Reason.DEVICE_MEMORY_INVALID: _C.INVALID_ARGUMENT,
    Reason.UNKNOWN_TOKEN: _C.UNAUTHENTICATED,
    Reason.WRONG_EPOCH: _C.FAILED_PRECONDITION,
    Reason.UNKNOWN_LEASE: _C.NOT_FOUND,
    Reason.LEASE_EXPIRED: _C.FAILED_PRECONDITION,
    Reason.FOREIGN: _C.PERMISSION_DENIED,
    Reason.SECOND_HELLO: _C.FAILED_PRECONDITION,
    Reason.SESSION_EXISTS: _C.ALREADY_EXISTS,
    Reason.NOT_ATTACHED: _C.FAILED_PRECONDITION,
    Reason.INSTANCE_INCOMPLETE: _C.FAILED_PRECONDITION,
    Reason.FINGERPRINT_MISMATCH: _C.FAILED_PRECONDITION,
    Reason.VERSION_UNSUPPORTED: _C.FAILED_PRECONDITION,
    Reason.UNKNOWN_TRANSFER: _C.NOT_FOUND,
    Reason.ROLE: _C.PERMISSION_DENIED,
    Reason.ALREADY_REGISTERED: _C.ALREADY_EXISTS,
    Reason.EPOCH_ENDED: _C.FAILED_PRECONDITION,
    Reason.DEVICE_UNAVAILABLE: _C.FAILED_PRECONDITION,
    Reason.DEVICE_OUT_OF_MEMORY: _C.FAILED_PRECONDITION,
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
    await context.abort(STATUS[refusal.reason], str(refusal), ((ERROR_METADATA, detail),))
    raise AssertionError("abort returned")
