"""What a failed gRPC call means: one line for people, or the daemon's own error."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc

from kvtier.connection import reach
from kvtier.errors import KvtierError
from kvtier.v1 import types_pb2

ERROR_METADATA = "kvtier-error-bin"
"""The key of a refused unary call's trailing metadata; its value is a serialised kvtier.v1.Error."""


def from_rpc_error(error: grpc.RpcError) -> KvtierError | None:
    """Returns the structured error of a refused gRPC call, or None if it carries none."""
    trailing: Any = getattr(error, "trailing_metadata", lambda: None)()
    pairs: Iterable[tuple[str, str | bytes]] = trailing or ()
    for key, value in pairs:
        if key == ERROR_METADATA and isinstance(value, bytes):
            try:
                return KvtierError.from_proto(types_pb2.Error.FromString(value))
            except Exception:  # DecodeError's class differs between protobuf's implementations
                return None
    return None


def explain_rpc_error(error: grpc.RpcError, socket: Path | None = None) -> str:
    """Returns one line for people. `socket` is looked at if nobody was reached there."""
    if (refusal := from_rpc_error(error)) is not None:
        return str(refusal)
    code = getattr(error, "code", lambda: None)()
    if socket is not None and code is grpc.StatusCode.UNAVAILABLE:
        found = reach.look(socket)
        if found.reach is not reach.Reach.LISTENS:
            return found.text
    details = getattr(error, "details", lambda: "")() or ""
    return f"{getattr(code, 'name', 'UNKNOWN')}: {details}".strip()
