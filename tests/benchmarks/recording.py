"""What a recording costs the front: lookups of 64 hashes with `kvtierctl record` and without, in turns.

    python -m tests.benchmarks.recording [--pairs 12] [--json]

The cost is the processor time of the daemon's main process, by the kernel's own count, so that what else runs
on the host changes little. `paced` sends 500 lookups a second, more than engines do; `full` sends as many as
the daemon answers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.benchmarks.rig import DEADLINE_S, Load, Rig, hashes_of, rig

BLOCKS = 64
PROMPTS = 64
PAGE = 4_096
PACED_PER_S = 500
FULL_LOOKUPS, PACED_LOOKUPS = 3_000, 1_000
PAIRS = 12


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
    """Processor seconds of the front for each lookup."""
    with _recorder(running) if recorded else _nobody():
        began_s, before = time.perf_counter(), Load.of(running.daemon.pid).run_s
        for number in range(lookups):
            running.client.lookup(prompts[number % PROMPTS], timeout_s=DEADLINE_S)
            if per_s is not None:
                time.sleep(max(0.0, began_s + number / per_s - time.perf_counter()))
        return (Load.of(running.daemon.pid).run_s - before) / lookups


@contextmanager
def _nobody() -> Iterator[None]:
    yield


@contextmanager
def _recorder(running: Rig) -> Iterator[None]:
    folder = Path(tempfile.mkdtemp(prefix="kvtier-record-"))
    records = folder / "records"
    command = [
        sys.executable,
        "-m",
        "kvtierd.ctl",
        "record",
        f"--socket={running.daemon.socket}",
        str(records),
    ]
    recorder = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    try:
        while not records.exists():
            if recorder.poll() is not None:
                raise RuntimeError("kvtierctl record has ended")
            time.sleep(0.01)
        yield
    finally:
        recorder.send_signal(signal.SIGINT)
        said, _ = recorder.communicate(timeout=DEADLINE_S)
        shutil.rmtree(folder)
    if json.loads(said)["dropped_events"]:
        raise RuntimeError("events were dropped")


if __name__ == "__main__":
    sys.exit(main())
