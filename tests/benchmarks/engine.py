"""Time to the first token of a real vLLM under a shared-prefix workload, with and without kvtier or LMCache.

    python -m tests.benchmarks.engine [--json]

Requests of two public traces (a chat service, coding agents), shortened: each block of a trace's prompt
becomes a few tokens, equal blocks equal tokens. They are served one after another, each by four engines in
turn: without any cache, with vLLM's own prefix cache, with kvtier below it, and with LMCache's server below
it, which has as much memory as kvtier. The engines' own caches hold a few prompts, as a GPU's does of a
service with many users. Without the traces a chat of our own is used; where LMCache cannot be installed, it
is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks import lmcache_peer
from tests.benchmarks.lmcache_peer import LMCacheServer, LMCacheUnavailable
from tests.support.daemon import DaemonHost
from tests.vllm.engine import Engine, EngineOptions, Generated
from tests.vllm.rig import kv_transfer_config
from tools import tiny_llama

TRACES = Path(os.environ.get("KVTIER_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces"))
WORKLOADS = {"chat": ("mooncake_conversation.npz", 32), "agents": ("claude_code_dev.npz", 8)}
"""Name: file, and tokens for each of its blocks."""
REQUESTS = 60
TOKENS_MAX = 3_000
TURNS_MIN = 4
"""Of a conversation: what begins alike beyond the first block, which may be everybody's."""
OUTPUT_TOKENS = 4
KV_BLOCKS = 100
"""Of the engine, of 32 tokens each."""
VOCABULARY = 1_000
POOL_GIB = 2
"""Of kvtier, and of LMCache."""
MODES = ("none", "prefix", "kvtier", "lmcache")


@dataclass(frozen=True)
class Caches:
    """What is below the engines of one workload, empty at its beginning."""

    kvtier: DaemonHost
    lmcache: LMCacheServer | None
    """None where it cannot be installed."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Those that can be measured."""
        return tuple(mode for mode in MODES if mode != "lmcache" or self.lmcache is not None)


@dataclass(frozen=True)
class Served:
    """What one engine made of a workload."""

    answers: list[Generated]
    tokens: int
    """Of all prompts."""

    def ttft_s(self, percentile: float) -> float:
        return float(np.percentile([answer.ttft_s for answer in self.answers], percentile))

    @property
    def mean_ttft_s(self) -> float:
        return float(np.mean([answer.ttft_s for answer in self.answers]))

    @property
    def hit_rate(self) -> float:
        """Part of the prompts' tokens that were not computed."""
        return sum(answer.num_cached_tokens for answer in self.answers) / self.tokens

    @property
    def tokens_per_s(self) -> float:
        """Prompt and output, while the engine worked."""
        made = self.tokens + sum(len(answer.tokens) for answer in self.answers)
        return made / sum(answer.total_s for answer in self.answers)

    def text(self) -> str:
        """For people."""
        return (
            f"TTFT mean {self.mean_ttft_s * 1e3:7.1f} ms, p50 {self.ttft_s(50) * 1e3:7.1f}, p90"
            f" {self.ttft_s(90) * 1e3:7.1f}; {self.tokens_per_s:8,.0f} tokens/s; {self.hit_rate:6.1%} of the"
            " prompts' tokens not computed"
        )


def prompts_of(trace: Path, block_tokens: int) -> list[list[int]]:
    """Requests of conversations that go on, in their order: of these the part whose prefixes are shared
    most."""
    content = np.load(trace)
    parent, leaf = content["parent"], content["leaf"]
    paths = []
    for last in leaf[: REQUESTS * 40]:
        path = []
        block = int(last)
        while block >= 0:
            path.append(block)
            block = int(parent[block])
        if len(path) * block_tokens <= TOKENS_MAX:
            paths.append(path[::-1])
    turns = Counter(path[1] for path in paths if len(path) > 1)
    paths = [path for path in paths if len(path) > 1 and turns[path[1]] >= TURNS_MIN]
    best = max(range(0, max(1, len(paths) - REQUESTS), REQUESTS // 2), key=lambda at: _shared(paths[at:]))
    return [list(_tokens(path, block_tokens)) for path in paths[best : best + REQUESTS]]


def _shared(paths: list[list[int]]) -> float:
    seen: set[int] = set()
    hits = blocks = 0
    for path in paths[:REQUESTS]:
        blocks += len(path)
        hits += sum(block in seen for block in path)
        seen.update(path)
    return hits / max(1, blocks)


def _tokens(path: list[int], block_tokens: int) -> Iterator[int]:
    for block in path:
        yield from np.random.default_rng(block).integers(0, VOCABULARY, block_tokens).tolist()


def own_prompts() -> list[list[int]]:
    """Where there are no traces: eight chats that go on in turn, each behind the same first words."""
    chance = np.random.default_rng(1)
    system = chance.integers(0, VOCABULARY, 256).tolist()
    chats = [list(system) for _ in range(8)]
    prompts = []
    for number in range(REQUESTS):
        chat = chats[number % len(chats)]
        chat += chance.integers(0, VOCABULARY, 160).tolist()
        prompts.append(list(chat))
    return prompts


def connector_of(mode: str, caches: Caches) -> dict[str, Any] | None:
    """What an engine of this mode is given as `--kv-transfer-config`."""
    if mode == "kvtier":
        return kv_transfer_config(caches.kvtier.socket)
    if mode == "lmcache" and caches.lmcache is not None:
        return caches.lmcache.kv_transfer_config()
    return None


def engine_of(mode: str, model: Path, caches: Caches, log: Path) -> Engine:
    """An engine that has computed something already."""
    options = EngineOptions(
        model,
        kv_transfer_config=connector_of(mode, caches),
        max_model_len=TOKENS_MAX + 64,
        num_blocks=KV_BLOCKS,
        environment=lmcache_peer.environment() if mode == "lmcache" else {},
        extra={} if mode != "none" else {"enable_prefix_caching": False},
    )
    engine = Engine.start(options, log)
    warm_up = np.random.default_rng(7).integers(0, VOCABULARY, 700).tolist()
    engine.generate([warm_up], max_tokens=OUTPUT_TOKENS)
    return engine


def turns(modes: tuple[str, ...], number: int) -> tuple[str, ...]:
    """The order of the engines for one prompt: each is first equally often, and each comes as often after
    the one beside it as before it, whose stores may still be under way."""
    first = number % len(modes)
    order = modes[first:] + modes[:first]
    return order if number // len(modes) % 2 == 0 else order[::-1]


def serve(prompts: list[list[int]], model: Path, caches: Caches, logs: Path) -> dict[str, Served]:
    """All prompts, one after another, each by all engines in turn: what else the machine does meets all of
    them."""
    with ExitStack() as stack:
        engines = {
            mode: stack.enter_context(engine_of(mode, model, caches, logs / f"{mode}.log"))
            for mode in caches.modes
        }
        return serve_with(engines, prompts)


def serve_with(engines: dict[str, Engine], prompts: list[list[int]]) -> dict[str, Served]:
    """The same with engines that run."""
    modes = tuple(engines)
    answers: dict[str, list[Generated]] = {mode: [] for mode in modes}
    for number, tokens in enumerate(prompts):
        for mode in turns(modes, number):
            answers[mode] += engines[mode].generate([tokens], max_tokens=OUTPUT_TOKENS)
    return {mode: Served(answers[mode], sum(map(len, prompts))) for mode in modes}


def has_lmcache() -> bool:
    """Installs LMCache if that is needed; where it cannot be, says so in one line."""
    try:
        lmcache_peer.install()
    except LMCacheUnavailable as error:
        print(f"without LMCache: {error}", file=sys.stderr, flush=True)
        return False
    return True


def figures_of(workload: str, served: dict[str, Served]) -> dict[str, float]:
    """By name: TTFT in ms, tokens/s, part of the prompts that hit, and means ÷ kvtier's."""
    figures = {}
    for mode, one in served.items():
        figures[f"engine_{workload}_{mode}_ttft_ms"] = one.mean_ttft_s * 1e3
        figures[f"engine_{workload}_{mode}_ttft_p90_ms"] = one.ttft_s(90) * 1e3
        figures[f"engine_{workload}_{mode}_tokens_per_s"] = one.tokens_per_s
        figures[f"engine_{workload}_{mode}_hit_rate"] = one.hit_rate
    for other in (mode for mode in served if mode != "kvtier"):
        ratio = served[other].mean_ttft_s / served["kvtier"].mean_ttft_s
        figures[f"engine_{workload}_ttft_{other}_over_kvtier"] = ratio
    return figures


def measure(quiet: bool) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    compared = has_lmcache()
    with ExitStack() as stack:
        run = Path(tempfile.mkdtemp(prefix="kvt-", dir="/tmp"))
        stack.callback(shutil.rmtree, run)
        shm = Path(tempfile.mkdtemp(prefix="kvtier-test-bench-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, shm)
        model = tiny_llama.ensure(run / "demo", tiny_llama.PRESETS["demo"])
        for workload, (name, block_tokens) in WORKLOADS.items():
            trace = TRACES / name
            prompts = prompts_of(trace, block_tokens) if trace.exists() else own_prompts()
            if not quiet:
                source = name if trace.exists() else "no trace there: chats of our own"
                print(f"{workload}: {len(prompts)} prompts, {sum(map(len, prompts)):,} tokens ({source})")
            with ExitStack() as below:
                host = DaemonHost(run, shm / f"pool-{workload}", pool__size=f"{POOL_GIB}GiB")
                below.callback(host.stop)
                host.start()
                host.daemon.wait_whole()
                peer = below.enter_context(LMCacheServer(POOL_GIB, run / "server.log")) if compared else None
                served = serve(prompts, model, Caches(host, peer), run)
            if not quiet:
                for mode, one in served.items():
                    print(f"  {mode:<8} {one.text()}", flush=True)
            figures |= figures_of(workload, served)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print nothing but the JSON object")
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
