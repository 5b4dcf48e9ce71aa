"""What the connector costs a real engine that never hits: processor time per step, and time to first token.

    python -m tests.benchmarks.overhead [--json] [--pairs N]

Two engines with the tests' tiny model, one with kvtier and one without, serve the same prompts in turn, a
few together, each prompt once; which comes first alternates. Everything that kvtier's engine computes is
stored. Its processor time is that of its process with all threads, not of the daemon. A pair's ratios are
those of the same prompts on both engines: the median for processor time, of the means for times to first
token. Two processes of the same program differ by some percent, so there are several pairs, and what counts
is the median of their ratios. Besides, kvtier's engine has its connector taken away for every other batch:
that ratio ("switched") repeats better, and leaves out only that the KV cache lies in shared memory. A model
so small computes a step in milliseconds: a real one's ratios are nearer to 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.support.daemon import DaemonHost
from tests.support.leaks import SHM, SHM_PREFIX
from tests.vllm.engine import Engine, EngineOptions
from tests.vllm.rig import Rig, kv_transfer_config
from tools import tiny_llama

PAIRS, ROUNDS, WARM_UP = 7, 16, 4
TOGETHER, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 400, 48
VOCABULARY = 1_000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""For the model: threads that wait for each other by turning round and round would be most of what is
measured."""


def serve(engine: Engine, prompts: list[list[int]]) -> tuple[float, float]:
    """Processor seconds of a step, and mean seconds to first token."""
    cpu = "[__import__('time').process_time()]"
    began_s = engine.call("evaluate", expression=cpu)["value"][0]
    answers = engine.generate(prompts, max_tokens=OUTPUT_TOKENS, logprobs=1)
    used_s = engine.call("evaluate", expression=cpu)["value"][0] - began_s
    if any(answer.num_cached_tokens for answer in answers):
        raise RuntimeError("a prompt was hit, and none is to be")
    engine.drain()
    return used_s / OUTPUT_TOKENS, statistics.mean(answer.ttft_s for answer in answers)


def measure(pairs: int = PAIRS, rounds: int = ROUNDS) -> dict[str, float]:
    """The figures: medians over all pairs, and of the ratios the least and the largest."""
    figures = {"load_before": os.getloadavg()[0]}
    found = [_pair(rounds) for _ in range(pairs)]
    for name in found[0]:
        values = [each[name] for each in found]
        figures[name] = statistics.median(values)
        if name.endswith("_ratio"):
            figures |= {f"{name}_least": min(values), f"{name}_most": max(values)}
    return figures


def _pair(rounds: int) -> dict[str, float]:
    run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    host = DaemonHost(run, pool / "pool", pool__size="1GiB")
    random = np.random.default_rng(1)
    try:
        host.start()
        host.daemon.wait_whole()
        model = tiny_llama.ensure(run / "tiny", tiny_llama.PRESETS["tiny"])
        config = kv_transfer_config(host.socket, min_load_tokens=0)
        bare = EngineOptions(model, num_blocks=512, environment=ONE_THREAD)
        ours = EngineOptions(model, num_blocks=512, environment=ONE_THREAD, kv_transfer_config=config)
        with Engine.start(bare, run / "plain.log") as plain, Engine.start(ours, run / "kvtier.log") as kvtier:
            Rig(host, kvtier).wait_ready()
            of_plain: list[tuple[float, float]] = []
            of_kvtier: list[tuple[float, float]] = []
            for number in range(WARM_UP + rounds):
                prompts = random.integers(0, VOCABULARY, (TOGETHER, PROMPT_TOKENS)).tolist()
                order = [(plain, of_plain), (kvtier, of_kvtier)][:: 1 if number % 2 else -1]
                for engine, figures in order:
                    figures.append(serve(engine, prompts))
            switched = [_switched(kvtier, random, first=number % 2 == 0) for number in range(rounds)]
            stored = host.status().counters.stored_blocks
    finally:
        host.stop()
        shutil.rmtree(run)
        shutil.rmtree(pool)
    if not stored:
        raise RuntimeError("nothing was stored: the engine had no daemon")
    without, beside = np.array(of_plain[WARM_UP:]), np.array(of_kvtier[WARM_UP:])
    return {
        "step_cpu_ms_without": float(np.median(without[:, 0])) * 1e3,
        "step_cpu_ms_with": float(np.median(beside[:, 0])) * 1e3,
        "miss_step_cpu_ratio": float(np.median(beside[:, 0] / without[:, 0])),
        "switched_step_cpu_ratio": statistics.median(switched),
        "miss_ttft_ratio": float(beside[:, 1].mean() / without[:, 1].mean()),
        "miss_ttft_median_ratio": float(np.median(beside[:, 1] / without[:, 1])),
    }


def _switched(engine: Engine, random: np.random.Generator, *, first: bool) -> float:
    """Processor time of a step with the connector ÷ without it, in one engine. `first`: with it first."""
    used_s = {}
    for on in (first, not first):
        engine.call("switch_connector", on=on)
        prompts = random.integers(0, VOCABULARY, (TOGETHER, PROMPT_TOKENS)).tolist()
        used_s[on], _ = serve(engine, prompts)
    engine.call("switch_connector", on=True)
    return used_s[True] / used_s[False]


def main() -> int:
    parser = argparse.ArgumentParser(description="What the connector costs an engine that never hits.")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of engines (default: {PAIRS})")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of prompts, in each pair ({ROUNDS})")
    arguments = parser.parse_args()
    figures = measure(arguments.pairs, arguments.rounds)
    if not arguments.json:
        for name, value in figures.items():
            print(f"{name:28} {value:8.3f}")
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
