"""vLLM's scheduler, short of blocks while stores of a finished request still read some: it waits for them a
moment, and no longer, before it preempts a request that runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import vllm
from kvtier_vllm.model.namespace import version_of
from kvtier_vllm.scheduler import holding

from tests.support.daemon import DaemonHost
from tests.vllm.mini_engine import TOKENS, MiniEngine, output_of
from tests.vllm.mini_rig import BLOCKS, all_came_back
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import PATIENT_S, prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(version_of(vllm.__version__) < (0, 30), reason="this vLLM does not ask"),
]
__all__ = ["host", "make"]

LARGE, SMALL, LONG = 20, 11, 12 * TOKENS - 1
"""Blocks of the prompts, and what is sampled: two small requests fit as soon as the large one's are back."""
assert LARGE + 2 * SMALL <= BLOCKS - 1 < LARGE + 2 * (SMALL + LONG // TOKENS)
assert 2 * (SMALL + LONG // TOKENS + 1) <= BLOCKS - 1


def short_of_blocks(engine: MiniEngine, host: DaemonHost) -> None:
    """Two requests run that cannot both go on, and what they need is read by a store that does not move."""
    host.freeze_workers()
    engine.add("large", prompt(LARGE * TOKENS), max_tokens=1)
    for index in range(2):
        engine.add(f"small{index}", prompt(SMALL * TOKENS, seed=1 + index), max_tokens=LONG)
    for _ in range(LONG):
        engine.step()
        if engine.finished.get("large") and engine.free_blocks < 2:
            break
    assert engine.free_blocks < 2
    assert engine.connector._scheduler._storer.holds, "no store held its blocks"


def right(engine: MiniEngine) -> None:
    engine.run()
    for index in range(2):
        assert engine.finished[f"small{index}"] == output_of(prompt(SMALL * TOKENS, seed=1 + index), LONG)
    all_came_back(engine)


def test_a_request_waits_for_blocks_that_are_about_to_come_back(
    make: Callable[..., MiniEngine], host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "SOON_S", PATIENT_S)
    engine = make()
    short_of_blocks(engine, host)
    for _ in range(3 * TOKENS):
        engine.step()
    assert not engine.preemptions
    host.thaw()
    right(engine)
    assert not engine.preemptions


def test_a_request_does_not_wait_for_long(
    make: Callable[..., MiniEngine], host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "SOON_S", 0.05)
    engine = make()
    short_of_blocks(engine, host)
    for _ in range(2_000):
        engine.step()
        if engine.preemptions:
            break
    assert engine.preemptions, "a request waits for a copy that does not move"
    host.thaw()
    right(engine)


def test_blocks_that_others_use_as_well_do_not_come_back(make: Callable[..., MiniEngine]) -> None:
    engine = make()
    side = engine.connector._scheduler
    pool, holds = engine.scheduler.kv_cache_manager.block_pool, side._storer.holds
    taken = pool.get_new_blocks(2)
    ids = [block.block_id for block in taken]
    holds.hold(1, ids)
    assert not engine.connector.has_pending_block_frees()
    assert not holds.are_all
    holds.hold(2, ids[1:])
    pool.free_blocks(taken[1:])
    assert engine.connector.has_pending_block_frees()
    assert not holds.are_all
    pool.free_blocks(taken[:1])
    assert holds.are_all
    holds.release(2)
    assert holds.are_all
    holds.release(1)
    assert not engine.connector.has_pending_block_frees()
    assert not holds.are_all
    assert engine.free_blocks == BLOCKS - 1
