"""Lookups: in the index page, over gRPC unary and on the session stream, p50 and p99, and a small one behind
a large one.

    python -m tests.benchmarks.rpc [--json]

`local` is the index page, which a client reads by itself (`miss`: 1,024 hashes, the first is not there);
`stream` is what the client library does; `unary` is the public API through a bare stub. All hashes hit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from tests.benchmarks.rig import DEADLINE_S, Load, Rig, connected, hashes_of, microseconds, rig
from tests.integration.daemon.raw import RawSession

SIZES = (1, 64, 1_024, 8_192)
CALLS = {1: 1_500, 64: 1_000, 1_024: 600, 8_192: 150}
TURN_CALLS = 20
PAGE = 4_096
STORED = max(SIZES)


def main() -> int:
    parser = argparse.ArgumentParser(description="Lookups, local and over gRPC.")
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    parser.add_argument("--busy", type=Path, metavar="SOCKET", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.busy:
        keep_busy(arguments.busy)
    with rig(num_blocks=STORED, planes=1, fragment_bytes=PAGE, pool_size="128MiB") as running:
        figures = measure(running)
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:<44} {value:>12,.1f}")
    print(json.dumps(figures))
    return 0


def measure(running: Rig) -> dict[str, float]:
    """Every figure, in one run."""
    hashes = hashes_of("bench", STORED)
    for first in range(0, STORED, 1_024):
        batch = slice(first, first + 1_024)
        if not running.client.store(hashes[batch], list(range(STORED))[batch]).wait(DEADLINE_S).done:
            raise RuntimeError("a store failed")
    joined = b"".join(hashes)
    figures: dict[str, float] = {}
    local(figures, running, hashes)
    for size in SIZES:
        wanted = joined[: size * 32]
        check_hits(running, wanted, size)
        taken = microseconds(
            partial(running.client.lookup, wanted, timeout_s=DEADLINE_S),
            CALLS[size],
        )
        report(figures, f"lookup_grpc_stream_{size}", taken)
    leased(figures, running, joined)
    with Unary(running, joined) as unary:
        for size in SIZES:
            wanted = joined[: size * 32]
            if unary.lookup(wanted) != size:
                raise RuntimeError("not all hashes hit")
            taken = microseconds(partial(unary.lookup, wanted), CALLS[size])
            report(figures, f"lookup_grpc_unary_{size}", taken)
        behind(figures, running, unary, joined)
    return figures


def leased(figures: dict[str, float], running: Rig, joined: bytes) -> None:
    """A lookup with a lease that is given back, against the same lookup without one. They take short turns,
    so that what else the machine does slows down both; the ratio is the median over all pairs of turns."""

    def with_lease(wanted: bytes) -> None:
        with running.client.lookup(wanted, lease=True, timeout_s=DEADLINE_S) as found:
            if not found.leases:
                raise RuntimeError(f"no lease: {found.error}")

    for size in SIZES:
        wanted = joined[: size * 32]
        plain = partial(running.client.lookup, wanted, timeout_s=DEADLINE_S)
        calls: dict[str, Callable[[], object]] = {"plain": plain, "leased": partial(with_lease, wanted)}
        taken: dict[str, list[np.ndarray]] = {name: [] for name in calls}
        for turn in range(2 * CALLS[size] // TURN_CALLS):
            for name in sorted(calls, reverse=turn % 2 == 1):
                # The first call of a turn carries what the turn before gives back.
                taken[name].append(microseconds(calls[name], TURN_CALLS, warm_up=1))
        report(figures, f"lookup_leased_{size}", np.concatenate(taken["leased"]))
        ratios = np.median(taken["leased"], axis=1) / np.median(taken["plain"], axis=1)
        figures[f"lookup_leased_{size}_ratio"] = float(np.median(ratios))


def local(figures: dict[str, float], running: Rig, hashes: list[bytes]) -> None:
    """What the index page says."""
    absent, known_run = hashes_of("absent", 1_024), running.client.known_run
    give_up_s = time.monotonic() + DEADLINE_S
    while known_run(hashes) != STORED:
        if time.monotonic() > give_up_s:
            raise RuntimeError("the index page does not come")
        time.sleep(0.01)
    if known_run(absent) != 0:
        raise RuntimeError("what was never stored is known")
    report(figures, "lookup_local_miss", microseconds(lambda: known_run(absent), CALLS[1]))
    for size in SIZES:
        wanted = hashes[:size]
        taken = microseconds(partial(known_run, wanted), CALLS[size])
        report(figures, f"lookup_local_{size}", taken)


def check_hits(running: Rig, wanted: bytes, size: int) -> None:
    """So that no figure is that of a miss."""
    hits = running.client.lookup(wanted, timeout_s=DEADLINE_S).hits
    if hits != size:
        raise RuntimeError(f"{hits} of {size} hashes hit")


def report(figures: dict[str, float], name: str, taken: np.ndarray) -> None:
    figures[f"{name}_p50_us"] = float(np.percentile(taken, 50))
    figures[f"{name}_p99_us"] = float(np.percentile(taken, 99))


class Unary:
    """The public API: a session of its own, made of generated stubs, with as many blocks stored."""

    def __init__(self, running: Rig, joined: bytes) -> None:
        self._session = RawSession(running.daemon.socket, fragments=(PAGE,), num_blocks=STORED)
        self._session.ready(instance="bench-unary")
        for first in range(0, STORED, 1_024):
            ids = list(range(first, first + 1_024))
            self._session.store(joined[first * 32 : (first + 1_024) * 32], ids)

    def lookup(self, hashes: bytes) -> int:
        request = self._session.lookup_request(hashes, session=self._session.ref())
        return self._session.stub.Lookup(request, timeout=DEADLINE_S).answers[0].hits

    def __enter__(self) -> Unary:
        return self

    def __exit__(self, *exception: object) -> None:
        self._session.close()


def behind(figures: dict[str, float], running: Rig, unary: Unary, joined: bytes) -> None:
    """One-hash calls while another process keeps looking up 8,192 hashes, one call after another; and how
    much of that time the daemon's threads waited for a core: 1 is one thread, always.
    """
    command = [sys.executable, "-m", "tests.benchmarks.rpc", "--busy", str(running.daemon.socket)]
    busy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert busy.stdout is not None
        if busy.stdout.readline() != "busy\n":
            raise RuntimeError("the process that keeps the daemon busy did not start")
        before = Load.of(running.daemon.pid)
        taken = microseconds(lambda: unary.lookup(joined[:32]), CALLS[1])
        on_stream = microseconds(lambda: running.client.lookup(joined[:32], timeout_s=DEADLINE_S), CALLS[1])
        load = Load.of(running.daemon.pid).since(before)
    finally:
        busy.kill()
        busy.wait()
    report(figures, "lookup_one_behind_8192", taken)
    report(figures, "lookup_one_behind_8192_stream", on_stream)
    figures["lookup_one_behind_8192_waited"] = load.waits_s / load.taken_s


def keep_busy(socket: Path) -> None:
    """Looks up 8,192 hashes again and again; says so once the first has hit."""
    wanted = b"".join(hashes_of("bench", STORED))
    with connected(socket, "bench-busy", STORED, 1, PAGE) as (client, _):
        if client.lookup(wanted, timeout_s=DEADLINE_S).hits != STORED:
            raise RuntimeError("not all hashes hit")
        print("busy", flush=True)
        while True:
            client.lookup(wanted, timeout_s=DEADLINE_S)


if __name__ == "__main__":
    sys.exit(main())
