"""What compression makes of the blocks in a store, and below which bandwidth it makes a restore faster.

    python -m tests.benchmarks.compression FOLDER [--blocks 60] [--bandwidth 100,400]

FOLDER is a store's (`store.url = "file:///FOLDER"`), with packs of any engine, in any coding. Speeds are
bytes of blocks over the processor time of one thread, so they hold for a core that nobody else uses, on a
machine whose caches and memory others may use. With `--bandwidth`, in MB/s, blocks are also read as a host
does it, from a store that gives so much, as they are and compressed in turns: the times are of the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from kvtier_kernels import xxh3_64
from kvtierd.tiers.store import packs
from kvtierd.tiers.store.coder import Coder
from kvtierd.tiers.store.coding import CODINGS, Codec, Compression
from kvtierd.tiers.store.packed import Block, PackNews, Shard, Shelf, Wanted

BLOCKS_PER_READ = 8
REPETITIONS = 5


def blocks_of(folder: Path) -> list[bytes]:
    """The bytes of all shards of all blocks, decoded."""
    codec, found = Codec(), []
    for file in sorted(folder.rglob("*.pack")):
        pack = file.read_bytes()
        head = np.frombuffer(pack, packs.HEAD, 1)[0]
        for record in np.frombuffer(pack, packs.RECORD, int(head["records"]), packs.HEAD.itemsize):
            at, stored_bytes = int(record["offset"]), int(record["stored_bytes"])
            data = bytearray(int(record["data_bytes"]))
            codec.decode(int(record["coding"]), pack[at : at + stored_bytes], memoryview(data))
            if xxh3_64(data) != int(record["checksum"]):
                raise SystemExit(f"{file}: a block does not match its checksum")
            found.append(bytes(data))
    return found


def speeds(coding: int, blocks: Sequence[bytes]) -> tuple[float, float, float]:
    """The ratio, and the MB/s of coding and of decoding."""
    codec = Codec()
    codec.choose(blocks[:1])  # what it needs is there then
    stored_bytes, coding_s, decoding_s = 0, 0.0, 0.0
    buffer = memoryview(bytearray(max(map(len, blocks))))
    for block in blocks:
        began_s = time.thread_time()
        stored = codec._coded(coding, block)
        coded_s = time.thread_time()
        codec.decode(coding, stored, buffer[: len(block)])
        decoding_s += time.thread_time() - coded_s
        coding_s += coded_s - began_s
        stored_bytes += len(stored)
    total = sum(map(len, blocks))
    return total / stored_bytes, total / coding_s / 1e6, total / decoding_s / 1e6


class SlowStore:
    """Objects in memory, which are read with so many bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._objects: dict[str, bytes] = {}

    async def put(self, name: str, parts: Sequence[memoryview]) -> bool:
        self._objects[name] = b"".join(parts)
        return True

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        await asyncio.sleep(sum(length for _, length in ranges) / self._bytes_per_s)
        whole = memoryview(self._objects[name])
        return [whole[begin : begin + length] for begin, length in ranges]

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not needed here")


async def restores(blocks: Sequence[bytes], bytes_per_s: float) -> tuple[float, float]:
    """The seconds of a read of some blocks, as they are and compressed: medians."""
    store, coder = SlowStore(bytes_per_s), Coder(Compression.ZSTD)
    some = [
        Block(bytes([number]) * 32, [Shard(memoryview(block), xxh3_64(block))])
        for number, block in enumerate(blocks[:BLOCKS_PER_READ])
    ]
    shelves = [
        Shelf(store, f"{number}/", bytes(16), 0, "0000000a", coder=each)
        for number, each in enumerate((Coder(), coder))
    ]
    put: list[PackNews] = [await shelf.put(some) for shelf in shelves]
    buffers = [memoryview(bytearray(len(block.shards[0].data))) for block in some]
    wanted = [Wanted(block.hash, at, [buffers[at]]) for at, block in enumerate(some)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPETITIONS):
        for shelf, news, spent in zip(shelves, put, times, strict=True):
            began_s = time.perf_counter()
            got = await shelf.get(news.name, wanted)
            spent.append(time.perf_counter() - began_s)
            assert [each.sums[0] for each in got if each] == [block.shards[0].checksum for block in some]
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", type=int, default=60, help="so many, chosen at random")
    parser.add_argument("--bandwidth", default="", help="MB/s of a store, with commas between them")
    arguments = parser.parse_args()
    everything = blocks_of(arguments.folder)
    chosen = np.random.default_rng(1).permutation(len(everything))[: arguments.blocks]
    blocks = [everything[at] for at in chosen]
    print(f"{len(blocks)} of {len(everything)} shards, of {np.mean([len(b) for b in blocks]):,.0f} bytes")
    best = Codec().choose(blocks[:20])
    for coding in CODINGS:
        ratio, coding_mb, decoding_mb = speeds(coding, blocks)
        mark = "  <- chosen" if coding == best else ""
        print(
            f"elements of {coding & 0xFF}: ratio {ratio:.2f}, coding {coding_mb:.0f} MB/s, decoding "
            f"{decoding_mb:.0f} MB/s; a read by itself, decoded by one thread, is faster below "
            f"{decoding_mb * (1 - 1 / ratio):.0f} MB/s{mark}"
        )
    for bandwidth in filter(None, arguments.bandwidth.split(",")):
        plain_s, coded_s = asyncio.run(restores(blocks, float(bandwidth) * 1e6))
        print(
            f"{bandwidth} MB/s: a read of {BLOCKS_PER_READ} takes {plain_s * 1e3:.1f} ms as they are, "
            f"{coded_s * 1e3:.1f} ms compressed: {plain_s / coded_s:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
