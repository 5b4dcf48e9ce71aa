"""What a store of objects has to do, so that the store tier can use it.

`kvtierd.tiers.store.contract` checks an implementation; docs/store_drivers.md says how one is installed.

The implementation, which is called a driver, is responsible for:
    - Atomic objects: whoever reads a name reads what one `put` wrote, whole, or finds nothing.
    - `put` returning only when others can read the object, and it survives a crash of this host.
    - Never holding up the event loop: what waits is awaited, or done in a thread of the driver's.
    - Raising StoreError for whatever goes wrong, and retrying nothing beyond its `deadline_s`.
    - Being cancelled at any time, and then ending at once, without leaving half an object that `list` would
      tell of.
The caller bounds how many calls there are at once, and believes nothing that comes back (`guarded.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

Bytes = bytes | bytearray | memoryview


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


@runtime_checkable
class ObjectStore(Protocol):
    """Objects by name. Names have letters, digits, and - _ . / only, and 200 of them at most."""

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        """Makes an object of these parts, one after the other. Returns False, and changes nothing, if there
        is one of that name already."""

    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        """So many bytes of an object, from `begin` on; fewer where it ends before."""

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """For each of these offsets as many bytes as the number beside it says, in the same order. Ranges may
        overlap, and come in any order. Raises StoreError MISSING if the object ends before."""

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        """The first objects, in the order of their names, whose names begin with `prefix`, which ends with a
        slash, and come after `after`. What was put before the call is there."""

    async def delete(self, name: str) -> None:
        """Removes an object; nothing happens if there is none. Who reads it meanwhile gets all of it, or
        MISSING. A store may refuse that as LATE while somebody reads it. Only `kvtierd collect` calls it."""

    async def close(self) -> None:
        """Ends connections. No other call may be under way, and none may follow. A process that ends at once
        does not call it."""


class OpenStore(Protocol):
    """What a driver's entry point names."""

    def __call__(self, url: str, options: Mapping[str, str], deadline_s: float) -> ObjectStore:
        """Opens the store at `url`, which begins with the scheme of the entry point and `://`, and has no
        slash at its end. `options` are those of `store.options`. No call of the store is waited for longer
        than `deadline_s`.

        Is called before there is an event loop, and must not wait for the store, which may be away just now:
        the first call connects. Raises StoreError if the URL or an option cannot be used.
        """
