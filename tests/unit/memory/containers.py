"""Writers in a container of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtierd.memory.host_pool import HostPool

from tests.unit.memory.plain_pool import MIB, SPACE, hashes, u64

SIZE = 6 * MIB
PAGE_BYTES = 4096
COUNT = 5
KEPT = 3


@contextmanager
def opened(path: Path) -> Iterator[HostPool]:
    with HostPool.open(path, SIZE, MIB, lock_timeout_s=60) as pool:
        yield pool


def fill(path: Path) -> None:
    """A pool with a few blocks."""
    with opened(path) as pool:
        pool.records.format_extent(0, PAGE_BYTES)
        slots = pool.geometry.slots_of(0, PAGE_BYTES)[:KEPT]
        writer = pool.register_writer(os.getpid())
        pool.records.open(slots, writer, pool.boot_nonce, 1, SPACE, 0, 0, 1, hashes(*range(KEPT)), PAGE_BYTES)
        for slot in slots.tolist():
            pool.array[slot * PAGE_BYTES : (slot + 1) * PAGE_BYTES] = 0x11
        pool.records.commit(slots, u64(*range(KEPT)))


class Container:
    """A writer in a pid namespace of its own, and the pages that a device would still have after its end."""

    def __init__(self, pool: Path, *, pin: bool = False) -> None:
        self.pages, write_end = os.pipe()
        unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        if os.geteuid():
            unshare += ["--user", "--map-current-user"]
        self._process = subprocess.Popen(
            [
                *unshare,
                sys.executable,
                "-m",
                "tests.unit.memory.foreign_writer",
                pool,
                str(COUNT),
                "yes" if pin else "no",
            ],
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[write_end],
            env=os.environ | {"PIN_FD": str(write_end)},
        )
        os.close(write_end)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "WRITING\n"

    def kill(self) -> None:
        """The whole namespace, at once."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def read_pages(self) -> bytes:
        return os.read(self.pages, COUNT * PAGE_BYTES)

    def close(self) -> None:
        os.close(self.pages)
