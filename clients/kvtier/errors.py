"""Why something was refused or failed, with the field at fault and what to do about it."""

from enum import IntEnum
from typing import Self

from kvtier.v1 import types_pb2


class Reason(IntEnum):
    """Why something was refused or failed. The names and numbers are those of kvtier.v1.Reason and never
    change their meaning, so programs may branch on them."""

    UNSPECIFIED = 0
    HASH_LENGTH = 1
    BLOCK_ID_RANGE = 2
    BLOCK_ID_DUPLICATE = 3
    COUNT_MISMATCH = 4
    TOO_MANY_BLOCKS = 5
    UNKNOWN_GROUP = 6
    LAYOUT_INVALID = 7
    STRIDE_OVERFLOW = 8
    PLANE_BEYOND_MAPPING = 9
    MAPPING_NOT_SEALED = 10
    MAPPING_INVALID = 11
    WORD_INDEX_RANGE = 12
    TICKET_ORDER = 13
    NAMESPACE_INVALID = 14
    MODE_UNSUPPORTED = 15
    MALFORMED = 16
    DEVICE_UNKNOWN = 17
    DEVICE_MEMORY_INVALID = 18
    UNKNOWN_TOKEN = 30
    WRONG_EPOCH = 31
    UNKNOWN_LEASE = 32
    LEASE_EXPIRED = 33
    FOREIGN = 34
    SECOND_HELLO = 35
    SESSION_EXISTS = 36
    NOT_ATTACHED = 37
    INSTANCE_INCOMPLETE = 38
    FINGERPRINT_MISMATCH = 39
    VERSION_UNSUPPORTED = 40
    UNKNOWN_TRANSFER = 41
    ROLE = 42
    ALREADY_REGISTERED = 43
    EPOCH_ENDED = 44
    DEVICE_UNAVAILABLE = 45
    DEVICE_OUT_OF_MEMORY = 46
    QUEUE_FULL = 60
    LEASE_LIMIT = 61
    DRAINING = 62
    WORKER_UNAVAILABLE = 63
    SLOT_TOO_LARGE = 64
    CANCELLED = 80
    REVOKED = 81
    GATE_DEADLINE = 82
    WORKER_LOST = 83
    COPY_FAILED = 84
    CORRUPT = 85
    DEADLINE = 86
    INTERNAL = 99

    @property
    def throttled(self) -> bool:
        """Whether the request was refused only for now: go on without it, or try again later."""
        return self in _THROTTLED


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

    `allocator` is True if the cause is how the memory was allocated, not what this machine allows.
    """

    def __init__(
        self, message: str, *, field: str = "memory", value: object = "", allocator: bool = False
    ) -> None:
        super().__init__(Reason.DEVICE_MEMORY_INVALID, message, field=field, value=value)
        self.allocator = allocator


class ConnectionLostError(Exception):
    """The daemon went away, or does not answer. It never leaves the library: callers see a miss."""
