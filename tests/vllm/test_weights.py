"""Weights that change in place: no block of the old weights is loaded, and no block of the new ones is stored
under the old name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kvtier_vllm.hooks import around_reset

from tests.support.daemon import DaemonHost
from tests.vllm.engine import Engine, EngineOptions
from tests.vllm.rig import BLOCK, Rig, full_blocks, kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

TOKENS = prompt(9 * BLOCK + 5, seed=21)
HIT = full_blocks(len(TOKENS))
FACTOR = 2.0
"""Of every norm: another model, and exactly undone by its inverse."""

Start = Callable[..., Any]


@pytest.fixture
def start(session_host: DaemonHost, model: Path, tmp_path: Path) -> Start:
    """Engines of one namespace, set as a user's are unless a test says otherwise."""

    @contextmanager
    def engine(transfer: bool = False, **settings: Any) -> Iterator[Rig]:
        """`transfer`: its weights come by vLLM's weight transfer."""
        config = kv_transfer_config(
            session_host.socket, **{"salt": tmp_path.name, "on_reset": "leave"} | settings
        )
        extra = {"weight_transfer_config": {"backend": "scaled-norms"}} if transfer else {}
        rig = Rig(session_host, Engine.start(EngineOptions(model, config, extra=extra), tmp_path / "log"))
        if transfer:  # its workers attach once a step has told them how its blocks are called
            rig.generate(prompt(BLOCK, seed=76), max_tokens=2)
        rig.patient()
        rig.wait_ready()
        with rig.engine:
            yield rig

    return engine


@pytest.fixture(scope="module")
def new(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The answer of an engine with the new weights that has nothing to do with others."""
    with Engine.start(EngineOptions(model), tmp_path_factory.mktemp("new") / "log") as engine:
        engine.call("scale_weights", factor=FACTOR)
        return engine.generate([TOKENS], max_tokens=16)[0].tokens


def update(rig: Rig, factor: float) -> None:
    """Changes all weights in place."""
    rig.engine.drain()
    [count] = rig.engine.call("scale_weights", factor=factor)["parameters"]
    assert count


def tell(rig: Rig, revision: str | None) -> None:
    assert rig.engine.call("tell_weights", revision=revision)["told"] == [True]


def settled(rig: Rig) -> None:
    """The engine's worker knows what the scheduler knows, and both are attached again."""
    rig.generate(prompt(BLOCK, seed=77), max_tokens=2)
    rig.wait_ready()


def test_after_a_reset_nothing_of_the_old_weights_is_used_and_nothing_is_stored_as_theirs(
    start: Start, new: list[int], proved: Callable[[str], None]
) -> None:
    with start() as rig:
        old = rig.generate(TOKENS)
        rig.wait_stored()
        assert old.tokens != new, "or this test would prove nothing"
        update(rig, FACTOR)
        rig.engine.reset_prefix_cache()
        settled(rig)
        got = rig.generate(TOKENS)
        assert (got.num_cached_tokens, got.tokens) == (0, new)
        rig.wait_stored()
        assert rig.engine.log.read_text().count("shares blocks with no other") == 1
        # Its own blocks of the new weights are its own until the next reset.
        assert rig.generate(TOKENS).num_cached_tokens == HIT
    with start() as fresh:  # of the original weights: what it finds is theirs
        found = fresh.generate(TOKENS)
        assert found.num_cached_tokens == HIT
        assert found.tokens == old.tokens
    proved("Weights that were changed in place before a reset neither loaded nor left a block as another's.")


def test_weights_that_have_a_name_are_shared_under_it(start: Start, new: list[int]) -> None:
    with start() as rig:
        old = rig.generate(TOKENS)
        rig.wait_stored()
        update(rig, FACTOR)
        tell(rig, "step 1")
        rig.engine.reset_prefix_cache()  # after the name as well as before it
        settled(rig)
        got = rig.generate(TOKENS)
        assert (got.num_cached_tokens, got.tokens) == (0, new)
        rig.wait_stored()
    with start() as other:
        update(other, FACTOR)
        other.engine.reset_prefix_cache()
        tell(other, "step 1")
        settled(other)
        found = other.generate(TOKENS)
        assert (found.num_cached_tokens, found.tokens) == (HIT, new)
        update(other, 1 / FACTOR)
        other.engine.reset_prefix_cache()  # nobody has said what they are now
        settled(other)
        again = other.generate(TOKENS)
        assert (again.num_cached_tokens, again.tokens) == (0, old.tokens)


def test_weights_that_vllm_transfers_are_nobodys_before_they_are_named(start: Start, new: list[int]) -> None:
    """By vLLM's own calls: start_weight_update, update_weights, finish_weight_update."""
    with start() as plain:
        old = plain.generate(TOKENS)
        plain.wait_stored()
    with start(transfer=True) as rig:
        settled(rig)
        first = rig.generate(TOKENS)
        assert (first.num_cached_tokens, first.tokens) == (0, old.tokens), "who knows whose weights these are"
        rig.wait_stored()
        rig.engine.drain()
        rig.engine.call("transfer_weights", factor=FACTOR)
        rig.engine.reset_prefix_cache()
        settled(rig)
        got = rig.generate(TOKENS)
        assert (got.num_cached_tokens, got.tokens) == (0, new)
        rig.engine.drain()
        rig.engine.call("transfer_weights", factor=1 / FACTOR)
        tell(rig, "step 2")
        rig.engine.reset_prefix_cache()
        settled(rig)
        again = rig.generate(TOKENS)
        assert (again.num_cached_tokens, again.tokens) == (0, old.tokens)
        rig.wait_stored()
    with start(transfer=True) as other:
        tell(other, "step 2")
        other.engine.reset_prefix_cache()
        settled(other)
        found = other.generate(TOKENS)
        assert (found.num_cached_tokens, found.tokens) == (HIT, old.tokens)


@pytest.mark.long  # `make test` has it with an engine that computes nothing (test_weights_in_disorder.py)
def test_without_a_reset_it_is_enough_to_say_that_they_have_changed(start: Start) -> None:
    with start() as rig:
        rig.generate(TOKENS)
        rig.wait_stored()
        update(rig, FACTOR)
        tell(rig, None)
        settled(rig)
        more = prompt(6 * BLOCK + 3, seed=22)
        rig.generate(more)
        rig.wait_stored()
    with start() as fresh:
        assert fresh.generate(more).num_cached_tokens == 0
        assert fresh.generate(TOKENS).num_cached_tokens == HIT


@pytest.mark.long  # as the one before
def test_a_name_without_a_reset_shares_nothing_that_stands_on_the_old_weights(
    start: Start, new: list[int]
) -> None:
    """The engine's own cache still has what the old ones made, and vLLM goes on from there."""
    with start() as rig:
        rig.generate(TOKENS)
        rig.wait_stored()
        update(rig, FACTOR)
        tell(rig, "step 2")
        settled(rig)
        mixed = rig.generate(TOKENS)
        assert mixed.num_cached_tokens == HIT
        assert mixed.tokens != new, "or this test would prove nothing"
        rig.wait_stored()
    with start() as other:
        update(other, FACTOR)
        other.engine.reset_prefix_cache()
        tell(other, "step 2")
        settled(other)
        found = other.generate(TOKENS)
        assert (found.num_cached_tokens, found.tokens) == (0, new)


def test_an_engine_that_only_flushes_its_cache_may_say_so(start: Start) -> None:
    with start(on_reset="keep") as rig:
        rig.compute_and_hit(TOKENS)
        rig.engine.drain()
        rig.engine.reset_prefix_cache()
        assert rig.generate(TOKENS).num_cached_tokens == HIT
        assert "shares blocks with no other" not in rig.engine.log.read_text()


WAYS = ("reload_weights", "runner", "load_weights", "apply_model")
"""Calls of vLLM's that change weights: of a worker, of its model runner, of its model."""


@pytest.fixture(scope="module")
def scaled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other norms."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path_factory.mktemp("scaled") / "other"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    changed = {name: each * FACTOR if "norm" in name else each for name, each in tensors.items()}
    save_file(
        {name: each.astype(tensors[name].dtype) for name, each in changed.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def change(rig: Rig, way: str, folder: Path | str = "", factor: float = 1.0) -> None:
    rig.engine.drain()
    rig.engine.call("change_weights", way=way, folder=str(folder), factor=factor)


def test_a_call_that_changes_weights_is_noticed_whatever_follows(
    start: Start, new: list[int], model: Path, scaled: Path
) -> None:
    """Without a reset at first, and then with one that means nothing."""
    others = [prompt(6 * BLOCK + 3, seed=22 + number) for number in range(len(WAYS))]
    with start(on_reset="keep") as rig:
        right = [rig.generate(TOKENS).tokens, new]
        assert right[0] != right[1], "or this test would prove nothing"
        rig.wait_stored()
        for number, (way, more) in enumerate(zip(WAYS, others, strict=True), 1):
            to = number % 2  # there and back
            change(rig, way, (model, scaled)[to], (1 / FACTOR, FACTOR)[to])
            settled(rig)
            rig.generate(more)
            rig.wait_stored()
            rig.engine.drain()
            rig.engine.reset_prefix_cache()
            got = rig.generate(TOKENS)
            assert (got.num_cached_tokens, got.tokens) == (0, right[to]), way
            tell(rig, f"by {way}")
            rig.engine.reset_prefix_cache()
            settled(rig)
            assert rig.generate(TOKENS).num_cached_tokens == 0, way
            rig.wait_stored()
            rig.engine.drain()
            rig.engine.reset_prefix_cache()
            got = rig.generate(TOKENS)
            assert (got.num_cached_tokens, got.tokens) == (HIT, right[to]), way
    with start(on_reset="keep") as fresh:
        assert [fresh.generate(more).num_cached_tokens for more in others] == [0] * len(WAYS)
        found = fresh.generate(TOKENS)
        assert (found.num_cached_tokens, found.tokens) == (HIT, right[0])
        change(fresh, WAYS[0], scaled)
        tell(fresh, f"by {WAYS[0]}")
        fresh.engine.reset_prefix_cache()
        settled(fresh)
        found = fresh.generate(TOKENS)
        assert (found.num_cached_tokens, found.tokens) == (HIT, right[1])


def test_weights_that_were_discarded_in_sleep_are_others_afterwards(start: Start) -> None:
    """Whatever resets mean. A processor's engine keeps its weights in fact, so what it computes is known."""
    more = prompt(6 * BLOCK + 3, seed=29)
    with start(on_reset="keep") as rig:
        rig.generate(TOKENS)
        rig.wait_stored()
        change(rig, "look")
        rig.engine.reset_prefix_cache()
        assert rig.generate(TOKENS).num_cached_tokens == HIT
        change(rig, "sleep of workers")  # nothing has been reset
        settled(rig)
        rig.generate(more)
        rig.wait_stored()
        rig.engine.drain()
        rig.engine.reset_prefix_cache()
        assert rig.generate(TOKENS).num_cached_tokens == 0
        change(rig, "sleep")
        tell(rig, "after sleep")  # sleeping has reset the cache
        settled(rig)
        assert rig.generate(TOKENS).num_cached_tokens == 0
        rig.wait_stored()
        rig.engine.drain()
        rig.engine.reset_prefix_cache()
        assert rig.generate(TOKENS).num_cached_tokens == HIT
    with start() as fresh:
        assert fresh.generate(more).num_cached_tokens == 0
    with start(weights_revision="after sleep") as other:
        assert other.generate(TOKENS).num_cached_tokens == HIT


def test_an_audit_finds_weights_that_nobody_has_told_of(start: Start, proved: Callable[[str], None]) -> None:
    with start(on_reset="keep", audit_rate=1e-9) as rig:
        rig.generate(TOKENS)
        rig.wait_stored()
        update(rig, FACTOR)
        rig.engine.reset_prefix_cache()
        rig.generate(TOKENS)
        rig.engine.drain()
        assert rig.look("side._quarantined")
        error = rig.look("side._audits.counters.worst_mismatch")
        assert rig.generate(TOKENS).num_cached_tokens == 0
    proved(f"An audit found weights that were changed without a word: relative error {error:.2f}.")


class Pool:
    def __init__(self, done: bool) -> None:
        self.done = done

    def reset_prefix_cache(self) -> bool:
        return self.done


@pytest.mark.parametrize("done", [True, False])
def test_a_reset_is_seen_and_whether_it_was_done(done: bool) -> None:
    told: list[object] = []
    pool = Pool(done)
    around_reset(pool, lambda: told.append("before"), told.append)
    assert pool.reset_prefix_cache() is done
    assert told == ["before", done]
