"""Code generated from proto/kvtier/v1/types.proto by `make generate`; do not edit."""

from enum import IntEnum


class Reason(IntEnum):
    """Why a call was refused or a transfer failed. The numbers are stable, so programs may rely on them."""

    UNSPECIFIED = 0
    # Arguments. Nothing was changed. (INVALID_ARGUMENT)
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
    DEVICE_UNKNOWN = 17  # no such GPU is visible to the daemon
    DEVICE_MEMORY_INVALID = 18  # a handle, descriptor, offset or size is not what the client says
    # State. Nothing was changed. (FAILED_PRECONDITION unless noted otherwise)
    UNKNOWN_TOKEN = 30  # UNAUTHENTICATED
    WRONG_EPOCH = 31
    UNKNOWN_LEASE = 32  # NOT_FOUND
    LEASE_EXPIRED = 33
    FOREIGN = 34  # PERMISSION_DENIED: belongs to another instance
    SECOND_HELLO = 35
    SESSION_EXISTS = 36  # ALREADY_EXISTS
    NOT_ATTACHED = 37
    INSTANCE_INCOMPLETE = 38
    FINGERPRINT_MISMATCH = 39
    VERSION_UNSUPPORTED = 40
    UNKNOWN_TRANSFER = 41  # NOT_FOUND
    ROLE = 42  # PERMISSION_DENIED: this session's role may not do that
    ALREADY_REGISTERED = 43  # ALREADY_EXISTS
    EPOCH_ENDED = 44
    DEVICE_UNAVAILABLE = 45  # the driver is missing, too old, or refuses; the message says what to change
    DEVICE_OUT_OF_MEMORY = 46  # no room on the GPU for the daemon's context: lower the engine's share
    NOT_OPERATOR = 47  # PERMISSION_DENIED: only an operator may do that
    IMPORT_REFUSED = 48  # the driver does not let the daemon open this GPU memory: mirror it on the host
    # Load. Try again later, or go on without. (RESOURCE_EXHAUSTED or UNAVAILABLE)
    QUEUE_FULL = 60
    LEASE_LIMIT = 61
    DRAINING = 62  # UNAVAILABLE
    WORKER_UNAVAILABLE = 63  # UNAVAILABLE
    SLOT_TOO_LARGE = 64  # FAILED_PRECONDITION: a block does not fit the pool
    # Why a transfer ended otherwise than DONE.
    CANCELLED = 80
    REVOKED = 81
    GATE_DEADLINE = 82
    WORKER_LOST = 83
    COPY_FAILED = 84
    CORRUPT = 85  # a block's record or checksum did not match: it is a miss from now on
    DEADLINE = 86
    INTERNAL = 99  # INTERNAL
