"""Codes and decodes in threads, so that the event loop of a store's worker goes on meanwhile."""

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from kvtier_kernels import xxh3_64

from kvtierd.tiers.store.coding import Codec, CodingError, Compression
from kvtierd.tiers.store.objects import Bytes
from kvtierd.tiers.store.packs import RAW

DECODING_MAX: Final = 4
"""Threads: so many decode what a connection of 25 Gbit/s brings."""
ENCODING_MAX: Final = 2
"""Threads of their own, because nobody waits for what is put, and a prompt does for what is read."""
Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of a shard as a pack has them."""

    coding: int
    data: Bytes


class Coder:
    """What is stored as it is, is dealt with at once, in the event loop."""

    def __init__(self, compression: Compression = Compression.OFF) -> None:
        """`compression` is for what is put. What others have compressed is read in any case, if its library
        is there."""
        self._compression = compression
        self._codec = Codec()
        self._decoding, self._encoding = (
            _Threads(DECODING_MAX, "decoding"),
            _Threads(ENCODING_MAX, "encoding"),
        )

    async def encode(self, shards: Sequence[Bytes]) -> list[Stored]:
        """How shards of one group are stored."""
        if self._compression is Compression.OFF:
            return [Stored(RAW, shard) for shard in shards]
        [coding] = await self._encoding.run(
            lambda some: [self._codec.choose(each) for each in some], [shards]
        )
        if coding == RAW:
            return [Stored(RAW, shard) for shard in shards]
        return await self._encoding.run(
            lambda some: [Stored(*self._codec.encode(coding, shard)) for shard in some], shards
        )

    async def decode(self, stored: Sequence[Stored], into: Sequence[memoryview]) -> list[int]:
        """Fills each buffer with what was stored, and returns the xxh3_64 of what it has then. What cannot be
        decoded becomes zeros, so that nothing passes for it that the buffer had before."""
        pairs = list(zip(stored, into, strict=True))
        if all(one.coding == RAW for one in stored):
            return [self._filled(one, buffer) for one, buffer in pairs]
        return await self._decoding.run(
            lambda some: [self._filled(one, buffer) for one, buffer in some], pairs
        )

    async def sums(self, stored: Sequence[Stored], sizes: Sequence[int]) -> list[int]:
        """The xxh3_64 of what stored bytes become, each of which is to have that size."""

        def sums_of(some: Sequence[tuple[Stored, int]]) -> list[int]:
            return [
                xxh3_64(one.data) if one.coding == RAW else self._filled(one, np.empty(size, np.uint8).data)
                for one, size in some
            ]

        pairs = list(zip(stored, sizes, strict=True))
        if all(one.coding == RAW for one in stored):
            return sums_of(pairs)
        return await self._decoding.run(sums_of, pairs)

    def _filled(self, one: Stored, buffer: memoryview) -> int:
        try:
            self._codec.decode(one.coding, one.data, buffer)
        except CodingError:
            np.frombuffer(buffer, np.uint8)[:] = 0
        return xxh3_64(buffer)


class _Threads:
    """Some threads, each of which begins when it is needed."""

    def __init__(self, most: int, name: str) -> None:
        self._count = min(most, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(self._count, name)

    async def run(
        self, call: Callable[[Sequence[Task]], list[Result]], tasks: Sequence[Task]
    ) -> list[Result]:
        """Divides tasks among the threads. Returns, or is cancelled, when none of them works on it any more,
        because they may write into slots that would become another block's."""
        loop = asyncio.get_running_loop()
        parts = min(self._count, len(tasks))
        futures = [loop.run_in_executor(self._pool, call, tasks[part::parts]) for part in range(parts)]
        try:
            await asyncio.shield(asyncio.wait(futures))
        except asyncio.CancelledError:
            await asyncio.wait(futures)
            raise
        results: list[Result] = []
        for at in range(len(tasks)):
            results.append(futures[at % parts].result()[at // parts])
        return results
