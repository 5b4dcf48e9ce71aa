"""vLLM's scheduler and the connector against a real daemon, in disorder: every KV byte that a step relies on
is checked, every request ends, every block comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from kvtier_vllm.scheduler.auditing import AuditVerdict

from tests.support.daemon import DaemonHost, until
from tests.support.length import repeats
from tests.vllm.mini_engine import MiniEngine, output_of
from tests.vllm.mini_rig import BLOCKS, SEEDS, Chaos, all_came_back, client, step_until, wait_stored
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_what_was_forgotten_is_loaded(make: Callable[..., MiniEngine]) -> None:
    engine = make()
    engine.add("first", prompt(100))
    engine.run()
    wait_stored(engine)
    engine.forget()
    engine.add("second", prompt(100))
    engine.run()
    assert (engine.cached["first"], engine.cached["second"]) == (0, 96)
    assert engine.finished["second"] == engine.finished["first"] == output_of(prompt(100), 8)
    all_came_back(engine)


def test_two_engines_share_blocks(make: Callable[..., MiniEngine]) -> None:
    one, two = make(salt="shared"), make(salt="shared")
    one.add("mine", prompt(100))
    one.run()
    wait_stored(one)
    two.add("yours", prompt(100))
    two.run()
    assert two.cached["yours"] == 96


def test_an_engine_waits_for_what_another_is_storing(
    make: Callable[..., MiniEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make(salt="in the making"), make(salt="in the making", pending_wait_s=60)
    matcher, storer = two.connector._scheduler._matcher, one.connector._scheduler._storer
    end_step = one.worker.wait_for_save

    def meanwhile() -> None:
        """One's step has computed and not ended; two is asked for the same."""
        if storer._stores:
            [store] = storer._stores.values()
            until(lambda: store.transfer.results is not None, "the daemon has accepted the store")
            two.add("yours", prompt(100))
            step_until(two, lambda: matcher.counters.polls > 1, "the other engine waits, and asks again")
            assert "yours" not in two.cached
        end_step()

    monkeypatch.setattr(one.worker, "wait_for_save", meanwhile)
    one.add("mine", prompt(100))
    step_until(one, lambda: bool(storer._stores), "it computes it all")
    two.run()
    assert two.cached["yours"] == 96
    assert two.finished["yours"] == output_of(prompt(100), 8)
    assert matcher.counters.waits == 1
    all_came_back(two)


def test_leases_are_given_back(make: Callable[..., MiniEngine], host: DaemonHost) -> None:
    engine = make()
    engine.add("first", prompt(200))
    engine.run()
    wait_stored(engine)
    engine.forget()
    # More than fits: some wait with a lease, and are aborted so.
    for index in range(8):
        engine.add(f"r{index}", prompt(200) + prompt(150, seed=index), max_tokens=60)
    for _ in range(5):
        engine.step()
    engine.abort(["r7", "r5", "r0"])
    all_came_back(engine)
    until(lambda: client(engine).status.leases == 0, "no lease is left")
    until(lambda: host.status().leases == 0, "the daemon knows it")


@pytest.mark.faults
@pytest.mark.parametrize("seed", repeats(SEEDS))
@pytest.mark.parametrize(
    ("ahead", "fault"),
    [
        pytest.param(False, "", id="step by step-quick copies"),
        pytest.param(False, "slow-copy:5", id="step by step-slow copies", marks=pytest.mark.long),
        pytest.param(True, "", id="a step ahead-quick copies", marks=pytest.mark.long),
        pytest.param(True, "slow-copy:5", id="a step ahead-slow copies"),
    ],
)
def test_disorder_costs_no_byte_no_block_and_no_request(
    make: Callable[..., MiniEngine],
    host: DaemonHost,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    fault: str,
    ahead: bool,
) -> None:
    """`ahead`: vLLM's asynchronous scheduling."""
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", fault)
    host.restart()
    changes = {"async_scheduling": ahead}
    engine = make(salt="disorder", load_start_deadline_s=0.2, audit_rate=0.3, changes=changes)
    chaos = Chaos(engine, host, seed)
    chaos.go_on(120)
    chaos.end()
    assert chaos.loaded
    assert not engine.connector._scheduler._audits.counters.mismatches


def test_what_comes_of_blocks_that_an_audit_refuted_is_not_cached(
    make: Callable[..., MiniEngine],
) -> None:
    """A request that had loaded some goes on; nobody hits what it computes, while it runs and afterwards."""
    engine = make(salt="refuted")
    engine.add("loaded", prompt(100), max_tokens=120)
    step_until(engine, lambda: "loaded" in engine.cached, "it runs")
    side = engine.connector._scheduler
    side._quarantine(AuditVerdict(False, 1.4, 0.2, 0, b"h" * 32, "layer 0"))
    for number in range(4):
        name = f"meanwhile {number}"
        engine.add(name, prompt(100), max_tokens=2)
        step_until(engine, partial(engine.finished.__contains__, name), "it ends")
        assert engine.cached[name] == 0
        assert "loaded" not in engine.finished
    engine.run()
    talk = prompt(100) + engine.finished["loaded"]
    engine.add("after", talk, max_tokens=2)
    engine.run()
    assert engine.cached["after"] == 0
    assert not side._tainted
    engine.add("again", talk, max_tokens=2)
    engine.run()
    assert engine.cached["again"] > 0, "its own cache works again"


BROKEN = [
    ("side", name)
    for name in ("match", "allocated", "plan_step", "results", "finished", "_store_full_blocks")
] + [("worker", name) for name in ("fence", "begin", "end", "poll", "report", "_load_over", "_revoke")]


@pytest.mark.parametrize(("half", "name"), BROKEN, ids=[f"{half}.{name}" for half, name in BROKEN])
def test_an_engine_survives_whatever_breaks_in_the_connector(
    make: Callable[..., MiniEngine],
    half: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The broken part raises once, with loads, stores and finished requests in flight."""
    engine = make(salt="broken", audit_rate=1.0)
    prompts = [prompt(100 + 20 * index, seed=index) for index in range(8)]
    for index, tokens in enumerate(prompts):
        engine.add(f"before{index}", tokens)
    engine.run()
    wait_stored(engine)
    engine.forget()
    target = engine.connector._scheduler if half == "side" else engine.worker._worker
    working = getattr(target, name)
    calls = 0

    def broken(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ZeroDivisionError("a mistake in the connector")
        return working(*arguments)

    monkeypatch.setattr(target, name, broken)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for index, tokens in enumerate(prompts):
        engine.add(f"after{index}", [*tokens, index], max_tokens=40)
    for _ in range(4):
        engine.step()
    engine.abort(["after1"])
    engine.run()
    if calls < 3 and name in ("_revoke", "_load_over"):
        pytest.skip("it was not called often enough")
    assert calls >= 3
    told = [record.getMessage() for record in caplog.records if "kvtier is off" in record.getMessage()]
    assert len(set(told)) == 1
    assert "a mistake in the connector" in told[0]
    for index, tokens in enumerate(prompts):
        if index != 1:
            assert engine.finished[f"after{index}"] == output_of([*tokens, index], 40)
    engine.add("later", prompt(90), 4)
    engine.run()
    assert engine.free_blocks == BLOCKS - 1
