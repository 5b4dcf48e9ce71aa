"""The memory of an index page: a memfd that this process writes and clients can only read."""

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref

from kvtier_kernels import IndexPage

F_SEAL_FUTURE_WRITE = 0x0010
"""A seal of Linux 5.1 that the standard library lacks: new mappings cannot be writable, existing ones stay
so."""


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedPage:
    """An empty index page with room for so many blocks. It takes one descriptor. Memory is allocated as it is
    filled."""

    def __init__(self, blocks: int, boot_nonce: int) -> None:
        """Makes the page. Raises OSError if there is no memory or no descriptor."""
        size_bytes = IndexPage.bytes_for(blocks)
        self._fd = os.memfd_create("kvtierd-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size_bytes)
            memory = _map(self._fd, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self._fd)
            raise
        self.size_bytes = size_bytes
        self.native = IndexPage(memory, boot_nonce, secrets.randbits(64))
        """The page in the form in which a block table fills it."""

    def dup(self) -> int:
        """A descriptor of the page for a client; the caller closes it."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Closes the descriptor. The memory is freed when the last client has unmapped it."""
        os.close(self._fd)


def _map(fd: int, size_bytes: int) -> "ctypes.Array[ctypes.c_ubyte]":
    """A writable mapping, which ends with the last reference to it. Raises OSError. (The standard library's
    mmap keeps a descriptor of its own.)"""
    address = _libc.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    # Not at the end of the process: something may still write then, and the kernel unmaps it anyway.
    weakref.finalize(memory, _libc.munmap, address, size_bytes).atexit = False
    return memory
