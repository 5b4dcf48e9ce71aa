"""The pictures of the dashboard in docs/: minutes of real vLLM engines on one daemon, which are killed and
started again, as a real Prometheus has seen them.

    python -m tests.deploy.picture [--out docs]

Takes about eight minutes, 8 GiB of memory and 4 GiB of disk; wants Debian (its Prometheus) and `make setup`.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tests.deploy.installation import PLACE
from tests.deploy.prometheus import DASHBOARD, Prometheus, answers_of, draw
from tests.support.daemon import DaemonHost
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.vllm.engine import Engine, EngineError, EngineOptions
from tests.vllm.rig import kv_transfer_config
from tools.tiny_llama import Shape, ensure

MODELS = {
    "chat": Shape(
        hidden=128, intermediate=256, layers=8, heads=16, kv_heads=16, vocab=1024, max_positions=4096
    ),
    "code": Shape(
        hidden=128, intermediate=256, layers=6, heads=8, kv_heads=8, vocab=1024, max_positions=4096
    ),
}
"""Small to compute, with a KV cache as large as that of real ones: 32 and 12 KiB a token."""
DOCUMENTS = {"chat": 150, "code": 120}
DOCUMENT_TOKENS = (600, 1_600)
QUESTION_TOKENS = (16, 96)
TURNS_MAX = 3
ANSWER_TOKENS = 8
BATCH = 4
PHASE_S = 75.0
DRAIN_S = 15.0


class Chats:
    """One engine, and users who ask about documents, some of which all of them read."""

    def __init__(self, options: EngineOptions, model: str, log: Path, seed: int) -> None:
        self._options, self._model, self._log = options, model, log
        self._chance = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=model)
        self.engine = Engine.launch(options, log)
        self.requests = 0
        self.failed = ""

    def begin(self) -> None:
        """Once the engine is up."""
        self.engine.wait_ready()
        self._thread.start()

    def _run(self) -> None:
        weights = list(itertools.accumulate(1 / (rank + 4) for rank in range(DOCUMENTS[self._model])))
        while not self._stop.is_set():
            prompts = [self._prompt(weights) for _ in range(BATCH)]
            try:
                for _ in range(self._chance.randint(1, TURNS_MAX)):
                    answers = self.engine.generate(prompts, max_tokens=ANSWER_TOKENS, logprobs=0)
                    self.requests += len(answers)
                    prompts = [
                        [*prompt, *answer.tokens, *self._tokens(QUESTION_TOKENS)]
                        for prompt, answer in zip(prompts, answers, strict=True)
                    ]
            except EngineError as error:
                if not self._stop.is_set():
                    self.failed = str(error)
                return

    def _prompt(self, weights: Sequence[float]) -> list[int]:
        rank = bisect.bisect(weights, self._chance.random() * weights[-1])
        document = random.Random(f"{self._model} {rank}")
        tokens = [document.randrange(3, 1_000) for _ in range(document.randint(*DOCUMENT_TOKENS))]
        return tokens + self._tokens(QUESTION_TOKENS)

    def _tokens(self, count: tuple[int, int]) -> list[int]:
        return [self._chance.randrange(3, 1_000) for _ in range(self._chance.randint(*count))]

    def kill(self) -> None:
        """kill -9, in the middle of what it does."""
        self._stop.set()
        self.engine.kill()
        self._thread.join(60)

    def close(self) -> None:
        """Ends it."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(240)
        self.engine.stop()


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """Somewhere on a disk, and in memory; gone afterwards."""
    PLACE.mkdir(parents=True, exist_ok=True)
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    shared = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    try:
        yield run, shared
    finally:
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)


def record(out: Path, phase_s: float) -> None:
    """Runs everything, and writes the pictures."""
    with folders() as (run, shared), ExitStack() as stack:
        (disk := run / "nvme0").mkdir(mode=0o700)
        host = DaemonHost(
            run,
            shared / "pool",
            pool__size="2GiB",
            pool__extent_size="16MiB",
            disk__paths=disk,
            disk__size="4GiB",
            disk__write_mode="through",
            metrics__listen="127.0.0.1:9479",
            server__session_silence_s=120,
            integrity__sample_bytes_per_s="64MiB",
        )
        host.start()
        stack.callback(host.stop)
        (folder := run / "prometheus").mkdir()
        prometheus = Prometheus(folder, urlsplit(host.daemon.metrics_url).netloc)
        stack.callback(prometheus.close)

        def engine(model: str, name: str, seed: int) -> Chats:
            shape = MODELS[model]
            options = EngineOptions(
                model=ensure(PLACE / "models" / model, shape, seed=0),
                kv_transfer_config=kv_transfer_config(host.socket),
                num_blocks=384,
            )
            chats = Chats(options, model, run / f"{name}.log", seed)
            stack.callback(chats.close)
            return chats

        events: list[tuple[float, str]] = []

        def now(what: str) -> None:
            events.append((time.time(), what))
            say(what)

        began_s = time.time()
        first, second = engine("chat", "first", 1), engine("chat", "second", 2)
        for each in (first, second):
            each.begin()
        now("A")
        time.sleep(phase_s)
        third = engine("code", "third", 3)
        third.begin()
        now("B")
        time.sleep(phase_s)
        second.kill()
        now("C")
        second = engine("chat", "second again", 4)
        second.begin()
        now("D")
        time.sleep(phase_s)
        host.restart()
        now("E")
        time.sleep(phase_s + DRAIN_S)
        window_s = time.time() - began_s
        answers = answers_of(
            prometheus, json.loads(DASHBOARD.read_text()), events, window_s=window_s, step_s=2, rate_s=15
        )
        for series in itertools.chain(*answers["panels"].values()):
            series["label"] = series["label"].replace(str(run), "/mnt")
        for chats in (first, second, third):
            if chats.failed:
                raise SystemExit(f"an engine failed: {chats.failed}")
            say(f"{chats.requests} requests")
    for made in draw(answers, out):
        say(f"{made.stat().st_size:>9,} bytes  {made}")


def say(text: str) -> None:
    print(f"[picture] {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="picture", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=PLACE / "pictures", help="default: %(default)s")
    parser.add_argument("--phase-s", type=float, default=PHASE_S, help="seconds of each of four phases")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of everything that has to be ended
    record(arguments.out, arguments.phase_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
