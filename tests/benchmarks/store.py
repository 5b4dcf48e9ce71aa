"""What a store's worker puts and gets, against the store's own client, in one run.

    python -m tests.benchmarks.store [--json] [--url URL --options NAME=VALUE,...] [--sizes 1m,2m]

They take turns: obstore, with as many calls at once and objects as large as the worker's, and the worker
process, driven by jobs as the front drives it, records, copies and checksums and all. Without `--url`, the
store is SeaweedFS on loopback if it is installed (`make test-remote`), and else a folder in memory. `_ratio`
is the worker's bytes a second over obstore's, both medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import obstore
from kvtierd.config.store import options as read_options
from kvtierd.memory.host_pool import HostPool
from kvtierd.tiers.disk.image import DiskImage, disk_geometry
from kvtierd.tiers.store.obstore_store import ObstoreStore
from kvtierd.workers.store.moving import PACK_BYTES
from kvtierd.workers.supervisor.kinds import OPTIONS_VARIABLE

from tests.benchmarks.disk_turns import (
    EXTENT_BYTES,
    POOL_BYTES,
    SLAB_BYTES,
    WINDOW_BYTES,
    Bench,
    Turn,
    by_worker,
    data_of,
    new_turn,
)
from tests.integration.disk.rig import Worker
from tests.support import seaweed
from tests.support.pools import whole
from tests.support.seaweed import BUCKET, Seaweed

SIZES = {"64k": 64 << 10, "1m": 1 << 20, "2m": 2 << 20}
TURN_BYTES = 128 << 20
REPETITIONS = 5
DEADLINE_S = 60.0
PUTS, GETS = 4, 16
"""At once, as the worker has them."""


@contextmanager
def store_at(url: str, options: dict[str, Any]) -> Iterator[Bench]:
    """A worker for the store at a URL, and a pool of random bytes."""
    with (
        whole(HostPool.open(None, POOL_BYTES, EXTENT_BYTES, lock_timeout_s=1)) as pool,
        DiskImage(disk_geometry(SLAB_BYTES, EXTENT_BYTES)) as image,
    ):
        random = np.random.default_rng(1)
        pool.array[pool.geometry.first_extent_offset :] = random.integers(
            0, 256, pool.geometry.capacity_bytes, np.uint8
        )
        worker = Worker(
            Path(),
            pool,
            image,
            load=True,
            size_bytes=SLAB_BYTES,
            environment={OPTIONS_VARIABLE: json.dumps(options)},
            module="kvtierd.workers.store",
            own={
                "--url": url,
                "--host": "0000000a",
                "--call-deadline-s": DEADLINE_S,
                "--look-every-s": 600,
                "--reads": GETS,
                "--writes": PUTS,
            },
        )
        try:
            worker.ready()
            image.recover(pool.boot_nonce)
            yield Bench(Path(), pool, image, worker, pool.array)
        finally:
            worker.kill()


def by_obstore(bench: Bench, turn: Turn, what: str, url: str, options: dict[str, Any]) -> float:
    """Bytes a second of the store's own client: objects of PACK_BYTES, each with several blocks."""
    per_object = max(1, PACK_BYTES // turn.slot_bytes)
    host = [data_of(bench.pool, slot, turn.slot_bytes).data for slot in turn.host_slots.tolist()]
    rows = [
        range(first, min(first + per_object, len(turn.slots)))
        for first in range(0, len(turn.slots), per_object)
    ]

    async def all_of_them() -> float:
        store: Any = ObstoreStore(url, options, DEADLINE_S)._store
        limit = asyncio.Semaphore(PUTS if what == "write" else GETS)

        async def one(number: int) -> None:
            async with limit:
                name, count = f"own/{number}", len(rows[number])
                if what == "write":
                    data = b"".join(host[row % len(host)] for row in rows[number])
                    await obstore.put_async(store, name, data, use_multipart=False)
                else:
                    found = await obstore.get_ranges_async(
                        store, name, starts=[0], lengths=[count * turn.slot_bytes]
                    )
                    whole_object = memoryview(found[0])
                    for place, row in enumerate(rows[number]):
                        begin = place * turn.slot_bytes
                        host[row % len(host)][:] = whole_object[begin : begin + turn.slot_bytes]

        began_s = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(len(rows))))
        return turn.bytes / (time.perf_counter() - began_s)

    return asyncio.run(all_of_them())


def measure(
    bench: Bench, slot_bytes: int, url: str, options: dict[str, Any], repetitions: int
) -> dict[str, float]:
    """Figures of one size of blocks."""
    figures: dict[str, list[float]] = {}
    for _ in range(repetitions):
        full = new_turn(bench, slot_bytes, False)
        count = min(len(full.slots), TURN_BYTES // slot_bytes, WINDOW_BYTES // slot_bytes)
        turn = Turn(slot_bytes, False, full.slots[:count], full.host_slots, full.hashes)
        for what in ("write", "read"):
            figures.setdefault(f"{what}_obstore", []).append(by_obstore(bench, turn, what, url, options))
            figures.setdefault(f"{what}_worker", []).append(by_worker(bench, turn, what))
    found: dict[str, float] = {}
    for what, word in (("write", "put"), ("read", "get")):
        own, ours = (statistics.median(figures[f"{what}_{who}"]) for who in ("obstore", "worker"))
        found |= {f"{word}_{{}}_gb_per_s": ours / 1e9, f"{word}_{{}}_ratio": ours / own}
    return found


@contextmanager
def some_store(arguments: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """The store that was asked for, or one of this run's own."""
    if arguments.url:
        yield arguments.url, dict(read_options(arguments.options))
        return
    folder = Path(tempfile.mkdtemp(prefix="kvt-bench-", dir="/dev/shm"))
    try:
        if seaweed.program() is None or arguments.folder:
            yield folder.joinpath("store").as_uri(), {}
            return
        server = Seaweed(folder)
        try:
            yield f"s3://{BUCKET}", server.options()
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--url", default="", help="of a store that there is")
    parser.add_argument("--options", default="", help="NAME=VALUE with commas between them")
    parser.add_argument("--folder", action="store_true", help="a folder in memory, and not SeaweedFS")
    parser.add_argument("--sizes", default="1m,2m", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    arguments = parser.parse_args()
    figures: dict[str, float] = {"store_load": os.getloadavg()[0]}
    for name in arguments.sizes.split(","):
        # A new one for each, because it does not take back at once what is deleted.
        with some_store(arguments) as (url, options):
            with store_at(url, options) as bench:
                found = measure(bench, SIZES[name], url, options, arguments.repetitions)
            figures |= {f"store_{key.format(name)}": value for key, value in found.items()}
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:<32} {value:>10.3f}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
