"""What an idle daemon takes of a core: its front and its workers, with 0, 16 and 64 engines that are attached
and do nothing.

    python -m tests.benchmarks.idle [--json] [--seconds S]

Each engine is a client of its own, ready, with a heartbeat, an index page and memory for a few blocks. All of
them live in one process, which is not counted. The pool holds some blocks, as it would: an idle daemon still
compares samples of them with their checksums, and `_unsampled` is the same without that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tests.benchmarks.rig import Load, connected, hashes_of
from tests.support.process import Daemon

SECONDS = 30.0
SETTLE_S = 3.0
"""Engines attach, the pool is mapped and compared, and then nothing happens."""
ENGINES = (0, 16, 64)
STORED = 512
"""Blocks of 64 KiB."""


def processes(daemon: Daemon) -> dict[str, int]:
    """The front, and each worker, by name."""
    workers = {worker.device: worker.pid for worker in daemon.status().workers}
    return {"front": daemon.pid, **workers}


def measure(engines: int, seconds: float, **settings: object) -> dict[str, float]:
    """Percent of a core, by process."""
    run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    shm = Path(tempfile.mkdtemp(prefix="kvtier-test-bench-", dir="/dev/shm"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, run, ignore_errors=True)
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        daemon = Daemon(
            run, shm / "pool", wrap=["env"], pool__size="130MiB", pool__extent_size="16MiB", **settings
        )
        stack.callback(daemon.kill)
        with connected(daemon.socket, "filler", STORED, 1, 64 << 10) as (client, _):
            stored = client.store(hashes_of("idle", STORED), np.arange(STORED)).wait(60)
            if not stored.done:
                raise RuntimeError(f"the pool could not be filled: {stored}")
        for number in range(engines):
            client, _ = stack.enter_context(connected(daemon.socket, f"engine-{number}", 8, 1, 64 << 10))
            client.lookup(hashes_of("nothing", 1), timeout_s=60)
        time.sleep(SETTLE_S)
        pids = processes(daemon)
        before = {name: Load.of(pid) for name, pid in pids.items()}
        time.sleep(seconds)
        after = {name: Load.of(pid).since(before[name]) for name, pid in pids.items()}
        if len(daemon.status().instances) != engines:
            raise RuntimeError(f"not all of {engines} engines are attached any more")
        return {name: 100 * load.run_s / load.taken_s for name, load in after.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long each is looked at")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    cases: list[tuple[str, int, dict[str, object]]] = [(str(count), count, {}) for count in ENGINES]
    cases.append((f"{ENGINES[-1]}_unsampled", ENGINES[-1], {"integrity__sample_bytes_per_s": 0}))
    for name, count, settings in cases:
        taken = measure(count, arguments.seconds, **settings)
        figures[f"idle_{name}_percent"] = sum(taken.values())
        figures |= {f"idle_{name}_{process}_percent": percent for process, percent in taken.items()}
    if not arguments.json:
        for key, value in figures.items():
            print(f"{key:<36} {value:8.3f}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
