"""A real engine with too few blocks, whose requests come, are preempted and aborted, while its daemon is
killed, stopped and restarted: every token of every request is that of an engine without a connector."""

from __future__ import annotations

import dataclasses
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost
from tests.support.length import rounds
from tests.vllm.conftest import QUICK
from tests.vllm.engine import Engine, EngineOptions
from tests.vllm.rig import BLOCK, Rig, kv_transfer_config, prompt, start_rig

pytestmark = [pytest.mark.vllm, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]

ROUNDS = rounds(60, 480)
SEED = int(os.environ.get("KVTIER_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
BLOCKS = 40
OUTPUT_TOKENS = 48
WAITING_MAX = 16
"""Requests at once."""
FORGET_EVERY = 20
"""Rounds after which the engine loses its cache, so that what comes next is loaded."""


@dataclasses.dataclass
class Asked:
    """A request on its way."""

    prompt: int
    max_tokens: int


def prompts() -> list[list[int]]:
    """With prefixes in common, of all lengths."""
    shared = [
        prompt(tokens, seed=index) for index, tokens in enumerate((5 * BLOCK, 9 * BLOCK + 7, 3 * BLOCK))
    ]
    return [shared[index % 3] + prompt(11 + 23 * index, seed=50 + index) for index in range(14)]


@pytest.fixture
def host(socket_dir: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonHost]:
    """A daemon that nobody else uses, whose copies take their time."""
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", "slow-copy:5")
    host = DaemonHost(socket_dir, shm_dir / "pool", pool__size="258MiB", **QUICK)
    host.start()
    yield host
    host.stop()


class Rounds:
    """What is done in each."""

    def __init__(
        self, rig: Rig, expected: list[list[int]], chance: random.Random, count: Counter[str]
    ) -> None:
        self.rig = rig
        self.expected = expected
        self.prompts = prompts()
        self.chance = chance
        self.count = count
        self.asked: dict[str, Asked] = {}
        self.compared = 0
        self.preempted = 0
        self._back_in = 0
        """Rounds until a daemon that was killed or stopped comes back."""

    def act(self) -> None:
        """One round."""
        engine = self.rig.engine
        self._disturb()
        for _ in range(self.chance.randrange(3)):
            if len(self.asked) < WAITING_MAX:
                self._ask()
        if self.asked and self.chance.random() < 0.3:
            name = self.chance.choice(list(self.asked))
            engine.call("abort", requests=[name])
            del self.asked[name]
            self.count["aborts"] += 1
        for _ in range(self.chance.randrange(1, 12)):
            states = self._step()
        running = {name.rsplit("-", 1)[0] for name in states}
        self._compare([name for name in self.asked if name not in running])

    def crowd(self) -> None:
        """So many requests at once that there are not blocks for what all have begun: some are preempted.
        With a daemon: what it had begun to load it ends."""
        self._come_back()
        while len(self.asked) < WAITING_MAX:
            self._ask(OUTPUT_TOKENS - 1)
        before = self.preempted
        while self._step() and self.preempted == before:
            pass

    def end(self) -> None:
        """Everything comes to its end, with a daemon."""
        self._come_back()
        self._compare(list(self.asked))

    def forget(self) -> None:
        """Everything comes to its end, and the engine loses its cache."""
        self._compare(list(self.asked))
        self.rig.forget()

    def _step(self) -> dict[str, str]:
        states: dict[str, str] = self.rig.engine.call("step")["requests"]
        self.preempted += "PREEMPTED" in states.values()
        return states

    def _ask(self, tokens_min: int = 4) -> None:
        asked = Asked(
            self.chance.randrange(len(self.prompts)), self.chance.randrange(tokens_min, OUTPUT_TOKENS)
        )
        answer = self.rig.engine.call(
            "add", prompt=self.prompts[asked.prompt], max_tokens=asked.max_tokens, logprobs=0
        )
        self.asked[answer["request"]] = asked

    def _disturb(self) -> None:
        if self._back_in:
            self._back_in -= 1
            if not self._back_in:
                self._come_back()
            return
        dice = self.chance.random()
        if dice < 0.06:
            self.rig.host.kill9()
            self.count["daemon_kills"] += 1
        elif dice < 0.10:
            self.rig.host.freeze(workers=dice < 0.08)
            self.count["daemon_stops"] += 1
        else:
            return
        self._back_in = self.chance.randrange(1, 4)

    def _come_back(self) -> None:
        self._back_in = 0
        self.rig.host.thaw()
        if not self.rig.host.runs:
            self.rig.host.start()

    def _compare(self, names: list[str]) -> None:
        if not names:
            return
        results = self.rig.engine.call("finish", requests=names, engine_timeout_s=60)["results"]
        for name, result in zip(names, results, strict=True):
            asked = self.asked.pop(name)
            assert result["finish_reason"] == "length"
            assert result["tokens"] == self.expected[asked.prompt][: asked.max_tokens], (name, asked)
            self.compared += len(result["tokens"])


def test_no_token_of_any_request_is_ever_another(
    model: Path, host: DaemonHost, tmp_path: Path, proved: Callable[[str], None], count: Counter[str]
) -> None:
    print(f"KVTIER_SEED={SEED}, {ROUNDS} rounds")
    options = EngineOptions(
        model,
        kv_transfer_config=kv_transfer_config(host.socket, load_start_deadline_s=1.0),
        dtype="float32",  # there the pieces in which a prompt is computed do not change a token
        num_blocks=BLOCKS,
        max_model_len=1024,
        max_num_batched_tokens=128,
        extra={"max_num_seqs": 8},
    )
    bare = dataclasses.replace(options, kv_transfer_config=None)
    with Engine.start(bare, tmp_path / "plain") as plain:
        expected = [one.tokens for one in plain.generate(prompts(), max_tokens=OUTPUT_TOKENS)]
    rig = start_rig(host, options, tmp_path / "log")
    rig.patient(False)
    with rig.engine:
        rounds = Rounds(rig, expected, random.Random(SEED), count)
        for number in range(1, ROUNDS + 1):
            rounds.act()
            if number % FORGET_EVERY == 0:
                rounds.crowd()
                rounds.forget()
        rounds.end()
        assert rig.engine.drain() == {"requests": {}, "free_blocks": BLOCKS - 1}
        loaded = rig.look("side.totals()")["loaded_tokens"]
    assert rounds.preempted, "no request was preempted"
    assert loaded, "nothing was loaded"
    count["engine_rounds"] += ROUNDS
    proved(
        f"{ROUNDS} random rounds of a real vLLM: {rounds.compared} tokens as without a connector,"
        f" {loaded:.0f} tokens loaded, {rounds.preempted} steps with preempted requests, {count['aborts']}"
        f" aborts, {count['daemon_kills']} kills of its daemon (KVTIER_SEED={SEED})"
    )
