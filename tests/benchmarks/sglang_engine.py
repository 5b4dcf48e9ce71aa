"""Time to the first token of a real SGLang: computed, from its own radix cache, and restored by kvtier.

    python -m tests.benchmarks.sglang_engine [--json]

Two engines with the demo's model run one after another, one without kvtier and one with it. Each computes a
few prompts of two lengths (none: the first engine, which has nothing of them), and is asked for each again at
once (radix: everything is in its own cache). The second engine then forgets its cache and is asked once more
(kvtier: everything comes from the daemon). Its first answers tell what storing costs. Where SGLang is not
installed (`tools/setup.sh sglang`), there are no figures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from tests.sglang.engine import SGLANG, Answer, Engine, with_linker
from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX
from tools import tiny_llama

LENGTHS, PROMPTS = (1_000, 2_944), 5
OUTPUT_TOKENS = 2
VOCABULARY = 1_000
SIZE: dict[str, Any] = {"max_total_tokens": 24_000, "context_length": 4_096, "sleep_on_idle": True}
"""All prompts fit into the engine's own cache."""


def prompts_of(length: int) -> list[list[int]]:
    """Prompts that have nothing in common."""
    chance = np.random.default_rng(length)
    return [chance.integers(2, VOCABULARY, length).tolist() for _ in range(PROMPTS)]


def serve(engine: Engine, prompts: list[list[int]]) -> list[Answer]:
    """One after another."""
    return [engine.generate(prompt, OUTPUT_TOKENS) for prompt in prompts]


def ms(answers: list[Answer]) -> float:
    """The median time to the first token, in milliseconds."""
    return statistics.median(answer.ttft_s for answer in answers) * 1e3


def measure() -> dict[str, float]:
    """By name: times to the first token in ms, and ratios of them."""
    with ExitStack() as stack:
        run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
        stack.callback(shutil.rmtree, run)
        shm = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
        stack.callback(shutil.rmtree, shm)
        host = DaemonHost(run, shm / "pool", pool__size="2GiB")
        host.start()
        stack.callback(host.stop)
        model = tiny_llama.ensure(run / "demo", tiny_llama.PRESETS["demo"])
        prompts = {length: prompts_of(length) for length in LENGTHS}
        warm_up = np.random.default_rng(7).integers(2, VOCABULARY, 700).tolist()
        found: dict[tuple[int, str], list[Answer]] = {}
        with Engine(model, run / "plain.log", **SIZE) as plain:
            serve(plain, [warm_up])
            for length, some in prompts.items():
                found[length, "none"] = serve(plain, some)
                found[length, "radix"] = serve(plain, some)
        with Engine(model, run / "kvtier.log", **SIZE, **with_linker(host.socket)) as linked:
            serve(linked, [warm_up])
            for length, some in prompts.items():
                found[length, "storing"] = serve(linked, some)
            pages = sum(len(prompt) // 16 for some in prompts.values() for prompt in some)
            until(lambda: host.status().blocks.ready >= pages, "everything is stored")
            for length, some in prompts.items():
                linked.flush()
                found[length, "kvtier"] = serve(linked, some)
                for prompt, restored in zip(some, found[length, "kvtier"], strict=True):
                    if restored.restored != (len(prompt) - 1) // 16 * 16:
                        raise RuntimeError(f"a prompt of {length} tokens was restored in part: {restored}")
    figures = {f"sglang_{length}_{what}_ttft_ms": ms(answers) for (length, what), answers in found.items()}
    for length in LENGTHS:
        for what in ("none", "radix"):
            ratio = figures[f"sglang_{length}_{what}_ttft_ms"] / figures[f"sglang_{length}_kvtier_ttft_ms"]
            figures[f"sglang_{length}_ttft_{what}_over_kvtier"] = ratio
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures: dict[str, float] = {}
    if SGLANG.is_dir():
        figures = measure()
    else:
        print("without SGLang, which tools/setup.sh sglang installs", file=sys.stderr, flush=True)
    if not options.json:
        for name, value in figures.items():
            print(f"{name:45} {value:10,.1f}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
