"""Chunk sizes and flights in flight: what a lane loses between two chunks.

A lane moves a large part chunk by chunk; so many chunks fly at a time, an event after each, and the oldest is
waited for before the next is submitted, as the copy worker does. Fragments of 64 KiB, 512 KiB and 2 MiB.
`ratio` is to the ceiling of the same way; `first_us` is how long a chunk takes alone, which is what a load
waits for behind a store.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from kvtier_kernels.cuda import Copies

from tests.gpu.parts.bench import GIB, KIB, MIB, Bench, gb_per_s
from tests.gpu.parts.ceilings import ceilings
from tests.gpu.parts.fragments import U64, scattered, sizes_of
from tests.gpu.parts.loops import D2H, H2D
from tests.gpu.parts.region import Region, open_region

FRAGMENTS = (512 * KIB, 64 * KIB, 2 * MIB)
CHUNKS = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 2 * MIB, 64 * MIB)
FLIGHTS = (2, 1, 4)


def run(bench: Bench) -> None:
    total = bench.pick(GIB, 4 * MIB)
    with open_region(total) as region:
        ceiling = ceilings(bench, region.device)
        for fragment in bench.pick(FRAGMENTS, (16 * KIB,)):
            for flights in FLIGHTS:
                for chunk in bench.pick(CHUNKS, (256 * KIB, MIB)):
                    for way in (H2D, D2H):
                        if chunk >= fragment and bench.left_s() > 3:
                            case(bench, region, ceiling, way, fragment, chunk, flights)


def case(
    bench: Bench, region: Region, ceiling: dict[str, float], way: str, fragment: int, chunk: int, flights: int
) -> None:
    """One row: the median of three, over the whole region."""
    rng = np.random.default_rng()
    count = region.n // fragment
    on_device = scattered(region.address, region.n, fragment, count, rng)
    in_host = scattered(region.host.address, region.n, fragment, count, rng)
    sizes = sizes_of(count, fragment)
    lane = Lane(region, way, flights)
    first_us = lane.run(on_device, in_host, sizes, chunk // fragment, chunks_max=1) * 1e6
    taken = [lane.run(on_device, in_host, sizes, chunk // fragment) for _ in range(bench.pick(3, 1))]
    rate = gb_per_s(count * fragment, float(np.median(taken)))
    bench.row(
        way=way,
        fragment_bytes=fragment,
        chunk_bytes=chunk,
        flights=flights,
        first_us=first_us,
        gb_per_s=rate,
        ratio=rate / ceiling[way],
        checked_mib=region.check(on_device, in_host, sizes) / MIB,
    )
    lane.close()


class Lane:
    """One direction of a copy worker, without parts and records."""

    def __init__(self, region: Region, way: str, flights: int) -> None:
        self._driver, self._stream, self._way = region.device.driver, region.stream, way
        self._copies = Copies(self._driver)
        self._events = [self._driver.event_create() for _ in range(flights)]

    def run(
        self,
        on_device: U64,
        in_host: U64,
        sizes: U64,
        per_chunk: int,
        chunks_max: int | None = None,
    ) -> float:
        """Seconds until everything has landed."""
        flying: deque[int] = deque()
        begin = time.perf_counter()
        for number, first in enumerate(range(0, len(sizes), per_chunk)[:chunks_max]):
            if len(flying) == len(self._events):
                self._driver.event_synchronize(flying.popleft())
            some = slice(first, first + per_chunk)
            if self._way == H2D:
                self._copies.to_device(on_device[some], in_host[some], sizes[some], self._stream)
            else:
                self._copies.to_host(in_host[some], on_device[some], sizes[some], self._stream)
            event = self._events[number % len(self._events)]
            self._driver.event_record(event, self._stream)
            flying.append(event)
        while flying:
            self._driver.event_synchronize(flying.popleft())
        return time.perf_counter() - begin

    def close(self) -> None:
        for event in self._events:
            self._driver.event_destroy(event)
