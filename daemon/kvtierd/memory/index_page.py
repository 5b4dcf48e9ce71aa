"""The memory of an index page: a memfd that this process writes and clients can only read."""

import fcntl
import mmap
import os
import secrets

from kvtier_kernels import IndexPage

F_SEAL_FUTURE_WRITE = 0x0010
"""A seal of Linux 5.1 that the standard library lacks: new mappings cannot be writable, existing ones stay
so."""


class SharedPage:
    """An empty index page with room for so many blocks. Memory is allocated as it is filled."""

    def __init__(self, blocks: int, boot_nonce: int) -> None:
        """Makes the page. Raises OSError if there is no memory or no descriptor."""
        size_bytes = IndexPage.bytes_for(blocks)
        self._fd = os.memfd_create("kvtierd-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size_bytes)
            memory = mmap.mmap(self._fd, size_bytes)
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
