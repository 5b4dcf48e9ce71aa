"""A store alone, and beside another engine of the same user that loads without a pause; and the reverse.

    python -m tests.benchmarks.store_behind_loads [--json]

Each call has 64 blocks of 160 KiB (10 MiB), and is measured from the call to DONE. The other engine is a
process of its own, and has always six transfers of as many blocks under way.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
from kvtier import Client, Transfer

from tests.benchmarks.rig import DEADLINE_S, connected, hashes_of, rig

PLANES, FRAGMENT_BYTES = 10, 16 * 1024
BLOCKS = 64
CALLS, WARM_UP = 60, 40
UNDER_WAY = 6
POOL = "256MiB"
"""So small that the warm-up has written all of it: a first write to a page takes longer."""
REPO = Path(__file__).resolve().parents[2]


def loads(client: Client) -> Callable[[], Transfer]:
    """Submits a load of the same blocks, each time."""
    hashes, ids = hashes_of("other", BLOCKS), list(range(BLOCKS))
    if not client.store(hashes, ids).wait(DEADLINE_S).done:
        raise RuntimeError("a store failed")
    found = client.lookup(hashes, lease=True)
    if found.hits != BLOCKS:
        raise RuntimeError(f"{found.hits} hits of {BLOCKS}")
    return lambda: client.load(found, ids, keep_lease=True)


def stores(client: Client) -> Callable[[], Transfer]:
    """Submits a store of new blocks, each time."""
    names, ids = count(), list(range(BLOCKS))
    return lambda: client.store(hashes_of(f"{os.getpid()}/{next(names)}", BLOCKS), ids)


SUBMIT: dict[str, Callable[[Client], Callable[[], Transfer]]] = {"load": loads, "store": stores}


def keep_busy(socket: Path, kind: str) -> None:
    """Until it is killed. Says READY on its standard output once it has begun."""
    with connected(socket, "busy", BLOCKS, PLANES, FRAGMENT_BYTES) as (client, _):
        submit = SUBMIT[kind](client)
        under_way = [submit() for _ in range(UNDER_WAY)]
        print("READY", flush=True)
        while True:
            if not under_way.pop(0).wait(DEADLINE_S).done:
                raise RuntimeError(f"a {kind} of the other engine failed")
            under_way.append(submit())


@contextmanager
def beside(socket: Path, kind: str) -> Iterator[None]:
    """While another engine does this without a pause."""
    command = [sys.executable, "-m", "tests.benchmarks.store_behind_loads", f"--busy={kind}", str(socket)]
    other = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        if other.stdout.readline() != "READY\n":
            raise RuntimeError("the other engine did not begin")
        yield
        if other.poll() is not None:
            raise RuntimeError("the other engine has ended")
    finally:
        other.kill()
        other.wait()


def measure(client: Client, kind: str) -> np.ndarray:
    """Milliseconds of each call."""
    submit = SUBMIT[kind](client)
    taken = np.empty(WARM_UP + CALLS)
    for index in range(len(taken)):
        start = time.perf_counter()
        if not submit().wait(DEADLINE_S).done:
            raise RuntimeError(f"a {kind} failed")
        taken[index] = time.perf_counter() - start
    return taken[WARM_UP:] * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--busy", choices=SUBMIT, help=argparse.SUPPRESS)
    parser.add_argument("socket", nargs="?", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.busy:
        keep_busy(arguments.socket, arguments.busy)
    figures: dict[str, float] = {}
    with rig(num_blocks=BLOCKS, planes=PLANES, fragment_bytes=FRAGMENT_BYTES, pool_size=POOL) as running:
        for kind, other in (("store", "load"), ("load", "store"), ("load", "load")):
            alone = measure(running.client, kind)
            with beside(running.daemon.socket, other):
                together = measure(running.client, kind)
            name = f"{kind}_beside_{other}s"
            for what, percentile in (("p50", 50), ("p90", 90)):
                one, both = np.percentile(alone, percentile), np.percentile(together, percentile)
                figures[f"{name}_alone_{what}_ms"] = float(one)
                figures[f"{name}_{what}_ms"] = float(both)
                figures[f"{name}_{what}_ratio"] = float(both / one)
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:<44} {value:>12,.2f}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
