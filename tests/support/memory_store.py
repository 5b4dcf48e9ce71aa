"""A store of objects in the memory of one process: sound, and simple enough to be made unsound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvtierd.tiers.store.objects import Listed, Piece, StoreError, StoreTrouble

Objects = dict[str, bytes]


class InMemory:
    """An `ObjectStore` with these objects."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        await asyncio.sleep(0)
        if name in self.objects:
            return False
        self.objects[name] = b"".join(parts)
        return True

    async def read(self, name: str, begin: int, size_bytes: int) -> Piece:
        await asyncio.sleep(0)
        data = self.there(name)
        return Piece(data[begin : begin + size_bytes], len(data))

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        await asyncio.sleep(0)
        data = self.there(name)
        if any(begin + size > len(data) for begin, size in ranges):
            raise StoreError(StoreTrouble.MISSING, f"{name}: too short")
        return [data[begin : begin + size] for begin, size in ranges]

    async def list(self, prefix: str, after: str = "", limit: int = 1_000) -> list[Listed]:
        await asyncio.sleep(0)
        found = sorted(name for name in self.objects if name.startswith(prefix) and name > after)
        return [Listed(name, len(self.objects[name]), 2e9) for name in found[:limit]]

    async def delete(self, name: str) -> None:
        await asyncio.sleep(0)
        self.objects.pop(name, None)

    async def close(self) -> None:
        pass

    def there(self, name: str) -> bytes:
        """An object's bytes. Raises StoreError MISSING."""
        if name not in self.objects:
            raise StoreError(StoreTrouble.MISSING, f"{name}: not there")
        return self.objects[name]
