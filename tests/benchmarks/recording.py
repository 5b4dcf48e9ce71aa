"""What a recording costs the front: lookups of 64 hashes while somebody records and while nobody does, by
turns.

    python -m tests.benchmarks.recording [--pairs 40] [--json]

The cost is the processor time of the daemon's main process, by the kernel's own count, so that what else runs
on the host changes little. `paced` sends 500 lookups a second, more than engines do; `full` sends as many as
the daemon answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import grpc
import numpy as np
from kvtier.v1 import admin_pb2, admin_pb2_grpc

from tests.benchmarks.rig import DEADLINE_S, Load, Rig, hashes_of, rig

BLOCKS = 64
PROMPTS = 64
PAGE = 4_096
PACED_PER_S = 500
FULL_LOOKUPS, PACED_LOOKUPS = 1_500, 500
PAIRS = 40
SENT_S = 1.2
"""The daemon sends everything within a second."""


def main() -> int:
    parser = argparse.ArgumentParser(description="The front's cost of a recording.")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--json", action="store_true", help="only one JSON object")
    arguments = parser.parse_args()
    stored = BLOCKS * PROMPTS
    with rig(num_blocks=stored, planes=1, fragment_bytes=PAGE, pool_size="128MiB") as running:
        figures = measure(running, arguments.pairs)
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:<44} {value:>12,.3f}")
    print(json.dumps(figures))
    return 0


def measure(running: Rig, pairs: int) -> dict[str, float]:
    """Every figure, in one run."""
    prompts = [b"".join(hashes_of(f"prompt {number}", BLOCKS)) for number in range(PROMPTS)]
    for number, prompt in enumerate(prompts):
        hashes = [prompt[at : at + 32] for at in range(0, len(prompt), 32)]
        ids = list(range(number * BLOCKS, (number + 1) * BLOCKS))
        if not running.client.store(hashes, ids).wait(DEADLINE_S).done:
            raise RuntimeError("a store failed")
    figures: dict[str, float] = {}
    for name, lookups, per_s in (("paced", PACED_LOOKUPS, PACED_PER_S), ("full", FULL_LOOKUPS, None)):
        spent: dict[bool, list[float]] = {False: [], True: []}
        for number in range(pairs):
            for recorded in (False, True) if number % 2 else (True, False):
                spent[recorded].append(_turn(running, prompts, lookups, per_s, recorded=recorded))
        without, with_it = np.array(spent[False]), np.array(spent[True])
        ratios = with_it / without - 1
        figures[f"{name}_front_us_per_lookup"] = float(np.median(without)) * 1e6
        figures[f"{name}_front_us_per_lookup_recorded"] = float(np.median(with_it)) * 1e6
        figures[f"{name}_cost_percent"] = 100 * float(np.median(ratios))
        low, high = np.percentile(ratios, (25, 75))
        figures[f"{name}_cost_percent_quartile_1"], figures[f"{name}_cost_percent_quartile_3"] = (
            100 * float(low),
            100 * float(high),
        )
    return figures


def _turn(running: Rig, prompts: list[bytes], lookups: int, per_s: int | None, *, recorded: bool) -> float:
    """Processor seconds of the front for each lookup, until all of it is sent."""
    with _recorder(running) if recorded else nullcontext():
        began_s, before = time.perf_counter(), Load.of(running.daemon.pid)
        for number in range(lookups):
            running.client.lookup(prompts[number % PROMPTS], timeout_s=DEADLINE_S)
            if per_s is not None:
                time.sleep(max(0.0, began_s + number / per_s - time.perf_counter()))
        time.sleep(SENT_S)
        return Load.of(running.daemon.pid).since(before).run_s / lookups


@contextmanager
def _recorder(running: Rig) -> Iterator[None]:
    """Reads a recording meanwhile, and looks at nothing of it."""
    dropped = 0

    def read() -> None:
        nonlocal dropped
        with suppress(grpc.RpcError):
            for batch in call:
                dropped = batch.dropped_events

    with grpc.insecure_channel(f"unix:{running.daemon.socket}") as channel:
        call = admin_pb2_grpc.AdminStub(channel).Record(admin_pb2.RecordRequest(), timeout=DEADLINE_S)
        next(call)
        thread = threading.Thread(target=read)
        thread.start()
        yield
        call.cancel()
        thread.join()
    if dropped:
        raise RuntimeError("events were dropped")


if __name__ == "__main__":
    sys.exit(main())
