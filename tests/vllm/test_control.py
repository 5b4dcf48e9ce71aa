"""What is stored and loaded of a request is what the engine's settings and the request itself allow."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from kvtier_engine.hints import Hold
from kvtier_vllm.config import ConnectorConfig
from kvtier_vllm.scheduler.control import WARNED_MAX, Control, Controls
from kvtier_vllm.scheduler.retaining import Keeping, Kept
from kvtier_vllm.scheduler.worth import LOADS_MIN, Worth

from tests.vllm.mini_engine import TOKENS, MiniEngine, output_of
from tests.vllm.mini_rig import all_came_back, client, compute, held_blocks
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]

LENGTH, BLOCKS = 10 * TOKENS + 1, 10
log = logging.getLogger("test.control")


@pytest.fixture
def patient(make: Callable[..., MiniEngine]) -> Callable[..., MiniEngine]:
    """Makes engines that wait for the daemon's answers, however busy the machine is."""
    return partial(make, lookup_budget_ms=1_000)


def test_only_prompts_are_stored_if_that_is_asked_for(patient: Callable[..., MiniEngine]) -> None:
    story = prompt(LENGTH)
    longer = story + output_of(story, 40) + [1]
    for setting, params, blocks in (
        ("all", None, (LENGTH + 39) // TOKENS),
        ("prompt", None, BLOCKS),
        ("all", {"store_tokens": "prompt"}, BLOCKS),
        ("prompt", {"store_tokens": "all"}, BLOCKS),  # a request only narrows
    ):
        engine = patient(store_tokens=setting)
        compute(engine, "story", story, max_tokens=40, kv_transfer_params={"kvtier": params})
        assert held_blocks(engine, longer) == blocks
        all_came_back(engine)


def test_caps_count_from_the_beginning_of_a_request(patient: Callable[..., MiniEngine]) -> None:
    engine, story = patient(max_store_tokens=6 * TOKENS + 5), prompt(LENGTH)
    compute(engine, "story", story)
    assert held_blocks(engine, story) == 6
    engine = patient(max_load_tokens=4 * TOKENS)
    compute(engine, "story", story)
    assert held_blocks(engine, story) == 4
    all_came_back(engine)


def test_a_request_narrows_what_is_stored_and_loaded(patient: Callable[..., MiniEngine]) -> None:
    engine = patient(max_load_tokens=8 * TOKENS)
    for seed, wish, stored, loaded in (
        (1, {"store": False}, 0, 0),
        (2, {"max_store_tokens": 3 * TOKENS}, 3, 3),
        (3, {"max_store_tokens": 0}, 0, 0),
        (4, {"load": False}, 8, 0),
        (5, {"max_load_tokens": 2 * TOKENS}, 8, 2),
        (6, {"max_load_tokens": 9 * TOKENS}, 8, 8),
    ):
        tokens = prompt(LENGTH, seed)
        params = {"kvtier": wish}
        assert compute(engine, f"first {seed}", tokens, kv_transfer_params=params) == 0
        assert held_blocks(engine, tokens) == stored
        engine.forget()
        assert compute(engine, f"again {seed}", tokens, kv_transfer_params=params) == loaded * TOKENS
        engine.forget()
    all_came_back(engine)


def test_a_request_that_loads_nothing_is_not_looked_up(patient: Callable[..., MiniEngine]) -> None:
    engine = patient()
    engine.add("waits", prompt(LENGTH), kv_transfer_params={"kvtier": {"load": False}})
    assert not len(engine.connector._scheduler._ahead)
    engine.run()
    totals = engine.connector._scheduler.totals()
    assert totals["lookups"] == totals["requests_known_absent"] == 0
    all_came_back(engine)


def test_what_is_quicker_computed_is_not_loaded(patient: Callable[..., MiniEngine]) -> None:
    engine = patient(min_load_tokens=4 * TOKENS)
    short, long = prompt(3 * TOKENS + 1, seed=1), prompt(4 * TOKENS + 1, seed=2)
    for name, tokens, loaded in (("short", short, 0), ("long", long, 4 * TOKENS)):
        compute(engine, name, tokens)
        engine.forget()
        assert compute(engine, f"{name} again", tokens) == loaded
    engine.forget()
    # What the engine has itself leaves too little to load.
    compute(engine, "head", long[: TOKENS + 1], kv_transfer_params={"kvtier": {"load": False}})
    assert compute(engine, "rest", long) == TOKENS
    all_came_back(engine)
    assert client(engine).status.leases == 0


def test_beside_others_a_hit_is_loaded_if_that_is_sooner_by_the_engines_own_measure(
    patient: Callable[..., MiniEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = patient(min_load_tokens=0)
    side, short, long = engine.connector._scheduler, prompt(2 * TOKENS + 1, 1), prompt(LENGTH, 2)
    for name, tokens in (("short", short), ("long", long)):
        compute(engine, name, tokens)
    engine.forget()
    # Steps take 10 ms beside others, in which 100 tokens are computed; a load takes no longer than a step.
    monkeypatch.setattr(Worth, "token_s", 1e-4)
    monkeypatch.setattr(Worth, "step_s", 1e-2)
    for _ in range(LOADS_MIN):
        side._worth.loaded(1_000, 1e-2)
    assert compute(engine, "idle", short) == 2 * TOKENS, "the engine has nothing else to do"
    engine.forget()
    engine.add("other", prompt(3 * TOKENS, 3), max_tokens=400)
    for _ in range(5):
        engine.step()
    loads, steps = side.totals()["loads"], 0
    engine.add("beside", short)
    while not engine.scheduler.requests["beside"].num_output_tokens:
        engine.step()
        steps += 1
    assert steps == 1
    assert (side.totals()["loads"], side.totals()["computed_instead"]) == (loads, 1)
    engine.add("worth it", long)
    while "worth it" not in engine.finished:
        engine.step()
    assert engine.cached["worth it"] == BLOCKS * TOKENS
    assert "other" not in engine.finished
    engine.run()
    assert engine.finished["beside"] == output_of(short, 8)
    all_came_back(engine)


def test_a_block_is_stored_when_enough_requests_have_had_it(patient: Callable[..., MiniEngine]) -> None:
    engine, shared = patient(store_threshold=2), prompt(4 * TOKENS)
    one, other = shared + prompt(3 * TOKENS, seed=1), shared + prompt(3 * TOKENS, seed=2)
    compute(engine, "one", one)
    assert held_blocks(engine, one) == 0
    engine.forget()
    compute(engine, "other", other, kv_transfer_params={"kvtier": {"load": False}})
    assert held_blocks(engine, other) == 4, "the shared head, and nothing else"
    all_came_back(engine)


def test_a_preempted_request_counts_once(patient: Callable[..., MiniEngine]) -> None:
    engine = patient(store_threshold=2)
    for index in range(8):
        engine.add(f"r{index}", prompt(90, seed=index), max_tokens=60)
    engine.run()
    assert engine.preemptions
    assert engine.connector._scheduler.totals()["stores"] == 0
    all_came_back(engine)


def of(params: Any, **settings: Any) -> Control:
    request = SimpleNamespace(kv_transfer_params=params, num_prompt_tokens=100)
    return Controls(ConnectorConfig.parse(settings), log).of(request)


def test_without_wishes_the_settings_hold() -> None:
    nothing: tuple[Any, ...] = (None, {}, {"do_remote_prefill": True}, {"kvtier": None}, {"kvtier": {}})
    for params in nothing:
        assert of(params) == Control(True, True, None, None)
        assert of(params, store=False, max_load_tokens=7) == Control(False, True, None, 7)


def test_the_smaller_cap_holds() -> None:
    wish = {"kvtier": {"max_store_tokens": 50, "max_load_tokens": 60, "store_tokens": "prompt"}}
    assert of(wish) == Control(True, True, 50, 60)
    assert of(wish, max_store_tokens=40, max_load_tokens=70) == Control(True, True, 40, 60)
    assert of({"kvtier": {"store_tokens": "prompt"}}, max_store_tokens=400).store_end_tokens == 100


def test_a_request_cannot_ask_for_more_than_the_engine_does() -> None:
    wish = {"kvtier": {"store": True, "load": True}}
    assert of(wish, store=False, load=False) == Control(False, False, None, None)


def keeping(wish: dict[str, Any] | None = None, **settings: Any) -> Keeping:
    return of({"kvtier": wish}, **settings).keeping


def test_a_request_is_held_as_long_as_engine_and_request_say_and_no_longer_than_it_may_ask_for() -> None:
    for wish, settings, hold_s in (
        ({}, {}, 0),
        ({}, {"pin_s": 600}, 600),  # the bound is on what requests ask for
        ({"pin_s": 60}, {}, 60),
        ({"pin_s": 600}, {}, 300),
        ({"pin_s": 600}, {"max_pin_s": 0}, 0),
        ({"pin_s": 600}, {"max_pin_s": 0, "pin_s": 30}, 30),  # what it would have anyway
        ({"pin_s": 0}, {"pin_s": 30}, 0),
        ({"priority": "high"}, {}, 300),
        ({"priority": "high"}, {"pin_s": 30}, 300),
        ({"priority": "high", "pin_s": 10}, {}, 10),
        ({"priority": "high"}, {"max_pin_s": 0}, 0),
        ({}, {"priority": "high"}, 300),
        ({}, {"priority": "high", "pin_s": 30}, 30),
        ({"priority": "normal"}, {"priority": "high"}, 0),
        ({"priority": "low"}, {"pin_s": 30}, 0),
        ({}, {"priority": "low", "pin_s": 30}, 0),
        ({"priority": "low", "pin_s": 20}, {}, 20),  # what it has only used
    ):
        assert keeping(wish, **settings).holds == ((Hold(hold_s),) if hold_s else ()), (wish, settings)


def test_what_a_request_of_low_priority_makes_goes_first() -> None:
    assert keeping().cool_from_tokens is None
    assert keeping({"priority": "low"}).cool_from_tokens == 0
    assert keeping(priority="low").cool_from_tokens == 0
    assert keeping({"priority": "high"}, priority="low").cool_from_tokens is None


def test_the_shorter_time_holds_and_keeps_blocks_off_the_disks() -> None:
    assert keeping() == Keeping() == Keeping(Kept(on_disks=True, ttl_s=math.inf))
    assert keeping({"ttl_s": 60}).kept == Kept(on_disks=False, ttl_s=60)
    assert keeping({"ttl_s": 60}, ttl_s=30).kept.ttl_s == 30
    assert keeping({"ttl_s": 60}, ttl_s=90).kept.ttl_s == 60
    assert keeping({"ttl_s": 0}, ttl_s=90).kept.ttl_s == 90, "0 is no time, and not a longer one"
    assert not keeping(ttl_s=30).host_only, "it may load what others have stored on disks"


def test_blocks_go_to_the_tiers_that_engine_and_request_both_name() -> None:
    for wish, settings, on_disks in (
        ({}, {}, True),
        ({"tiers": ["disk", "host"]}, {}, True),
        ({"tiers": ["host"]}, {}, False),
        ({}, {"tiers": ["host"]}, False),
        ({"tiers": ["host", "disk"]}, {"tiers": ["host"]}, False),
    ):
        found = keeping(wish, **settings)
        assert (found.kept.on_disks, found.host_only) == (on_disks, not on_disks)
        assert (found.kept.retention is None) == on_disks


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"ttl": 7}, "kvtier.'ttl' is unknown and left out: there are store, load"),
        ({7: 7}, "kvtier.7 is unknown"),
        ({"store": "no"}, "kvtier.store 'no' is left out: write true or false"),
        ({"load": 0}, "kvtier.load 0 is left out"),
        ({"max_load_tokens": -1}, "kvtier.max_load_tokens -1 is left out: write a whole number"),
        ({"max_load_tokens": True}, "kvtier.max_load_tokens True is left out"),
        ({"store_tokens": ["all"]}, "kvtier.store_tokens ['all'] is left out"),
        ({"priority": "urgent"}, "kvtier.priority 'urgent' is left out: write one of low, normal, high"),
        ({"priority": ["low"]}, "kvtier.priority ['low'] is left out"),
        ({"pin_s": -1}, "kvtier.pin_s -1 is left out: write a number of seconds from 0 to 1e+09"),
        ({"pin_s": float("nan")}, "kvtier.pin_s nan is left out"),
        ({"ttl_s": 10**400}, "is left out: write a number of seconds"),
        ({"ttl_s": True}, "kvtier.ttl_s True is left out"),
        ({"ttl_s": "7"}, "kvtier.ttl_s '7' is left out"),
        ({"tiers": ["disk"]}, """kvtier.tiers ['disk'] is left out: write ["host", "disk"] or ["host"]"""),
        ({"tiers": "host"}, "kvtier.tiers 'host' is left out"),
        ({"tiers": ["host", 7]}, "kvtier.tiers ['host', 7] is left out"),
        ({"tiers": []}, "kvtier.tiers [] is left out"),
        ([1], "kvtier [1] is left out: write an object"),
        ("x" * 1_000, "…"),
    ],
)
def test_a_mistake_is_warned_of_once_and_left_out(
    wish: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    controls = Controls(ConnectorConfig(), log)
    request = SimpleNamespace(kv_transfer_params={"kvtier": wish}, num_prompt_tokens=100)
    with caplog.at_level(logging.WARNING, log.name):
        for _ in range(3):
            assert controls.of(request) == Control(True, True, None, None)
    [record] = caplog.records
    assert told in record.getMessage()
    assert len(record.getMessage()) < 300


def test_clients_cannot_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    controls = Controls(ConnectorConfig(), log)
    with caplog.at_level(logging.WARNING, log.name):
        for index in range(3 * WARNED_MAX):
            wish = {f"name {index}": 1, "store": False}
            request = SimpleNamespace(kv_transfer_params={"kvtier": wish}, num_prompt_tokens=100)
            assert not controls.of(request).store, "what is right holds beside what is wrong"
    assert len(caplog.records) == WARNED_MAX
