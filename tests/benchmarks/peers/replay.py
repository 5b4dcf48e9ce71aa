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
AT_ONCE = 8
"""Prompts that are served between two looks at the clock: each engine is first in two of them."""
POOL_GIB = 3
SHIFT = 137
"""Added to every token (modulo the vocabulary) in each repetition, so that the caches have not seen it."""


def measure(
    progress: Callable[[str], None], has_lmcache: bool, ends_s: float, repetitions: int = REPETITIONS_MAX
) -> dict[str, Any]:
    """All figures, by `ends_s` of the monotonic clock: prompts that come again get a quarter of the time
    until then, the traces the rest. What repeats, repeats less where time is short, and of a trace fewer
    requests are served."""
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
        restored = []
        for number, tokens in enumerate(RESTORED_TOKENS):
            part = 0.25 / (len(RESTORED_TOKENS) - number)
            restored.append(_restored(engines, tokens, progress, _share(ends_s, part)))
        traces = []
        workloads = _workloads()
        for number, (workload, prompts, source) in enumerate(workloads):
            share_s = _share(ends_s, 1 / (len(workloads) - number))
            one = _trace(engines, workload, prompts, progress, share_s, repetitions)
            traces.append(one | {"source": source})
    return {"restored": restored, "traces": traces}


def _share(ends_s: float, part: float) -> float:
    """When so large a part of the time that is left will be over."""
    now_s = time.monotonic()
    return now_s + max(0.0, ends_s - now_s) * part


def _restored(
    engines: dict[str, Engine], tokens: int, progress: Callable[[str], None], ends_s: float
) -> dict[str, Any]:
    """Prompts are computed once, and then come again when the engine has forgotten them; then only to engines
    with a cache below them, because the others compute them anew."""
    chance = np.random.default_rng(tokens)
    prompts = [chance.integers(0, VOCABULARY, tokens).tolist() for _ in range(RESTORED_PROMPTS[tokens])]
    computed = engine.serve_with(engines, prompts)
    below = {mode: one for mode, one in engines.items() if mode not in ("none", "prefix")}
    again: dict[str, list[Any]] = {mode: [] for mode in below}
    for number in range(RESTORED_PASSES):
        if number and time.monotonic() > ends_s:
            break
        for mode, served in engine.serve_with(below, prompts).items():
            again[mode] += served.answers
    rows = []
    for mode, once in computed.items():
        row: dict[str, Any] = {
            "mode": mode,
            "computed_ms": statistics.median(answer.ttft_s for answer in once.answers) * 1e3,
            "restored_ms": None,
            "noisy": False,
        }
        if answers := again.get(mode):
            times = [answer.ttft_s for answer in answers]
            firsts = [answer.tokens for answer in once.answers]
            row |= {
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
        rows.append(row)
    told = (f"{row['mode']} {row['restored_ms'] or row['computed_ms']:.0f} ms" for row in rows)
    progress(f"restored, {tokens:,} tokens: " + "; ".join(told))
    return {"tokens": tokens, "rows": rows}


def _workloads() -> list[tuple[str, list[list[int]], str]]:
    """Name, prompts and source of the traces at hand; of chats of our own if there is none."""
    there = [
        (workload, engine.prompts_of(engine.TRACES / name, block_tokens), name)
        for workload, (name, block_tokens) in engine.WORKLOADS.items()
        if (engine.TRACES / name).exists()
    ]
    return there or [("own chats", engine.own_prompts(), "no trace at hand, see KVTIER_TRACES")]


def _trace(
    engines: dict[str, Engine],
    workload: str,
    prompts: list[list[int]],
    progress: Callable[[str], None],
    ends_s: float,
    repetitions: int,
) -> dict[str, Any]:
    runs: list[dict[str, Served]] = []
    took_s = 0.0
    while len(runs) < repetitions and (not runs or time.monotonic() + took_s < ends_s):
        began_s = time.monotonic()
        shift = SHIFT * (len(runs) + 1)
        shifted = [[(token + shift) % VOCABULARY for token in prompt] for prompt in prompts]
        served = _serve_until(engines, shifted, ends_s) if not runs else engine.serve_with(engines, shifted)
        # A later run repeats what the first had time for.
        prompts = prompts[: len(served["kvtier"].answers)]
        runs.append(served)
        took_s = time.monotonic() - began_s
        means = {mode: one.mean_ttft_s * 1e3 for mode, one in runs[-1].items()}
        progress(f"{workload}, run {len(runs)}: " + "; ".join(f"{m} {ms:.0f} ms" for m, ms in means.items()))
        if len(runs) >= REPETITIONS_MIN and not _differ(runs):
            break
    return {
        "workload": workload,
        "prompts": len(prompts),
        "tokens": sum(map(len, prompts)),
        "runs": len(runs),
        "noisy": len(runs) < 2 or _differ(runs),
        "rows": [_row(mode, [run[mode] for run in runs]) for mode in engines],
    }


def _serve_until(engines: dict[str, Engine], prompts: list[list[int]], ends_s: float) -> dict[str, Served]:
    """Serves prompts until time is up, but at least the first AT_ONCE."""
    answers: dict[str, list[Any]] = {mode: [] for mode in engines}
    tokens = 0
    for first in range(0, len(prompts), AT_ONCE):
        if first and time.monotonic() > ends_s:
            break
        part = prompts[first : first + AT_ONCE]
        tokens += sum(map(len, part))
        for mode, served in engine.serve_with(engines, part).items():
            answers[mode] += served.answers
    return {mode: Served(answers[mode], tokens) for mode in engines}


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
