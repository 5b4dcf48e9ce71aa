"""A writer in a pid namespace of its own, as a container is: opens the pool, writes slots, pins their memory.

    python -m tests.unit.memory.foreign_writer POOL SLOTS PIN

Says WRITING, and waits to be killed. With PIN yes, a process that outlives it keeps the slots' pages, as the
driver of a device that still copies does: it has them in a pipe, and no descriptor or mapping of the pool.
"""

import os
import select
import sys
from pathlib import Path

import numpy as np
from kvtierd.memory.host_pool import HostPool

from tests.unit.memory.plain_pool import MIB, SPACE, hashes

PAGE_BYTES = 4096


def main(path: Path, count: int, pin: bool) -> None:
    with HostPool.open(path, 6 * MIB, MIB, lock_timeout_s=10) as pool:
        slots = pool.geometry.slots_of(0, PAGE_BYTES)[8 : 8 + count]
        writer = pool.register_writer(os.getpid())
        pool.records.open(
            slots, writer, pool.boot_nonce, 9, SPACE, 0, 0, 1, hashes(*range(50, 50 + count)), PAGE_BYTES
        )
        for slot in slots.tolist():
            pool.array[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] = 0xAA
        if pin:
            pin_pages(pool, slots)
        print("WRITING", flush=True)
        select.select([], [], [])


def pin_pages(pool: HostPool, slots: "np.ndarray") -> None:
    """Puts the pages themselves, no copies, into the pipe that is our standard input's other end."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)

    class Iovec(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]

    first = slots.tolist()[0] * PAGE_BYTES
    vector = Iovec(pool.array.ctypes.data + first, len(slots) * PAGE_BYTES)
    done = libc.vmsplice(int(os.environ["PIN_FD"]), ctypes.byref(vector), 1, 0)
    assert done == len(slots) * PAGE_BYTES, os.strerror(ctypes.get_errno())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "yes")
