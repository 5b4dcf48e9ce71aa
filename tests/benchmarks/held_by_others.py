"""What the time of a lookup tells of other tenants' blocks: times of lookups of hashes that another tenant
has, beside those of hashes that nobody has, and of one's own.

    python -m tests.benchmarks.held_by_others [--json]

Needs root, to be two users. Each round has one lookup of each kind, in an order that changes, in prefix or
exact mode, on the attach stream. `effect` is the fraction of rounds in which the lookup of another's blocks
took longer than that of nobody's: 0.5 if nothing can be told from the time, 0 or 1 if each lookup tells. `z`
is how many standard errors that is from 0.5: beyond 4, something can be told. The control, one's own blocks,
has to be far from 0.5: it shows that the times are fine enough to tell anything.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
from kvtier.v1 import cache_pb2, types_pb2

from tests.integration.daemon.raw import RawSession, hashes
from tests.security.people import ATTACKER, GROUP, VICTIM, session
from tests.support.process import Daemon, until

BLOCKS = 1024
"""Blocks of each lookup."""
PROMPTS = 24
"""Prompts that each tenant has in the cache."""
ROUNDS = 3_000
WARM_UP = 200
FRAGMENTS = (4096,)
MODES = {"prefix": cache_pb2.LOOKUP_MODE_PREFIX, "exact": cache_pb2.LOOKUP_MODE_EXACT}
KINDS = ("others", "nobodys", "own")
OWN, OTHERS, NOBODYS = 1_000_000, 2_000_000, 3_000_000
"""First seeds."""

Times = npt.NDArray[np.float64]


def fill(one: RawSession, first: int) -> None:
    for number in range(PROMPTS):
        ended = one.store(hashes(BLOCKS, seed=first + number), list(range(BLOCKS)))
        assert ended.state == types_pb2.TRANSFER_STATE_DONE


def measure(
    one: RawSession, mode: cache_pb2.LookupMode.ValueType, random: np.random.Generator
) -> dict[str, Times]:
    """Seconds of lookups of each kind, round by round."""
    firsts = {"others": OTHERS, "nobodys": NOBODYS, "own": OWN}
    asked = {
        kind: [
            cache_pb2.LookupRequest(
                queries=[cache_pb2.GroupQuery(mode=mode, hashes=hashes(BLOCKS, seed=firsts[kind] + number))],
                host_only=True,
            )
            for number in range(PROMPTS)
        ]
        for kind in KINDS
    }
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(WARM_UP + ROUNDS):
        for kind in random.permutation(KINDS):
            request = asked[kind][number % PROMPTS]
            started_s = time.perf_counter()
            one.attached.call(lookup=request)
            took_s = time.perf_counter() - started_s
            if number >= WARM_UP:
                times[kind].append(took_s)
    return {kind: np.array(each) for kind, each in times.items()}


def effect(longer: Times, shorter: Times) -> tuple[float, float]:
    """In which fraction of the rounds the first took longer than the second, and how many standard errors
    that is from one half."""
    fraction = float(np.mean(longer > shorter) + np.mean(longer == shorter) / 2)
    return fraction, (fraction - 0.5) * 2 * math.sqrt(len(longer))


def bench(quiet: bool) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="kvtb-", dir="/tmp"))
    folder.chmod(0o755)
    run = folder / "run"
    run.mkdir()
    daemon = Daemon(run, folder / "pool", server__group=GROUP, pool__size="512MiB")
    figures: dict[str, float] = {}
    try:
        daemon.wait_whole()
        people = {
            uid: session(uid, daemon.socket, fragments=FRAGMENTS, num_blocks=BLOCKS).ready()
            for uid in (VICTIM, ATTACKER)
        }
        fill(people[VICTIM], OTHERS)
        fill(people[ATTACKER], OWN)
        until(lambda: daemon.status().blocks.ready == 2 * PROMPTS * BLOCKS, "all is stored")
        for name, mode in MODES.items():
            times = measure(people[ATTACKER], mode, np.random.default_rng(1))
            for kind in ("others", "own"):
                fraction, z = effect(times[kind], times["nobodys"])
                figures[f"held_by_{kind}_{name}_effect"] = fraction
                figures[f"held_by_{kind}_{name}_z"] = z
                if not quiet:
                    print(
                        f"  {name:<7} {kind:<7} p50 {np.median(times[kind]) * 1e6:7.1f} µs, nobody's "
                        f"{np.median(times['nobodys']) * 1e6:7.1f} µs   effect {fraction:.3f}   z {z:+.1f}",
                        flush=True,
                    )
        for each in people.values():
            each.close()
    finally:
        daemon.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the figures only")
    print(json.dumps(bench(parser.parse_args().json)))


if __name__ == "__main__":
    main()
