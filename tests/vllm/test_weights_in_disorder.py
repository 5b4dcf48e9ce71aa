"""Weights that change in place, in disorder, under vLLM's scheduler: updates, names and resets in any order,
at any time. The model's KV tells of which weights it is, so that no engine can load another's unnoticed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvtier_vllm.model import namespace
from kvtier_vllm.model.namespace import UnsupportedConfiguration

from tests.support.daemon import DaemonHost, until
from tests.vllm.mini_engine import TOKENS, MiniEngine, WrongKV, engine_config
from tests.vllm.mini_rig import BLOCKS, SEEDS, wait_stored
from tests.vllm.mini_rig import host as host
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host"]

LENGTH, HIT = 6 * TOKENS + 5, 6 * TOKENS
STORY = prompt(LENGTH, seed=31)
MIXED = 0xDEAD
"""Of KV that stands on others' KV."""


class Weighted(MiniEngine):
    """Its KV is of its weights, and of those of the KV before it."""

    weights = 0
    mixes = False
    """vLLM goes on with KV of older weights, as nobody has told it to forget them."""
    just_named = False
    """The last that was told of is a name, and nothing was computed since."""
    _mixed = False

    def _tagged(self, digests: Any, tag: int) -> Any:
        return digests ^ np.uint64(tag << 32)

    def _check(self, name: str, table: Sequence[int], digests: Any) -> None:
        self._mixed = False
        try:
            super()._check(name, table, self._tagged(digests, self.weights))
        except WrongKV:
            if not self.mixes:
                raise
            self._mixed = True

    def _write(self, table: Sequence[int], digests: Any, first: int) -> None:
        super()._write(table, self._tagged(digests, MIXED if self._mixed else self.weights), first)

    def _forward(self, output: Any, requests: dict[str, Any]) -> dict[str, list[int]]:
        self.just_named = self.just_named and not output.num_scheduled_tokens
        return super()._forward(output, requests)

    def update(self, weights: int) -> None:
        """Nobody is told."""
        self.weights, self.mixes = weights, True

    def forget(self) -> None:
        super().forget()
        self.mixes = False

    def tell(self, name: str | None, *, heard: bool) -> None:
        """`heard`: the only worker lives in the scheduler's process."""
        self.just_named = name is not None
        change = self.worker.weights_changed(name or "")
        if heard:
            self.connector.weights_told(change)

    def reset(self, **changes: bool) -> bool:
        done = bool(self.scheduler.reset_prefix_cache(**changes))
        if done:
            self.mixes = False
        return done

    def settle(self) -> None:
        """Both halves know what the other knows, and are attached."""
        side, worker = self.connector._scheduler, self.worker._worker

        def attached() -> bool:
            self.step()
            self._hear(behind=False)
            one, two = side.link.client, worker.link and worker.link.client
            return bool(one and two and one.ready and two.ready)

        until(attached, "both halves are attached")

    def say(self, name: str, tokens: Sequence[int] = STORY) -> int:
        """Tokens that the request began with."""
        self.settle()
        self.add(name, tokens)
        self.run()
        wait_stored(self)
        return self.cached[name]


@pytest.fixture
def make(
    host: DaemonHost,
    model: Path,
    patience: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Callable[..., Weighted]]:
    """Engines that share, set as a user's are unless a test says otherwise."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made: list[Weighted] = []

    def engine(*, ahead: bool = False, changes: dict[str, Any] | None = None, **extra: object) -> Weighted:
        options = patience | {"salt": request.node.name, "on_reset": "leave"} | extra
        config = kv_transfer_config(host.socket, **options)
        made.append(Weighted(engine_config(model, config, async_scheduling=ahead, **changes or {}), BLOCKS))
        made[-1].settle()
        return made[-1]

    yield engine
    host.thaw()
    for one in made:
        one.close()


def acts(order: str, engine: Weighted, weights: int, name: str | None, *, heard: bool) -> None:
    """An update as a training loop does it, with the engine at rest."""
    for act in order.split():
        match act:
            case "update":
                engine.run()
                engine.update(weights)
            case "tell":
                engine.tell(name, heard=heard)
            case "reset":
                assert engine.reset()
            case "reset+connector":
                assert engine.reset(reset_connector=True)


ORDERS = (
    "update tell reset",
    "update reset tell",
    "update tell tell reset",
    "update reset tell reset",
    "update tell reset+connector",
    "update reset+connector tell",
)


@pytest.mark.parametrize("heard", [True, False], ids=["one process", "processes"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_name_is_shared_under_in_whatever_order_it_comes(
    make: Callable[..., Weighted], order: str, heard: bool
) -> None:
    one, two = make(), make()
    assert one.say("old") == 0
    acts(order, one, 1, "step 1", heard=heard)
    assert one.say("new") == 0
    acts("update reset tell", two, 1, "step 1", heard=not heard)
    assert two.say("shared") == HIT


@pytest.mark.parametrize("name", ["step 1", None], ids=["named", "nameless"])
@pytest.mark.parametrize("heard", [True, False], ids=["one process", "processes"])
def test_what_is_told_without_a_reset_publishes_nothing_of_the_old_weights(
    make: Callable[..., Weighted], heard: bool, name: str | None
) -> None:
    """vLLM's own cache still has it."""
    one, two, old = make(), make(), make()
    one.say("old")
    acts("update tell", one, 1, name, heard=heard)
    one.say("mixed")
    more = STORY + prompt(2 * TOKENS, seed=33)
    one.say("mixed too", more)
    acts("update reset tell", two, 1, "step 1", heard=heard)
    assert two.say("new") == 0
    assert old.say("old", more) == HIT


@pytest.mark.parametrize("heard", [True, False], ids=["one process", "processes"])
def test_requests_that_run_while_weights_change_publish_nothing(
    make: Callable[..., Weighted], heard: bool
) -> None:
    one, two = make(), make()
    one.add("running", STORY, max_tokens=4 * TOKENS)
    for _ in range(TOKENS):
        one.step()
    acts("update tell", one, 1, "step 1", heard=heard)
    one.run()
    acts("update reset tell", two, 1, "step 1", heard=heard)
    assert two.say("new") == 0


def test_a_reset_that_is_refused_has_been_asked_for(make: Callable[..., Weighted]) -> None:
    """Weights have changed whether or not vLLM could forget the old KV."""
    one, two = make(), make()
    one.add("running", STORY, max_tokens=4 * TOKENS)
    for _ in range(3):
        one.step()
    one.update(1)
    assert not one.reset()
    one.run()
    late = prompt(LENGTH, seed=36)
    one.say("late", late)
    assert two.say("fresh", late) == 0


@pytest.mark.parametrize("heard", [True, False], ids=["one process", "processes"])
def test_a_reset_later_on_is_another_updates(make: Callable[..., Weighted], heard: bool) -> None:
    one, two = make(), make()
    acts("update reset tell", one, 1, "step 1", heard=heard)
    one.say("first")
    acts("update reset", one, 2, None, heard=heard)
    assert one.say("second") == 0
    more = prompt(LENGTH, seed=37)
    one.say("more", more)
    acts("update reset tell", two, 1, "step 1", heard=heard)
    assert two.say("late", more) == 0
    assert two.say("early") == HIT


@pytest.mark.parametrize("heard", [True, False], ids=["one process", "processes"])
def test_steps_that_compute_nothing_are_nobodys(make: Callable[..., Weighted], heard: bool) -> None:
    """An engine goes on stepping after its last request until its stores have ended, so also between two
    calls of a training loop."""
    one = make()
    one.say("old")
    one.update(1)
    one.tell("step 1", heard=heard)
    for _ in range(3):
        one.step()
    assert one.reset()
    one.say("new")
    two = make()
    acts("update reset tell", two, 1, "step 1", heard=heard)
    assert two.say("shared") == HIT


def test_a_name_is_what_the_setting_is(make: Callable[..., Weighted]) -> None:
    one, two = make(), make(weights_revision="step 1")
    acts("update reset tell", one, 1, "step 1", heard=True)
    one.say("new")
    two.update(1)
    two.mixes = False
    assert two.say("same") == HIT


@pytest.mark.parametrize("readable", [True, False], ids=["readable", "unreadable"])
def test_where_weights_are_transferred_they_have_no_name_before_they_are_told(
    make: Callable[..., Weighted], monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    """Nobody reads the ones on disk, which may not even be there."""
    arguments = pytest.importorskip("vllm.engine.arg_utils").EngineArgs
    if "weight_transfer_config" not in {field.name for field in dataclasses.fields(arguments)}:
        pytest.skip("this vLLM transfers no weights")

    def unreadable(model: object) -> str:
        raise UnsupportedConfiguration("the commit of this model is unknown")

    transfer = {"weight_transfer_config": {"backend": "nccl"}}
    plain = make()
    if not readable:
        monkeypatch.setattr(namespace, "_found_revision", unreadable)
    one, two = make(changes=transfer), make(changes=transfer)
    one.say("one")
    assert one.say("own") == HIT
    assert two.say("two") == 0
    one.forget()
    assert one.say("forgotten") == 0
    for each in (one, two):
        acts("update reset tell", each, 1, "step 1", heard=False)
    one.say("named")
    assert two.say("shared") == HIT
    if readable:
        assert plain.say("as it is on disk") == 0


def test_a_second_update_overtakes_the_answer_to_the_first(make: Callable[..., Weighted]) -> None:
    """With asynchronous scheduling the answer to the first is on its way when the second one comes."""
    one = make(ahead=True)
    side, worker = one.connector._scheduler, one.worker._worker
    acts("update tell reset", one, 1, "step 1", heard=False)
    one.add("first", STORY, max_tokens=20, kv_transfer_params={"kvtier": {"load": False}})
    one.step()
    assert not side._generations.weights.revision, "it is heard of one step late"
    one.update(2)
    one.tell("step 2", heard=False)
    revisions = set()
    for _ in range(6):
        one.step()
        revisions.add(side._generations.weights.revision)
        assert worker.link is None or worker._weights.revision != "step 1"
    assert "step 1" in revisions, "or this test would prove nothing"
    one.run()
    two = make()
    acts("update reset tell", two, 1, "step 1", heard=True)
    assert two.say("late") == 0


class Disorder:
    """Two engines, of which each is told of its updates somehow before it takes its next step."""

    def __init__(self, make: Callable[..., Weighted], seed: int) -> None:
        self.random = random.Random(seed)
        self.heard = bool(seed % 2)
        self.engines = [make(ahead=self.random.random() < 0.5) for _ in range(2)]
        self.prompts = [prompt(self.random.randint(40, 130), seed=100 + index) for index in range(4)]
        self.count = 0
        self.loaded = 0

    def act(self) -> None:
        engine = self.random.choice(self.engines)
        luck = self.random.random()
        if luck < 0.10:
            self.update(engine)
        elif luck < 0.35:
            self.count += 1
            engine.add(f"{self.count}", self.random.choice(self.prompts), self.random.randint(1, 30))
        else:
            for _ in range(self.random.randint(1, 12)):
                engine.step()

    def update(self, engine: Weighted) -> None:
        """Nothing, or one of few models that both engines have by turns."""
        rest = self.random.random() < 0.6
        if rest:
            engine.run()
        engine._hear(behind=False)
        weights = self.random.randint(0, 2)
        name = self.random.choice([f"model {weights}", f"model {weights}", None])
        engine.update(weights)
        told = self.random.choice((("tell",), ("reset",), ("tell", "reset"), ("reset", "tell")))
        if told == ("reset",) and engine.just_named:
            # This reset would be taken for that of the update before. Whoever names weights has to say when
            # they are others again.
            told, name = ("tell", "reset"), None
        for act in told:
            if act == "tell":
                engine.tell(name, heard=self.heard)
            else:
                engine.reset()

    def end(self) -> None:
        for engine in self.engines:
            engine.run()
            self.loaded += int(engine.connector._scheduler.totals()["loaded_tokens"])
            assert set(engine.finished) >= set(engine.cached)


def test_in_disorder_no_engine_loads_what_other_weights_have_made(make: Callable[..., Weighted]) -> None:
    loaded = 0
    for seed in SEEDS:
        world = Disorder(make, seed)
        for _ in range(150):
            world.act()
        world.end()
        loaded += world.loaded
    assert loaded, "nothing was loaded, so that nothing is proved"
