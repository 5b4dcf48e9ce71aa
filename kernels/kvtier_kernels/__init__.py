"""The native core of kvtier: block table, copies and their plans, shared words, pool records and checksums.

Array arguments are C-contiguous numpy arrays of exactly the dtype named. Every call checks all of its input
before it changes anything: a ValueError names argument, index and value, and leaves everything as it was.
"""

from kvtier_kernels._native import (
    CAPACITY_MAX,
    NO_ENTRY,
    NO_SLOT,
    PAGE_BYTES,
    PART_ARMED,
    PART_DONE,
    PART_FAILED,
    PART_REVOKED,
    PART_STARTED,
    PART_SUPERSEDED,
    PINS_MAX,
    TICKET_MAX,
    BlockTable,
    CopyPlan,
    DevicePlan,
    PoolRecords,
    SharedWords,
    copy_loop,
    copy_rows_loop,
    copy_variants,
    format_pool,
    populate,
    xxh3_64,
    xxh3_64_rows,
)

__all__ = [
    "CAPACITY_MAX",
    "NO_ENTRY",
    "NO_SLOT",
    "PAGE_BYTES",
    "PART_ARMED",
    "PART_DONE",
    "PART_FAILED",
    "PART_REVOKED",
    "PART_STARTED",
    "PART_SUPERSEDED",
    "PINS_MAX",
    "TICKET_MAX",
    "BlockTable",
    "CopyPlan",
    "DevicePlan",
    "PoolRecords",
    "SharedWords",
    "copy_loop",
    "copy_rows_loop",
    "copy_variants",
    "format_pool",
    "populate",
    "xxh3_64",
    "xxh3_64_rows",
]
