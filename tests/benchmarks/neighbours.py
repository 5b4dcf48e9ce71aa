"""What a tenant's neighbour can do to it: times of its calls alone, and while another user does its worst.

    python -m tests.benchmarks.neighbours [--apart] [--json]

Needs root, to be two users. The neighbour's own processes take processor time from everybody, which no daemon
can prevent; the row "burn" has such processes that never talk to the daemon, to compare with. With --apart,
the neighbour's processes have the last core for themselves, and everything else has the other cores, also
while the victim is alone: what is left is what the daemon lets a neighbour do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from kvtier.v1 import cache_pb2, types_pb2

from tests.integration.daemon.raw import RawSession, Refused, hashes
from tests.security.people import ATTACKER, GID, GROUP, VICTIM, session
from tests.support.process import Daemon

REPO = Path(__file__).resolve().parents[2]
ATTACKS = ("burn", "loads", "stores", "gates", "lookups", "calls")
FRAGMENTS = (1 << 16, 1 << 16)
"""Two planes of 64 KiB: a block has 128 KiB."""
VICTIM_BLOCKS, ATTACKER_BLOCKS = 8, 64
"""1 MiB is loaded and stored at a time, and 8 MiB."""
SESSIONS = 8
GATED = 1_000
"""Parts that wait for a doorbell, for each session."""
LOOKUP_HASHES = 65_536
CALLS = 300
WARM_UP_S = 2.0


def connect(uid: int, socket: Path, name: str, blocks: int) -> RawSession:
    with_memory = session(uid, socket, fragments=FRAGMENTS, num_blocks=blocks)
    return with_memory.ready(instance=name)


# --- the neighbour ---


def attack(socket: Path, kind: str) -> None:
    """Does its worst until it is killed. Says READY on its standard output once it does."""
    if kind == "burn":
        for _ in range(2):
            threading.Thread(target=_burn, daemon=True).start()
    else:
        for number in range(SESSIONS):
            one = connect(os.geteuid(), socket, f"attacker {number}", ATTACKER_BLOCKS)
            threading.Thread(target=_WORST[kind], args=(one, number), daemon=True).start()
    print("READY", flush=True)
    signal.pause()


def _burn() -> None:
    while True:
        np.random.default_rng(0).integers(0, 256, 1 << 22, np.uint8)


def _loads(one: RawSession, number: int) -> None:
    keys = hashes(ATTACKER_BLOCKS, seed=number)
    ids = list(range(ATTACKER_BLOCKS))
    one.store(keys, ids)
    while True:
        one.load(keys, ids)


def _stores(one: RawSession, number: int) -> None:
    for seed in range(1_000_000):
        one.store(hashes(ATTACKER_BLOCKS, seed=1_000_000 * (number + 1) + seed), list(range(ATTACKER_BLOCKS)))


def _gates(one: RawSession, number: int) -> None:
    for ticket in range(1, 1 << 40):
        signals = {
            "ticket": ticket,
            "gate": types_pb2.GATE_DOORBELL,
            "doorbell": 0,
            "doorbell_value": 1 << 40,
        }
        try:
            one.attached.call(store=one.store_request(hashes(1, seed=number << 20 | ticket), [0], **signals))
        except Refused:
            time.sleep(0.01)


def _lookups(one: RawSession, number: int) -> None:
    keys = hashes(LOOKUP_HASHES, seed=number)
    query = cache_pb2.GroupQuery(mode=cache_pb2.LOOKUP_MODE_EXACT, hashes=keys)
    while True:
        one.attached.call(lookup=cache_pb2.LookupRequest(queries=[query]))


def _calls(one: RawSession, number: int) -> None:
    keys = hashes(1, seed=number)
    while True:
        one.lookup(keys)


_WORST: dict[str, Callable[[RawSession, int], None]] = {
    "loads": _loads,
    "stores": _stores,
    "gates": _gates,
    "lookups": _lookups,
    "calls": _calls,
}


# --- the victim ---


def measure(one: RawSession) -> dict[str, np.ndarray]:
    """Seconds of each call: a load, a store of new blocks, and a lookup."""
    ids = list(range(VICTIM_BLOCKS))
    keys = hashes(VICTIM_BLOCKS, seed=1)
    one.store(keys, ids)
    found: dict[str, list[float]] = {"load": [], "store": [], "lookup": []}
    for _ in range(CALLS):
        new = hashes(VICTIM_BLOCKS, seed=time.monotonic_ns())
        for name, call in (
            ("load", lambda: one.load(keys, ids)),
            ("store", lambda new=new: one.store(new, ids)),
            ("lookup", lambda: one.lookup(keys)),
        ):
            started_s = time.perf_counter()
            call()
            found[name].append(time.perf_counter() - started_s)
    return {name: np.array(times) for name, times in found.items()}


def cores(apart: bool) -> tuple[set[int], set[int]]:
    """The cores of the daemon and the victim, and those of the neighbour."""
    every = sorted(os.sched_getaffinity(0))
    if not apart:
        return set(every), set(every)
    if len(every) < 2:
        sys.exit("--apart needs two cores: leave it out")
    return set(every[:-1]), {every[-1]}


def bench(quiet: bool, apart: bool) -> dict[str, float]:
    own_cores, neighbours_cores = cores(apart)
    os.sched_setaffinity(0, own_cores)  # the daemon and its workers inherit it
    folder = Path(tempfile.mkdtemp(prefix="kvtb-", dir="/tmp"))
    folder.chmod(0o755)
    run = folder / "run"
    run.mkdir()
    daemon = Daemon(run, folder / "pool", server__group=GROUP, pool__size="512MiB", pool__extent_size="0")
    figures: dict[str, float] = {}
    try:
        daemon.wait_whole()
        victim = connect(VICTIM, daemon.socket, "victim", VICTIM_BLOCKS)
        measure(victim)
        alone = measure(victim)
        if not quiet:
            print(f"  load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
            for name, times in alone.items():
                p50, p99 = (np.percentile(times, q) * 1e3 for q in (50, 99))
                print(f"  {'alone':<8} {name:<7} p50 {p50:8.2f} ms             p99 {p99:8.2f} ms", flush=True)
        for kind in ATTACKS:
            command = [
                sys.executable,
                "-m",
                "tests.benchmarks.neighbours",
                "--attack",
                kind,
                str(daemon.socket),
            ]
            wrap = ["taskset", "--cpu-list", ",".join(map(str, neighbours_cores))]
            wrap += ["setpriv", f"--reuid={ATTACKER}", f"--regid={ATTACKER}", f"--groups={GID}"]
            neighbour = subprocess.Popen([*wrap, *command], stdout=subprocess.PIPE, text=True, cwd=REPO)
            assert neighbour.stdout is not None
            assert neighbour.stdout.readline() == "READY\n"
            time.sleep(WARM_UP_S)
            beside = measure(victim)
            neighbour.kill()
            neighbour.wait()
            time.sleep(WARM_UP_S)
            for name, times in beside.items():
                p50, p99 = (np.percentile(times, q) / np.percentile(alone[name], q) for q in (50, 99))
                figures[f"neighbour_{kind}_{name}_p50_ratio"] = float(p50)
                figures[f"neighbour_{kind}_{name}_p99_ratio"] = float(p99)
                if not quiet:
                    print(
                        f"  {kind:<8} {name:<7} p50 {np.median(times) * 1e3:8.2f} ms (x {p50:5.1f})   "
                        f"p99 {np.percentile(times, 99) * 1e3:8.2f} ms (x {p99:5.1f})",
                        flush=True,
                    )
        victim.close()
    finally:
        daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures only")
    parser.add_argument("--apart", action="store_true", help="the neighbour has a core of its own")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("socket", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.attack:
        attack(Path(arguments.socket), arguments.attack)
    else:
        print(json.dumps(bench(arguments.json, arguments.apart)))


if __name__ == "__main__":
    main()
