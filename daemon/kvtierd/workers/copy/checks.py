"""Checks of slot records before a copy."""

import numpy as np
from kvtier_kernels import PoolRecords

from kvtierd.workers.copy.device import Blocks
from kvtierd.workers.copy.parts import PartTask


def check_before_load(records: PoolRecords, part: PartTask, chunk: slice) -> Blocks:
    """Which blocks of a chunk may be loaded: their records say what the part says, and where the part asks
    for verification, their data matches its checksum."""
    slots = part.slots[chunk]
    generations = part.generations[chunk]
    good = records.check(slots, generations, part.slot_bytes).astype(np.bool_)
    if part.verify is not None:
        suspects = np.flatnonzero(good & part.verify[chunk])
        if len(suspects):
            intact = records.verify_data(slots[suspects], generations[suspects])
            good[suspects] = intact.astype(np.bool_)
    return good
