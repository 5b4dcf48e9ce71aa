"""What stands between the store tier and a driver, which anybody may have written.

A driver gets no memory of the pool: what it reads it hands over, and what it is given to put is a copy. So
whatever it does late, or twice, changes no block.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NoReturn

from kvtierd.tiers.store.objects import Bytes, Listed, ObjectStore, Piece, StoreError, StoreTrouble

CANCELLED_S: Final = 5.0
"""So long a call may take to end after it was cancelled."""
NAME_CHARACTERS_MAX: Final = 4_096
SAID_CHARACTERS_MAX: Final = 500
_UNPRINTABLE: Final = re.compile(r"[^\x20-\x7e\xa0-\U0010ffff]+")


class GuardedStore:
    """An `ObjectStore` that calls another one, and believes nothing of what that does.

    Each call ends within `deadline_s` and CANCELLED_S, raises nothing but StoreError, and returns only what
    the protocol allows. Bytes are as many as were asked for; what they are is for the caller to check.
    """

    def __init__(self, store: ObjectStore, deadline_s: float, stuck: Callable[[], None]) -> None:
        """`stuck` is called if a call goes on although it was cancelled. Its process should end then, because
        nothing else ends the call."""
        self._store = store
        self._deadline_s = deadline_s
        self._stuck = stuck

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        made = await self._call(name, lambda: self._store.put(name, [part.toreadonly() for part in parts]))
        if not isinstance(made, bool):
            _broken(name, f"put returned {type(made).__name__}, and not whether it has made the object")
        return made

    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        piece = await self._call(name, lambda: self._store.read(name, begin, size_bytes))
        if not isinstance(piece, Piece) or not _is_number(piece.object_bytes):
            _broken(name, f"read returned {type(piece).__name__}, and no Piece with the object's length")
        data = bytes(_as_bytes(name, piece.data))
        expected = max(0, min(size_bytes, piece.object_bytes - begin))
        if len(data) != expected:
            _broken(name, f"read returned {len(data)} bytes of an object in which {expected} are there")
        return Piece(data, piece.object_bytes)

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        found = await self._call(name, lambda: self._store.read_ranges(name, list(ranges)))
        if not isinstance(found, Sequence) or len(found) != len(ranges):
            _broken(name, f"read_ranges returned no sequence of {len(ranges)} buffers")
        parts = [_as_bytes(name, each) for each in found]
        for part, (begin, size_bytes) in zip(parts, ranges, strict=True):
            if len(part) != size_bytes:
                said = f"{len(part)} bytes from {begin} on, where {size_bytes} were asked for"
                _broken(name, f"read_ranges returned {said}")
        return parts

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        found = await self._call(prefix, lambda: self._store.list(prefix, after, limit))
        if not isinstance(found, list) or len(found) > limit:
            _broken(prefix, f"list returned no list of {limit} objects at most")
        last = after
        for each in found:
            if not isinstance(each, Listed) or not isinstance(each.name, str):
                _broken(prefix, "list returned what is no Listed")
            if len(each.name) > NAME_CHARACTERS_MAX or not each.name.startswith(prefix):
                _broken(prefix, "list returned a name that does not begin with the prefix")
            if each.name <= last:
                _broken(prefix, "list returned names that are not in order, or not behind the last one")
            if not _is_number(each.size_bytes):
                _broken(prefix, "list returned an object without a size")
            last = each.name
        return found

    async def delete(self, name: str) -> None:
        await self._call(name, lambda: self._store.delete(name))

    async def close(self) -> None:
        await self._call("", lambda: self._store.close())

    async def _call(self, name: str, call: Callable[[], Awaitable[object]]) -> Any:
        """What a call of the driver returns. Raises StoreError for anything else."""
        task = asyncio.create_task(_made(call))
        try:
            await asyncio.wait([task], timeout=self._deadline_s)
        finally:
            # Also if we are cancelled ourselves.
            in_time = task.done()
            task.cancel()
        if not in_time:
            await asyncio.wait([task], timeout=CANCELLED_S)
            if not task.done():
                self._stuck()
            elif not task.cancelled():
                task.exception()  # it was too late, whatever it is
            raise StoreError(StoreTrouble.LATE, f"{name}: no answer in time")
        if task.cancelled():
            _broken(name, "a call was cancelled, but not by kvtier")
        error = task.exception()
        if error is None:
            return task.result()
        if isinstance(error, StoreError) and isinstance(error.trouble, StoreTrouble):
            raise StoreError(error.trouble, _printable(error)) from None
        raise StoreError(
            StoreTrouble.OTHER, f"{name}: {type(error).__name__}: {_printable(error)}"
        ) from error


async def _made(call: Callable[[], Awaitable[object]]) -> object:
    return await call()


def _as_bytes(name: str, data: Bytes) -> memoryview:
    try:
        return memoryview(data).cast("B")
    except (TypeError, ValueError):
        _broken(name, f"it returned {type(data).__name__}, and no bytes")


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _printable(error: BaseException) -> str:
    """What an error says, as one line that may be logged."""
    try:
        text = str(error)
    except Exception:  # of a driver's own error class
        text = "an error that cannot be printed"
    return _UNPRINTABLE.sub(" ", " ".join(text[: 8 * SAID_CHARACTERS_MAX].split()))[:SAID_CHARACTERS_MAX]


def _broken(name: str, what: str) -> NoReturn:
    raise StoreError(StoreTrouble.OTHER, f"{name}: the store's driver breaks its contract: {what}")
