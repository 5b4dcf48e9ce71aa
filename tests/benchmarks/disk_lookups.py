"""Lookups while the disk tier writes at full rate, against the same without a disk.

    python -m tests.benchmarks.disk_lookups [--json] [--directory DIR]

Two daemons, one with a disk in write-through, take turns under the same load: one process stores blocks of
1 MiB as fast as they are taken, and this one looks up one hash and 1,024, which hit, on its stream.
`_no_disk` is without, `_ratio` with ÷ without. `_mb_per_s` is what the disk wrote, `_stored_mb_per_s` what
was stored; `_behind` is the part of the time in which the disk had something left to write.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
from kvtier import Client, Transfer

from tests.benchmarks.rig import DEADLINE_S, connected, hashes_of
from tests.support.process import Daemon

MIB = 1 << 20
TURNS = 4
TURN_S = 1.2
LOOKS = 6
"""In each turn, at how far the disk is."""
SETTLE_S = 0.3
"""After the stores have begun, before a measurement."""
SIZES = (1, 1_024)
PAGE = 4_096
POOL_BYTES = 1_026 * MIB
SLAB_BYTES = 2_050 * MIB
STORED_BLOCKS, PLANES, FRAGMENT_BYTES = 64, 16, 64 << 10
BATCH_BLOCKS, BATCHES = 16, 4
"""Of each store, and how many stores are on their way at once."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk to write to")
    parser.add_argument("--store", type=Path, metavar="SOCKET", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.store:
        store_for_ever(arguments.store)
    figures: dict[str, float] = {}
    if shutil.disk_usage(arguments.directory).free < 2 * SLAB_BYTES:
        print(f"skipped: no room for {SLAB_BYTES // MIB} MiB in {arguments.directory}", file=sys.stderr)
    else:
        figures = measure(arguments.directory)
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:<44} {value:>12,.2f}")
    print(json.dumps(figures))
    return 0


@dataclass
class Side:
    """A daemon under load, with what was measured of it."""

    daemon: Daemon
    client: Client
    storer: subprocess.Popen[str]
    taken_us: dict[int, list[float]] = field(default_factory=lambda: {size: [] for size in SIZES})
    written_bytes: int = 0
    stored_bytes: int = 0
    measured_s: float = 0.0
    behind: list[bool] = field(default_factory=list)
    """Whether the disk had something left to write, whenever it was asked."""

    def look(self) -> tuple[int, int]:
        """Bytes written and stored so far."""
        status = self.daemon.status()
        self.behind.append(any(disk.writing_bytes for disk in status.disks))
        return sum(disk.written_bytes for disk in status.disks), status.counters.stored_bytes

    @contextmanager
    def stores(self) -> Iterator[None]:
        """The other process stores meanwhile."""
        self._tell("go")
        try:
            yield
        finally:
            self._tell("stop")

    def _tell(self, what: str) -> None:
        assert self.storer.stdin is not None
        assert self.storer.stdout is not None
        print(what, file=self.storer.stdin, flush=True)
        if self.storer.stdout.readline() != f"{what}\n":
            raise RuntimeError("the process that stores has ended")


def measure(directory: Path) -> dict[str, float]:
    """Every figure, in one run."""
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="kvt-bench-", dir=directory))
        stack.callback(shutil.rmtree, folder)
        disk = {"disk__paths": folder, "disk__size": SLAB_BYTES, "disk__write_mode": "through"}
        sides = {"disk": stack.enter_context(side(disk)), "no_disk": stack.enter_context(side({}))}
        hashes = b"".join(hashes_of("measured", max(SIZES)))
        for turn in range(TURNS):
            for name in ("disk", "no_disk") if turn % 2 == 0 else ("no_disk", "disk"):
                one_turn(sides[name], hashes)
    figures: dict[str, float] = {}
    for size in SIZES:
        for percent in (50, 99):
            taken = {name: float(np.percentile(sides[name].taken_us[size], percent)) for name in sides}
            stem = f"lookup_{size}_disk_writing_p{percent}"
            figures |= {f"{stem}_us": taken["disk"], f"{stem}_no_disk_us": taken["no_disk"]}
            figures[f"{stem}_ratio"] = taken["disk"] / taken["no_disk"]
    writing = sides["disk"]
    if not writing.written_bytes:
        raise RuntimeError("the disk has written nothing")
    figures["lookup_disk_writing_mb_per_s"] = writing.written_bytes / writing.measured_s / 1e6
    figures["lookup_disk_writing_stored_mb_per_s"] = writing.stored_bytes / writing.measured_s / 1e6
    figures["lookup_disk_writing_behind"] = float(np.mean(writing.behind))
    return figures


def one_turn(side: Side, hashes: bytes) -> None:
    with side.stores():
        time.sleep(SETTLE_S)
        (written, stored), began_s = side.look(), time.perf_counter()
        for _ in range(LOOKS):
            end_s = time.perf_counter() + TURN_S / LOOKS
            while time.perf_counter() < end_s:
                for size in SIZES:
                    wanted = hashes[: size * 32]
                    start_s = time.perf_counter()
                    found = side.client.lookup(wanted, timeout_s=DEADLINE_S)
                    side.taken_us[size].append((time.perf_counter() - start_s) * 1e6)
                    if found.hits != size:
                        raise RuntimeError(f"{found.hits} of {size} hashes hit")
            written_now, stored_now = side.look()
        side.measured_s += time.perf_counter() - began_s
        side.written_bytes += written_now - written
        side.stored_bytes += stored_now - stored


@contextmanager
def side(settings: dict[str, object]) -> Iterator[Side]:
    """A daemon of its own, a client whose blocks hit, and a process that waits to store."""
    with ExitStack() as stack:
        run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
        stack.callback(shutil.rmtree, run, ignore_errors=True)
        shm = Path(tempfile.mkdtemp(prefix="kvtier-test-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        more = {"pool__size": POOL_BYTES, "pool__extent_size": "16MiB"}
        daemon = Daemon(run, shm / "pool", **more, **settings)  # type: ignore[arg-type]
        stack.callback(daemon.kill)
        count = max(SIZES)
        client, _ = stack.enter_context(connected(daemon.socket, "measured", count, 1, PAGE))
        if not client.store(hashes_of("measured", count), list(range(count))).wait(DEADLINE_S).done:
            raise RuntimeError("a store failed")
        # Held, or the other process's stores would have them evicted while this one is measuring elsewhere.
        held = stack.enter_context(client.lookup(hashes_of("measured", count), lease=True))
        if held.hits != count:
            raise RuntimeError("what was stored does not hit")
        command = [sys.executable, "-m", "tests.benchmarks.disk_lookups", "--store", str(daemon.socket)]
        storer = stack.enter_context(
            subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        stack.callback(storer.kill)
        yield Side(daemon, client, storer)


def store_for_ever(socket: Path) -> NoReturn:
    """Stores new blocks between the lines "go" and "stop" of standard input, each answered; ends with it."""
    going = threading.Event()
    with connected(socket, "storing", STORED_BLOCKS, PLANES, FRAGMENT_BYTES) as (client, memory):
        memory.array[:] = np.random.default_rng(1).integers(0, 256, len(memory.array), np.uint8)

        def store_while_going() -> None:
            random = np.random.default_rng()
            under_way: deque[Transfer] = deque()
            while going.is_set() or under_way:
                if going.is_set() and len(under_way) < BATCHES:
                    first = random.integers(STORED_BLOCKS // BATCH_BLOCKS) * BATCH_BLOCKS
                    hashes = random.integers(0, 256, (BATCH_BLOCKS, 32), np.uint8)
                    under_way.append(client.store(hashes, np.arange(first, first + BATCH_BLOCKS)))
                else:
                    under_way.popleft().wait(DEADLINE_S)

        storing: threading.Thread | None = None
        for line in sys.stdin:
            if line == "go\n":
                going.set()
                storing = threading.Thread(target=store_while_going)
                storing.start()
            elif storing is not None:
                going.clear()
                storing.join()
            print(line, end="", flush=True)
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
