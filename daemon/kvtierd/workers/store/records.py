"""What slot records say, of many slots at once. The layout is that of `docs/design/pool.md`."""

from typing import Final

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

RECORD: Final = np.dtype(
    [
        ("word", "<u8"),
        ("store", "<u8", 2),
        ("namespace", "u1", 16),
        ("hash", "u1", 32),
        ("data_bytes", "<u4"),
        ("group", "<u2"),
        ("shard", "<u2"),
        ("world", "<u2"),
        ("salt", "u1", 6),
        ("clock", "<u8"),
        ("checksum", "<u8"),
        ("record_checksum", "<u8"),
        ("tag", "u1", 16),
    ]
)


def read(records: PoolRecords, slots: npt.NDArray[np.uint32]) -> npt.NDArray[np.void]:
    """A copy of each slot's record, shape (n,), as it is just now: whoever believes it has compared the
    slot's generation before and after."""
    return np.ascontiguousarray(records.copies(slots)).view(RECORD).reshape(-1)
