"""The daemon's index pages, in which a client sees which blocks it need not ask for."""

import mmap
import os
from collections.abc import Sequence

from kvtier_kernels import IndexReader

from kvtier.errors import KvtierError, Reason

GROUPS_MAX = 64


class Index:
    """The index pages of one epoch, one for each group of the instance."""

    def __init__(self, boot_nonce: int, hash_bytes: int) -> None:
        self._boot_nonce = boot_nonce
        self._hash_bytes = hash_bytes
        self._readers: list[IndexReader] = []

    def __len__(self) -> int:
        return len(self._readers)

    def add(self, fd: int) -> None:
        """Takes over the descriptor of the next group's page. Raises KvtierError for another daemon's."""
        try:
            memory = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
            reader = IndexReader(memory, self._hash_bytes)
        except (OSError, ValueError) as error:
            raise KvtierError(Reason.MALFORMED, f"the daemon's index page cannot be read: {error}") from None
        finally:
            os.close(fd)
        if reader.boot_nonce != self._boot_nonce:
            raise KvtierError(
                Reason.MALFORMED,
                "the index page is another daemon's",
                field="boot_nonce",
                value=reader.boot_nonce,
            )
        self._readers.append(reader)

    def known_run(self, group: int, hashes: Sequence[bytes], first: int, end: int) -> int | None:
        """Returns how many of `hashes[first:end]` the daemon has, up to the first that it does not have, or
        None if that cannot be told. Raises ValueError for a hash of another length."""
        if not 0 <= group < len(self._readers) or not self._readers[group].complete:
            return None
        return self._readers[group].run(hashes, first, end)

    def knows_any(self, group: int, hashes: Sequence[bytes]) -> bool | None:
        """Returns whether the daemon has at least one of `hashes`, or None if that cannot be told. Raises
        ValueError for a hash of another length."""
        if not 0 <= group < len(self._readers) or not self._readers[group].complete:
            return None
        return self._readers[group].any(hashes)
