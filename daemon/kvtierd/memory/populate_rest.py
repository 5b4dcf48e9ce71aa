"""`python -m kvtierd.memory.populate_rest`: gets the memory of the rest of a pool, while the daemon serves
with what is there. Started by the daemon only.

It is a process of its own, because the kernel locks a process's mappings while it fills them, and because the
kernel ends a process if memory runs out, which must not be the daemon's.
"""

import argparse
import contextlib
import ctypes
import mmap
import os
import signal
import sys
from pathlib import Path

import numpy as np

from kvtierd.memory.populating import NO_ROOM, THREADS_MAX, node_of, populate_range

NICENESS = 19
"""Everybody else who has something to do comes first."""
NO_ROOM_STATUS = 69
"""The exit status if there is no memory for an area. Standard error says why."""
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Populates a pool from one offset to another, area by area, and says on standard output where the memory
    ends now: one number after each area. Ends with its daemon."""
    parser = argparse.ArgumentParser(prog="kvtierd.memory.populate_rest")
    parser.add_argument("--daemon-pid", type=int, required=True)
    parser.add_argument("--pool-fd", type=int, required=True)
    parser.add_argument("--start", type=int, required=True, help="where the first area begins")
    parser.add_argument("--end", type=int, required=True, help="where the last area ends")
    parser.add_argument("--area-bytes", type=int, required=True)
    arguments = parser.parse_args()
    _end_with(arguments.daemon_pid)
    _be_the_first_to_go()
    os.nice(NICENESS)
    threads = min(THREADS_MAX, max(1, len(os.sched_getaffinity(0)) // 2))
    fd, area_bytes = arguments.pool_fd, arguments.area_bytes
    for start in range(arguments.start, arguments.end, area_bytes):
        length = min(area_bytes, arguments.end - start)
        # Mapped for this long only: the page tables of a large pool take a five-hundredth of it.
        with mmap.mmap(fd, length, offset=start) as mapping:
            area = np.frombuffer(mapping, np.uint8)
            try:
                populate_range(fd, area, start, threads=threads, node=node_of(start // area_bytes))
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                print(error.strerror, file=sys.stderr, flush=True)
                return NO_ROOM_STATUS
            finally:
                del area
        print(start + length, flush=True)
    return 0


def _end_with(daemon_pid: int) -> None:
    """Has the kernel end this process with the daemon, whose successor waits for the lock that both hold."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != daemon_pid:  # it was quicker
        os._exit(0)


def _be_the_first_to_go() -> None:
    """Has the kernel end this process, and not another, if memory is short."""
    with contextlib.suppress(OSError):  # not where /proc is read-only
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main())
