"""Refusals of the core. A refusal is raised before anything has changed, and its message says what to do."""

from enum import IntEnum


class Reason(IntEnum):
    """Why something was refused or failed; the numbers are those of `kvtier.v1.Reason` (a test compares
    them)."""

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


class Refusal(Exception):
    """A call that was refused; nothing has changed.

    `field` names the field at fault, `value` is what it held (cut to 120 characters), and `message` says what
    is wrong and what to do about it. A transfer that fails carries a Refusal as its cause, so it is also used
    as a value.
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
