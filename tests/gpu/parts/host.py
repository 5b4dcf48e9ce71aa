"""Host memory as the pool has it: a shared file, populated, registered with the driver."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from typing import Self

import numpy as np
import numpy.typing as npt
from kvtier_kernels.cuda.driver import Driver

from tests.gpu.parts.content import fill_random

U8 = npt.NDArray[np.uint8]

MADV_HUGEPAGE = 14
MADV_NOHUGEPAGE = 15
MADV_POPULATE_WRITE = 23
MFD_HUGETLB = 0x0004
HUGE_PAGE_BYTES = 2 << 20
POPULATE_THREADS = 8
POPULATE_BYTES = 16 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def madvise(address: int, n: int, advice: int) -> int:
    """0, or the errno."""
    return 0 if _libc.madvise(address, n, advice) == 0 else ctypes.get_errno()


class HostMemory:
    """A shared anonymous file, mapped. `pages` is "4k", "thp" (asks for transparent huge pages) or "huge" (2
    MiB pages that the system has set aside). Raises OSError where there is no such memory.

    Close unregisters and unmaps; views of `array` must be gone by then.
    """

    def __init__(self, n: int, pages: str = "thp", fd: int | None = None) -> None:
        """Of `fd`, which stays the caller's, if one is given."""
        self.n = n
        self.pages = pages
        self._registered: list[tuple[Driver, int]] = []
        flags = os.MFD_CLOEXEC | (MFD_HUGETLB if pages == "huge" else 0)
        self.fd = os.memfd_create("kvt-gpu-host", flags) if fd is None else os.dup(fd)
        try:
            if fd is None:
                os.ftruncate(self.fd, n)
            self._mapping = mmap.mmap(self.fd, n, mmap.MAP_SHARED)
        except OSError:
            os.close(self.fd)
            raise
        self.array: U8 = np.frombuffer(self._mapping, np.uint8)
        self.address: int = self.array.ctypes.data
        if pages != "huge":
            madvise(self.address, n, MADV_HUGEPAGE if pages == "thp" else MADV_NOHUGEPAGE)

    def populate(self) -> None:
        """Gives every byte its page, in parallel, before anything is in it; raises OSError where the kernel
        cannot."""
        codes: list[int] = []

        def some(start: int) -> None:
            for offset in range(start * POPULATE_BYTES, self.n, POPULATE_THREADS * POPULATE_BYTES):
                n = min(POPULATE_BYTES, self.n - offset)
                code = madvise(self.address + offset, n, MADV_POPULATE_WRITE)
                if code == errno.EINVAL:  # kernels before 5.14, and some that are none
                    self.array[offset : offset + n : mmap.PAGESIZE] = 0
                elif code:
                    codes.append(code)
                    return

        threads = [threading.Thread(target=some, args=(start,)) for start in range(POPULATE_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if codes:
            raise OSError(codes[0], f"populating {self.n} bytes: {os.strerror(codes[0])}")

    def fill(self) -> Self:
        """New random content, in every page."""
        fill_random(self.array)
        return self

    def register(self, driver: Driver, chunk_bytes: int | None = None) -> Self:
        """Registers all of it, in chunks if told."""
        chunk = chunk_bytes or self.n
        for offset in range(0, self.n, chunk):
            driver.host_register(self.address + offset, min(chunk, self.n - offset))
            self._registered.append((driver, self.address + offset))
        return self

    def unregister(self) -> None:
        for driver, address in self._registered:
            driver.host_unregister(address)
        self._registered.clear()

    def close(self) -> None:
        self.unregister()
        self.array = np.empty(0, np.uint8)
        try:
            self._mapping.close()
        except BufferError:  # a view lives: the last one to go unmaps
            pass
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
