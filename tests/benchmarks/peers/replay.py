"""A real vLLM on CPUs: time to the first token of prompts that were restored, and of two traces."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import engine
from tests.benchmarks.engine import VOCABULARY, Caches, Served
from tests.benchmarks.lmcache_peer import LMCacheServer
from tests.benchmarks.peers.machine import is_noisy, spread
from tests.support.daemon import DaemonHost
from tests.vllm.engine import Engine
from tools import tiny_llama

RESTORED_TOKENS = (1_000, 2_944)
RESTORED_PROMPTS = {1_000: 8, 2_944: 4}
"""More than the engine's own cache holds, so that each is pushed out of it before its turn comes again."""
RESTORED_PASSES = 3
REPETITIONS_MIN, REPETITIONS_MAX = 2, 3
POOL_GIB = 3
SHIFT = 137
"""Added to every token (modulo the vocabulary) in each repetition, so that the caches have not seen it."""


def measure(
    progress: Callable[[str], None], has_lmcache: bool, ends_s: float, repetitions: int = REPETITIONS_MAX
) -> dict[str, Any]:
    """All figures. No repetition of a trace begins that would not end before `ends_s` of the monotonic clock,
    but the first of each."""
    with ExitStack() as stack:
        run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
        stack.callback(shutil.rmtree, run, ignore_errors=True)
        shm = Path(tempfile.mkdtemp(prefix="kvtier-test-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, shm, ignore_errors=True)
        progress("starting four engines" if has_lmcache else "starting three engines")
        model = tiny_llama.ensure(run / "demo", tiny_llama.PRESETS["demo"])
        host = DaemonHost(run, shm / "pool", wrap=("env",), pool__size=f"{POOL_GIB}GiB")
        stack.callback(host.stop)
        host.start()
        server = stack.enter_context(LMCacheServer(POOL_GIB, run / "server.log")) if has_lmcache else None
        caches = Caches(host, server)
        engines = {
            mode: stack.enter_context(engine.engine_of(mode, model, caches, run / f"{mode}.log"))
            for mode in caches.modes
        }
        found: dict[str, Any] = {
            "restored": [_restored(engines, tokens, progress) for tokens in RESTORED_TOKENS],
            "traces": [
                _trace(engines, workload, progress, ends_s, repetitions) for workload in engine.WORKLOADS
            ],
        }
    return found


def _restored(engines: dict[str, Engine], tokens: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Prompts are computed once, and then come again when the engine has forgotten them."""
    chance = np.random.default_rng(tokens)
    prompts = [chance.integers(0, VOCABULARY, tokens).tolist() for _ in range(RESTORED_PROMPTS[tokens])]
    computed = engine.serve_with(engines, prompts)
    again: dict[str, list[Any]] = {mode: [] for mode in engines}
    for _ in range(RESTORED_PASSES):
        for mode, served in engine.serve_with(engines, prompts).items():
            again[mode] += served.answers
    rows = []
    for mode, answers in again.items():
        times = [answer.ttft_s for answer in answers]
        firsts = [answer.tokens for answer in computed[mode].answers]
        rows.append(
            {
                "mode": mode,
                "computed_ms": statistics.median(a.ttft_s for a in computed[mode].answers) * 1e3,
                "restored_ms": statistics.median(times) * 1e3,
                "restored_p90_ms": float(np.percentile(times, 90)) * 1e3,
                "cached_tokens": statistics.mean(answer.num_cached_tokens for answer in answers),
                "other_output": sum(
                    answer.tokens != firsts[number % len(firsts)] for number, answer in enumerate(answers)
                ),
                "samples": len(times),
                "spread": min(spread(times), 9.99),
                "noisy": is_noisy(times),
            }
        )
    progress(
        f"restored, {tokens:,} tokens: " + "; ".join(f"{r['mode']} {r['restored_ms']:.0f} ms" for r in rows)
    )
    return {"tokens": tokens, "rows": rows}


def _trace(
    engines: dict[str, Engine],
    workload: str,
    progress: Callable[[str], None],
    ends_s: float,
    repetitions: int,
) -> dict[str, Any]:
    name, block_tokens = engine.WORKLOADS[workload]
    trace = engine.TRACES / name
    prompts = engine.prompts_of(trace, block_tokens) if trace.exists() else engine.own_prompts()
    source = name if trace.exists() else "no trace at hand: chats of our own"
    runs: list[dict[str, Served]] = []
    took_s = 0.0
    while len(runs) < repetitions and (not runs or time.monotonic() + took_s < ends_s):
        began_s = time.monotonic()
        shift = SHIFT * (len(runs) + 1)
        shifted = [[(token + shift) % VOCABULARY for token in prompt] for prompt in prompts]
        runs.append(engine.serve_with(engines, shifted))
        took_s = time.monotonic() - began_s
        means = {mode: one.mean_ttft_s * 1e3 for mode, one in runs[-1].items()}
        progress(f"{workload}, run {len(runs)}: " + "; ".join(f"{m} {ms:.0f} ms" for m, ms in means.items()))
        if len(runs) >= REPETITIONS_MIN and not _differ(runs):
            break
    return {
        "workload": workload,
        "source": source,
        "prompts": len(prompts),
        "tokens": sum(map(len, prompts)),
        "runs": len(runs),
        "noisy": len(runs) < 2 or _differ(runs),
        "rows": [_row(mode, [run[mode] for run in runs]) for mode in engines],
    }


def _differ(runs: list[dict[str, Served]]) -> bool:
    """Whether what matters, an engine's mean ÷ another's in the same run, differs by more than 10 % between
    runs."""
    for mode in runs[0]:
        ratios = [run[mode].mean_ttft_s / run["kvtier"].mean_ttft_s for run in runs]
        if (max(ratios) - min(ratios)) / statistics.median(ratios) > 0.10:
            return True
    return False


def _row(mode: str, served: list[Served]) -> dict[str, Any]:
    times = [answer.ttft_s * 1e3 for one in served for answer in one.answers]
    return {
        "mode": mode,
        "mean_ttft_ms": statistics.mean(times),
        "p50_ttft_ms": float(np.percentile(times, 50)),
        "p90_ttft_ms": float(np.percentile(times, 90)),
        "means_ms": [one.mean_ttft_s * 1e3 for one in served],
        "tokens_per_s": statistics.mean(one.tokens_per_s for one in served),
        "hit_rate": statistics.mean(one.hit_rate for one in served),
    }
