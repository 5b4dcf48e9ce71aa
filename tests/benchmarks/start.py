"""Cold and warm starts of a real daemon, against the size of the pool and the blocks in it.

    python -m tests.benchmarks.start [--json] [--sizes 1,4,16]

Cold (`start_cold_16gib_…`): there is no pool yet. `_serving_s`: from the exec until the daemon says that it
serves; `_first_hit_s`: until a client, made then, has stored a block and loaded it again, with its bytes;
`_whole_s`: until all of the pool can be used. Sizes that memory has no room for are left out, aloud.

Warm (`start_warm_1m_…`): a daemon was killed with SIGKILL on a pool with a million blocks. `_first_hit_s`:
until a client has loaded one of them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tests.benchmarks import restart, restart_daemon
from tests.benchmarks.restart_daemon import SPARE_BYTES, Pool, memory_free
from tests.benchmarks.rig import connected, hashes_of
from tests.support.process import Daemon

GIB = 1 << 30
SIZES_GIB = (1, 4, 16)
REPETITIONS = 3
EXEC = ("env",)
"""Before the command, so that it is started by exec and pays for its imports, as an operator's is."""
BLOCK_BYTES = 64 << 10


def cold(size_bytes: int, *, whole: bool) -> dict[str, float]:
    """One start. `whole`: also waits until all of the pool can be used."""
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp")))
        shm = Path(tempfile.mkdtemp(prefix="kvtier-test-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        began_s = time.perf_counter()
        daemon = Daemon(run, shm / "pool", wrap=EXEC, pool__size=size_bytes, pool__extent_size=None)
        serving_s = time.perf_counter() - began_s
        stack.callback(daemon.kill)
        with connected(daemon.socket, "bench", 2, 1, BLOCK_BYTES) as (client, memory):
            memory.array[:BLOCK_BYTES] = np.arange(BLOCK_BYTES, dtype=np.uint32).astype(np.uint8)
            hashes = hashes_of("first", 1)
            stored = client.store(hashes, [0]).wait(60)
            loaded = client.load(client.lookup(hashes, lease=True, timeout_s=60), [1]).wait(60)
            first_hit_s = time.perf_counter() - began_s
            planes = memory.array.reshape(2, BLOCK_BYTES)
            if not (stored.done and loaded.done and np.array_equal(planes[0], planes[1])):
                raise RuntimeError(f"the first store and load failed: {stored}, {loaded}")
        taken = {"serving_s": serving_s, "first_hit_s": first_hit_s}
        if whole:
            daemon.wait_whole()
            taken["whole_s"] = time.perf_counter() - began_s
        # The next one needs the memory, which a killed daemon's workers give back a little later.
        daemon.stop()
        return taken


def colds(sizes_gib: tuple[int, ...]) -> dict[str, float]:
    """Medians; how long a pool takes to be whole is measured once."""
    figures: dict[str, float] = {}
    for size in sizes_gib:
        if (free := memory_free()) < size * GIB + SPARE_BYTES:
            print(f"{size} GiB: skipped, {free >> 20} MiB of memory are free", file=sys.stderr, flush=True)
            continue
        taken = [cold(size * GIB, whole=number == 0) for number in range(REPETITIONS)]
        for key in taken[0]:
            figures[f"start_cold_{size}gib_{key}"] = statistics.median(
                each[key] for each in taken if key in each
            )
    return figures


def warm() -> dict[str, float]:
    """A million slots, by the same way as `restart`, but started by exec."""
    [shape] = [shape for shape in restart.SMALL if shape.name == "1m"]
    with tempfile.TemporaryDirectory(prefix="kvt-", dir="/tmp") as folder:
        pool = Pool(shape, Path(folder), wrap=EXEC)
        try:
            pool.fill()
            starts = [pool.start(turn) for turn in range(REPETITIONS)]
        finally:
            pool.remove()
    return {f"start_warm_1m_{key}": value for key, value in restart_daemon.medians(starts).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES_GIB)), help="GiB of the cold pools")
    parser.add_argument("--cold", action="store_true", help="cold starts only")
    arguments = parser.parse_args()
    figures = colds(tuple(int(size) for size in arguments.sizes.split(",")))
    if not arguments.cold:
        figures |= warm()
    if not arguments.json:
        for key, value in figures.items():
            print(f"{key:<36} {value:8.3f}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
