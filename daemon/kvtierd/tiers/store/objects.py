"""What a store of objects has to do, so that the store tier can use it.

`tests/integration/stores/test_object_stores.py` is the contract.

The implementation is responsible for:
    - Atomic objects: whoever reads a name reads what one `put` wrote, whole, or finds nothing.
    - `put` returning only when others can read the object, and it survives a crash of this host.
    - Raising StoreError for whatever goes wrong, and nothing else; retrying nothing beyond its `deadline_s`.
    - Being cancelled at any time without leaving anything that `list` would tell of.
The caller bounds how many calls there are at once, and believes nothing that comes back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class StoreTrouble(Enum):
    """Why a store did not do what it was asked for, as far as that decides what happens next."""

    MISSING = "missing"
    """There is no such object, any more or yet: a miss, and the store is well."""
    DENIED = "denied"
    """Credentials are missing, wrong or not enough: somebody has to do something."""
    FULL = "full"
    """The store takes no more."""
    LATE = "late"
    """There was no answer in time, or no connection."""
    OTHER = "other"


class StoreError(Exception):
    """A call of a store failed."""

    def __init__(self, trouble: StoreTrouble, message: str) -> None:
        super().__init__(message)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class Listed:
    """An object that there is."""

    name: str
    size_bytes: int
    modified_s: float
    """When it was written, by the store's clock: seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an object."""

    data: bytes
    object_bytes: int
    """The length of the whole object."""


class ObjectStore(Protocol):
    """Objects by name. Names have letters, digits, and - _ . / only."""

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Makes an object of these parts, one after the other. Returns False, and changes nothing, if there
        is one of that name already."""

    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        """So many bytes of an object, from `begin` on; fewer where it ends before."""

    async def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Reads from each of these offsets as many bytes as the buffer beside it has. If it raises, or is
        cancelled, nobody knows what the buffers have. Raises StoreError MISSING if the object ends before."""

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        """The first objects, in the order of their names, whose names begin with `prefix`, which ends with a
        slash, and come after `after`. What was put before the call is there."""

    async def delete(self, names: Sequence[str]) -> None:
        """Removes objects. Those that are not there are no error."""

    async def close(self) -> None:
        """Ends connections. No other call may be under way, and none may follow."""
