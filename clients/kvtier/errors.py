"""Why something was refused or failed, with the field at fault and what to do about it."""

from typing import Self

from kvtier_kernels.reasons import Reason

from kvtier.v1 import types_pb2

__all__ = ["ConnectionLostError", "KvtierError", "NotExportableError", "Reason"]

_THROTTLED = frozenset(
    (
        Reason.NOT_ATTACHED,
        Reason.INSTANCE_INCOMPLETE,
        Reason.QUEUE_FULL,
        Reason.LEASE_LIMIT,
        Reason.DRAINING,
        Reason.WORKER_UNAVAILABLE,
        Reason.DEADLINE,
    )
)


class KvtierError(Exception):
    """A refused call or a failed transfer. Raised only for the caller's own mistakes; otherwise part of an
    outcome.

    `field` names the field at fault, `value` is what was found there (shortened to 120 characters), `message`
    says what is wrong and what to do about it.
    """

    def __init__(self, reason: Reason, message: str, *, field: str = "", value: object = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.value = str(value)[:120]
        self.message = message

    def __str__(self) -> str:
        where = f" [{self.field}={self.value}]" if self.field else ""
        return f"{self.reason.name}: {self.message}{where}"

    def __repr__(self) -> str:
        return f"KvtierError({self})"

    @property
    def throttled(self) -> bool:
        """Whether the request was refused only for now: go on without it, or try again later."""
        return self.reason in _THROTTLED

    @classmethod
    def from_proto(cls, error: types_pb2.Error) -> Self:
        """Makes the error that a message carries. A reason that this version does not know becomes
        UNSPECIFIED, with its number in the message."""
        try:
            reason, message = Reason(error.reason), error.message
        except ValueError:
            reason, message = Reason.UNSPECIFIED, f"{error.message} (reason {error.reason})"
        return cls(reason, message, field=error.field, value=error.value)


class NotExportableError(KvtierError):
    """The device memory of this process cannot be shared with another one. The message says what to change;
    `kvtier.cuda.MirrorMemory` works in any case.
    """

    def __init__(self, message: str, *, field: str = "memory", value: object = "") -> None:
        super().__init__(Reason.DEVICE_MEMORY_INVALID, message, field=field, value=value)


class ConnectionLostError(Exception):
    """The daemon went away, or does not answer. It never leaves the library: callers see a miss."""
