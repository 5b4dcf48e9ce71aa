"""`make bench-peers`: kvtier beside LMCache's server, Mooncake Store, and one memcpy, in one run.

    python -m tests.benchmarks.peers                        everything, half an hour on two cores
    python -m tests.benchmarks.peers --quick                three minutes: fewer of everything, no vLLM
    python -m tests.benchmarks.peers --only lookups,copies  some parts

Peers are installed into environments of their own below build/, pinned. Who cannot be measured here is named
with the reason. What is stored is unique for each block, and each byte that comes back is compared. Peers
take turns within each repetition. The report is build/peers/report.html, and report.md, with results.json
beside it; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.peers import copies, faults, lookups, mixed, registry, replay, report, rows
from tests.benchmarks.peers.driver import SHAPES, Peer
from tests.benchmarks.peers.machine import Busy, describe
from tests.benchmarks.peers.running import Running

OUT = Path(__file__).resolve().parents[3] / "build" / "peers"
PARTS = {
    "lookups": "lookups by hashes, entries and callers",
    "copies": "stores and loads of every model's shape",
    "replay": "a real vLLM: time to the first token, restored and under two traces",
    "mixed": "stores, loads and lookups at once",
    "faults": "engines and servers killed, loads taken back, bytes flipped",
}
MINUTES = 27
"""A whole run ends before that; what repeats, repeats less then."""
AFTER_REPLAY_S = 5 * 60
MEMORY_LEFT_BYTES = 3 << 30
"""Of the machine's memory, for everybody else."""
_started_s = time.monotonic()


def progress(text: str) -> None:
    """One line, with the time since the start."""
    seconds = time.monotonic() - _started_s
    print(
        f"[{int(seconds // 60):2}:{int(seconds % 60):02}] {text.splitlines()[0]}", file=sys.stderr, flush=True
    )


class PeersRun:
    """One run: what was asked for, and what was found so far."""

    def __init__(self, only: tuple[str, ...], quick: bool, minutes: float) -> None:
        self.quick = quick
        self._minutes = minutes
        self._only = only
        self._began = datetime.datetime.now(datetime.UTC)
        self._peers, absent = registry.find_out(progress)
        self._failed: list[dict[str, str]] = []
        self._busy: dict[str, dict[str, float]] = {}
        self.results: dict[str, Any] = {
            "machine": describe(),
            "versions": registry.versions(self._peers),
            "peers": [{"name": one.name, "title": one.title, "how": one.how} for one in self._peers],
            "absent": [asdict(one) for one in absent],
            "quick": quick,
            "began": f"{self._began:%Y-%m-%d %H:%M} UTC",
        }

    def measure(self) -> dict[str, Any]:
        """Everything, part by part; what fails in one part leaves the others."""
        for part in self._only:
            progress(f"=== {part}: {PARTS[part]}")
            before = Busy.now()
            try:
                getattr(self, f"_{part}")()
            except SystemExit:
                self._fail(part)("all", "the run was ended from outside")
                break
            self._busy[part] = Busy.now().since(before)
            progress(
                f"{part}: load {self._busy[part]['load_1m']:.1f}, steal {self._busy[part]['steal_part']:.1%}"
            )
        self.results |= {
            "failed": self._failed,
            "busy": self._busy,
            "seconds": time.monotonic() - _started_s,
        }
        self.results["rows"] = rows.compared(self.results)
        return self.results

    def _part(
        self, name: str, peers: tuple[str, ...], pool_gib: float, do: Callable[[Running], None]
    ) -> None:
        chosen = [peer for peer in self._peers if peer.name in peers]
        with Running(
            _that_fit(chosen, pool_gib, self._fail(name)), int(pool_gib * (1 << 30)), progress
        ) as running:
            running.start()
            do(running)
            for peer, why in running.failed.items():
                self._fail(name)(peer, why)

    def _fail(self, part: str) -> Callable[[str, str], None]:
        return lambda peer, why: self._failed.append({"part": part, "peer": peer, "why": why})

    def _lookups(self) -> None:
        part = 0.15 if self.quick else 1.0
        levels = lookups.LEVELS[:1] if self.quick else lookups.LEVELS
        callers = (1, 16) if self.quick else lookups.CALLERS
        found: dict[str, Any] = {}
        self._part(
            "lookups",
            registry.LOOKUP_PEERS,
            1,
            lambda running: found.update(lookups.measure(running, levels, callers, part)),
        )
        if not self.quick:
            found["large"] = []
            for name in ("kvtier", "lmcache_zmq_16", "mooncake"):
                self._part(
                    "lookups with a million entries",
                    (name,),
                    6,
                    lambda running: found["large"].extend(lookups.measure_large(running, lookups.LARGE, 1.0)),
                )
        self.results["lookups"] = found

    def _copies(self) -> None:
        shapes = SHAPES[2:4] if self.quick else SHAPES
        most = 2 if self.quick else copies.REPETITIONS_MAX

        def do(running: Running) -> None:
            self.results["copies"] = copies.measure(running, shapes, most)
            self.results["small"] = copies.measure_small(running, 20 if self.quick else copies.SMALL_TIMES)

        self._part("copies", registry.COPY_PEERS, 1, do)

    def _mixed(self) -> None:
        peers = tuple(name for name in registry.COPY_PEERS if name != "memcpy")

        def do(running: Running) -> None:
            self.results["mixed"] = mixed.measure(running, 2.0 if self.quick else mixed.SECONDS)

        self._part("mixed", peers, 1, do)

    def _faults(self) -> None:
        def do(running: Running) -> None:
            self.results["faults"] = faults.measure(running)

        self._part("faults", registry.FAULT_PEERS, 0.5, do)

    def _replay(self) -> None:
        if self.results["versions"]["vllm"] == "not installed":
            self._fail("replay")("vLLM", "vLLM is not installed: make setup")
            return
        has_lmcache = any(peer.name.startswith("lmcache") for peer in self._peers)
        ends_s = _started_s + self._minutes * 60 - AFTER_REPLAY_S
        self.results["replay"] = replay.measure(progress, has_lmcache, ends_s)


def _that_fit(peers: list[Peer], pool_gib: float, fail: Callable[[str, str], None]) -> list[Peer]:
    """As many as the machine's free memory has room for, servers and engines together."""
    free = psutil.virtual_memory().available - MEMORY_LEFT_BYTES
    chosen: list[Peer] = []
    servers: set[str] = set()
    for peer in peers:
        needed = int(0.8 * (1 << 30)) + (0 if peer.server in servers else int(pool_gib * (1 << 30)))
        if needed > free:
            fail(peer.name, f"too little memory is free for it: {free >> 20} MiB of {needed >> 20} MiB")
            continue
        free -= needed
        servers.add(peer.server)
        chosen.append(peer)
    return chosen


def conclude(results: dict[str, Any], page: Path) -> None:
    """Says in plain sentences what won and what lost, and where the report is."""
    for verdict, said in (("won", "kvtier won"), ("equal", "Equal"), ("lost", "kvtier lost")):
        mine = [row for row in results["rows"] if row["verdict"] == verdict]
        print(f"\n{said} ({len(mine)} of {len(results['rows'])}):")
        for row in mine:
            ours, best = (
                "never" if value is None else f"{value:,.3g} {row['unit']}".strip()
                for value in (row["ours"], row["best"])
            )
            noisy = "; noisy" if row["noisy"] else ""
            print(f"  {row['title']}: {ours}, {row['best_peer']} {best}{noisy}.")
    for absent in results["absent"]:
        print(f"{absent['title']} was not measured: {absent['why']}.")
    for failed in results["failed"]:
        print(f"{failed['peer']} is missing in “{failed['part']}”: {failed['why'].splitlines()[0]}.")
    print(f"\nThe report: {page}")


def flat(results: dict[str, Any]) -> dict[str, Any]:
    """Every compared figure by name and peer, and how busy the machine was."""
    found: dict[str, Any] = {}
    for row in results["rows"]:
        found[f"kvtier_{row['name']}"] = row["ours"]
        found[f"best_peer_{row['name']}"] = row["best"]
    for verdict in ("won", "lost", "equal"):
        found[f"rows_{verdict}_count"] = sum(row["verdict"] == verdict for row in results["rows"])
    for part, busy in results["busy"].items():
        found |= {f"{part}_load_1m": busy["load_1m"], f"{part}_steal_part": busy["steal_part"]}
    found["run_s"] = results["seconds"]
    return found


def _end(*_: object) -> None:
    """So that what was started is ended, and its memory removed, if this is ended from outside."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(143)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer of everything, and no vLLM: three minutes"
    )
    parser.add_argument("--only", metavar="PART,PART", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="repeat and replay less, to be done by then (%(default)s)",
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where the report goes (%(default)s)")
    arguments = parser.parse_args()
    only = tuple(arguments.only.split(",")) if arguments.only else tuple(PARTS)
    if arguments.quick and not arguments.only:
        only = tuple(part for part in PARTS if part != "replay")
    if unknown := set(only) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, _end)
    results = PeersRun(only, arguments.quick, arguments.minutes).measure()
    page = report.write(results, arguments.out)
    conclude(results, page)
    print(json.dumps(flat(results)))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a thread that reads from a dead engine may be left
