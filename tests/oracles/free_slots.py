"""Which slots of a tier are free, for tests: the core only needs to know how many."""

import numpy as np
from kvtierd.core.blocks.slots import SlotAllocator
from kvtierd.core.ids import Slots


def free_slots(slots: SlotAllocator, slot_bytes: int) -> Slots:
    """The free slots of a size, in the order in which they were freed."""
    size = slots._sizes.get(slot_bytes)
    return np.empty(0, np.uint32) if size is None else size.stack[: size.free].copy()
