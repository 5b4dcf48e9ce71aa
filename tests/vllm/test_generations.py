"""Updates of weights, names for them and resets, in any order: under vLLM's scheduler, around a model whose
KV is another with other weights, and which checks every byte that it relies on."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_vllm.meta import Weights, WeightsChange
from kvtier_vllm.scheduler.generations import Generations

from tests.support.daemon import DaemonHost, until
from tests.support.length import repeats, rounds
from tests.vllm.mini_engine import TOKENS, Digests, MiniEngine, engine_config
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SEEDS = range(rounds(2, 24))
ROUNDS = 40
WEIGHTS = 3
PROMPTS = [prompt(6 * TOKENS + 3, seed=900 + index) for index in range(3)]
HIT = 6 * TOKENS
OFFSET = 0x1E3779B97F4A7C15
"""Between the KV of two weights."""


class Learner(MiniEngine):
    """Its weights change in place. Tells kvtier as a worker in the scheduler's process does, or (`apart`) one
    in a process of its own."""

    apart = False
    weights = 0
    dirty = False
    """It has taken a step since it was last reset, and may have computed or loaded something."""
    stale = False
    """Of other weights: vLLM itself goes on with that, until it is reset."""

    @property
    def side(self) -> Any:
        return self.connector._scheduler

    @property
    def loaded_tokens(self) -> int:
        return int(self.side.totals()["loaded_tokens"])

    def step(self) -> None:
        super().step()
        self.dirty = True

    def update(self, weights: int) -> None:
        self._hear(behind=False)
        self.stale = self.stale or (self.dirty and weights != self.weights)
        self.weights = weights

    def tell(self, named: bool = True) -> None:
        """The truth."""
        revision = f"weights {self.weights}" if named else ""
        change = self.worker.weights_changed(revision)
        if not self.apart:
            self.connector.weights_told(change)

    def reset(self, **how: bool) -> bool:
        self._hear(behind=False)
        done = False
        with contextlib.suppress(RuntimeError):  # vLLM's, where requests wait for loads
            done = bool(self.scheduler.reset_prefix_cache(**how))
        if done:
            self.dirty = self.stale = False
        return done

    def ask(self, name: str, tokens: Sequence[int]) -> int:
        """Runs one request, alone; how much of it was cached."""
        self.add(name, tokens)
        self.run()
        return self.cached[name]

    def settle(self) -> None:
        """Both halves know what the other knows, and are attached."""
        self.ask(f"settle {len(self.finished)}", prompt(2, seed=5))
        until(lambda: self.side.link.client is not None and self.side.link.client.ready, "it is attached")
        until(lambda: self.side.storing, "it stores")

    def wait_stored(self) -> None:
        client = self.side.link.client
        until(lambda: client.status.transfers_active == 0, "all stores have ended")

    def _check(self, name: str, table: Sequence[int], digests: Digests) -> None:
        if not self.stale:
            super()._check(name, table, digests + np.uint64(OFFSET * self.weights))

    def _write(self, table: Sequence[int], digests: Digests, first: int) -> None:
        super()._write(table, digests + np.uint64(OFFSET * self.weights), first)


Make = Callable[..., Learner]


@pytest.fixture
def make(
    session_host: DaemonHost,
    model: Path,
    tmp_path: Path,
    patience: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Make]:
    """Makes engines of one namespace, set as a user's are unless a test says otherwise."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made: list[Learner] = []

    def engine(*, apart: bool = False, ahead: bool = False, **settings: object) -> Learner:
        options = patience | {"salt": tmp_path.name, "on_reset": "leave"} | settings
        config = kv_transfer_config(session_host.socket, **options)
        made.append(Learner(engine_config(model, config, async_scheduling=ahead), 64))
        made[-1].apart = apart
        made[-1].settle()
        made[-1].dirty = False
        return made[-1]

    yield engine
    for one in made:
        one.close()


def learned(make: Make, weights: int, **options: Any) -> Learner:
    """An engine with weights that are named, and nothing of others."""
    engine = make(**options)
    engine.update(weights)
    assert engine.reset()
    engine.tell()
    engine.settle()
    return engine


ORDERS = {
    "reset, name": ("reset", "name"),
    "name, reset": ("name", "reset"),
    "reset, name, reset": ("reset", "name", "reset"),
    "name twice": ("name", "reset", "name"),
}


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_named_weights_are_shared_in_whatever_order_it_is_said(make: Make, order: str, apart: bool) -> None:
    engine = make(apart=apart)
    engine.ask("old", PROMPTS[0])
    engine.wait_stored()
    for weights in (1, 2):  # several updates, and nothing between them that an update could be told by
        engine.update(weights)
        for act in ORDERS[order]:
            if act == "reset":
                assert engine.reset()
            else:
                engine.tell()
    engine.settle()
    assert engine.ask("new", PROMPTS[0]) == 0
    engine.wait_stored()
    assert learned(make, 2).ask("other", PROMPTS[0]) == HIT
    assert learned(make, 1).ask("another", PROMPTS[0]) == 0
    assert make().ask("as they were", PROMPTS[0]) == HIT


@pytest.mark.parametrize("apart", [False, True])
def test_a_name_without_a_reset_shares_nothing(make: Make, apart: bool) -> None:
    """vLLM goes on with blocks of the old weights, under a request that runs and for others."""
    engine = make(apart=apart)
    engine.ask("before", PROMPTS[0])
    engine.add("meanwhile", PROMPTS[1], max_tokens=3 * TOKENS)
    for _ in range(4):
        engine.step()
    engine.update(1)
    engine.tell()
    assert engine.stale
    engine.settle()
    engine.ask("after", PROMPTS[0] + PROMPTS[2])
    engine.wait_stored()
    other = learned(make, 1)
    for index, tokens in enumerate((PROMPTS[0] + PROMPTS[2], PROMPTS[1])):
        assert other.ask(f"{index}", tokens) == 0
    assert engine.reset()
    engine.tell()  # the next update, or the same: now they may be shared
    engine.settle()
    assert engine.ask("again", PROMPTS[1]) == HIT


def test_requests_that_are_preempted_for_a_reset_are_computed_and_shared_anew(make: Make) -> None:
    engine = make()
    engine.add("long", PROMPTS[0], max_tokens=4 * TOKENS)
    for _ in range(6):
        engine.step()
    engine.update(1)
    engine.tell()
    assert engine.reset(reset_running_requests=True)
    engine.settle()
    engine.ask("next", PROMPTS[0])
    engine.wait_stored()
    assert learned(make, 1).ask("other", PROMPTS[0]) == HIT


def test_a_reset_that_vllm_refuses_leaves_too(make: Make) -> None:
    """The weights have changed all the same."""
    engine = make()
    engine.add("runs", PROMPTS[0], max_tokens=4 * TOKENS)
    for _ in range(3):
        engine.step()
    engine.update(1)
    assert not engine.reset()
    engine.settle()
    engine.ask("after", PROMPTS[1])
    engine.wait_stored()
    assert make().ask("of the old weights", PROMPTS[1]) == 0


def test_a_reset_of_connectors_leaves_even_where_resets_are_kept(make: Make) -> None:
    engine = make(on_reset="keep")
    engine.ask("before", PROMPTS[0])
    engine.wait_stored()
    assert engine.reset()
    assert engine.ask("flushed", PROMPTS[0]) == HIT
    assert engine.reset(reset_connector=True)
    engine.settle()
    assert engine.ask("left", PROMPTS[0]) == 0
    engine.update(1)
    engine.tell()
    assert engine.reset(reset_connector=True)  # one reset, of which two hooks tell
    engine.settle()
    engine.ask("named", PROMPTS[0])
    engine.wait_stored()
    assert learned(make, 1).ask("other", PROMPTS[0]) == HIT


@pytest.mark.parametrize("seed", repeats(SEEDS))
@pytest.mark.parametrize("apart", [False, True])
def test_no_engine_ever_sees_a_block_of_other_weights(make: Make, apart: bool, seed: int) -> None:
    """Two engines are updated to and fro and told of in every way, requests running or not; one stays as it
    was started. Each checks all that it gets."""
    dice = random.Random(f"{seed} {apart}")
    learners = [make(apart=apart, ahead=bool(seed % 2)) for _ in range(2)]
    first = make(on_reset="keep")
    loaded = 0
    for turn in range(ROUNDS):
        engine = dice.choice(learners)
        if dice.random() < 0.3:
            engine.add(f"{turn} runs", dice.choice(PROMPTS), max_tokens=dice.randrange(1, 40))
            for _ in range(dice.randrange(6)):
                engine.step()
        if dice.random() < 0.6:
            told = dice.choice(
                ("reset", "name", "nothing", "reset name", "name reset", "nothing reset", "reset name reset")
            )
            # A reset alone, without a step since weights were named, is taken for theirs.
            if not apart and told != "reset" and dice.random() < 0.3:
                engine.update(dice.randrange(WEIGHTS))
                engine.tell()
            engine.update(dice.randrange(WEIGHTS))
            for act in told.split():
                if act == "reset":
                    engine.reset(reset_running_requests=dice.random() < 0.5)
                else:
                    engine.tell(named=act == "name")
        engine.run()
        engine.settle()
        for reader in (engine, first):
            reader.ask(f"{turn} {id(reader)}", dice.choice(PROMPTS))
            reader.wait_stored()
        if dice.random() < 0.5:
            assert first.reset()
    loaded = sum(engine.loaded_tokens for engine in learners)
    assert loaded, "no engine ever loaded a block of weights that were named"


# --- the rules alone


LOG = logging.getLogger(__name__)


def generations(*, keep: bool = False, workers: int = 1) -> Generations:
    return Generations(Weights(), keep=keep, world_size=workers, log=LOG)


def name(revision: str, work: int, count: int = 1, workers: int = 1) -> list[WeightsChange]:
    return [WeightsChange(revision, work, count)] * workers


def test_weights_that_are_named_before_the_first_step_are_shared_at_once() -> None:
    """As where they are transferred into an engine that has just started."""
    known = Generations(Weights(5, private=True), keep=False, world_size=1, log=LOG)
    assert known.have_changed(0, name("a", 0))
    assert (known.weights.revision, known.weights.private) == ("a", False)


def test_workers_that_disagree_have_no_name_in_common() -> None:
    known = generations(workers=2)
    known.was_reset(3, done=True)
    for count, said in enumerate(("b", ""), 1):
        assert known.have_changed(4, [*name("a", 3, count), *name(said, 3, count)])
        assert (known.weights.revision, known.weights.private, known.weights.heeded) == ("", True, count)
    assert known.have_changed(4, name("a", 3, 3, workers=2))
    assert known.weights.revision == "a"


def test_a_worker_that_is_silent_is_waited_for() -> None:
    """What the others say is not answered before; nothing is shared meanwhile."""
    known = generations(workers=2)
    known.was_reset(3, done=True)
    assert known.have_changed(3, name("a", 3))
    waiting = known.weights
    assert (waiting.private, waiting.heeded) == (True, 0)
    assert not known.have_changed(4, name("a", 3))
    assert known.weights == waiting
    assert known.have_changed(5, name("a", 3, workers=2))
    assert (known.weights.revision, known.weights.heeded) == ("a", 1)
    assert known.have_changed(6, [*name("a", 5, 2), *name("a", 3, 1)])
    assert (known.weights.private, known.weights.heeded) == (True, 1)


def test_what_is_said_again_before_the_answer_has_come_is_no_change() -> None:
    known = generations()
    assert known.have_changed(3, name("a", 3))
    weights = known.weights
    assert not known.have_changed(4, name("a", 3))
    assert known.weights == weights


def test_workers_that_changed_at_different_times_have_no_name_in_common() -> None:
    known = generations(workers=2)
    known.was_reset(3, done=True)
    assert known.have_changed(5, [*name("a", 3), *name("a", 4)])
    assert known.weights.private


def test_a_reset_between_which_and_the_name_something_was_computed_is_not_the_names_own() -> None:
    """Also where the name is heard of late: the reset may be that of an update nobody has told of."""
    for reset in (2, 4):
        known = generations()
        known.was_reset(reset, done=True)
        assert known.have_changed(4, name("a", 3))
        assert known.weights.private


@pytest.mark.parametrize("keep", [False, True])
def test_a_reset_after_a_step_is_not_the_names_own(keep: bool) -> None:
    known = generations(keep=keep)
    known.have_changed(3, name("a", 3))
    assert known.weights.private
    assert known.was_reset(4, done=True) is not keep
    assert known.weights.private
    known.have_changed(4, name("a", 4, 2))
    assert known.weights.revision == "a"
    assert not known.was_reset(4, done=True)
    assert known.was_reset(5, done=True) is not keep
    assert known.weights.private is not keep


def test_a_second_reset_may_be_that_of_an_update_nobody_has_told_of() -> None:
    known = generations()
    known.have_changed(3, name("a", 3))
    assert known.was_reset(3, done=True)
    assert known.weights.revision == "a"
    assert known.was_reset(3, done=True)
    assert known.weights.private


def test_each_change_is_another_life_of_the_engine() -> None:
    """Workers wait for that before they attach again."""
    known, lives = generations(), {0}
    for work in range(5):
        assert known.have_changed(work, name("a" if work % 2 else "", work, work + 1))
        assert known.weights.life not in lives
        lives.add(known.weights.life)
