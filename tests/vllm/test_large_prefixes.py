"""Prefixes that are large for their pool: whatever part of it they fill, a new engine loads them, in parts if
need be; and what cannot be loaded in the end is computed. Every KV byte that a step relies on is checked."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.length import repeats, rounds
from tests.vllm.conftest import QUICK
from tests.vllm.mini_engine import TOKENS, MiniEngine, engine_config, output_of
from tests.vllm.mini_rig import Chaos, all_came_back, step_until, wait_ready, wait_stored
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

POOL_BLOCKS = 168
"""Of 12 KiB, in two extents. Leases may hold 159 of them, those of one engine alone 149."""
TRANSFER_BLOCKS = 60
ENGINE_BLOCKS = 400
SEEDS = range(rounds(2, 20))


@pytest.fixture(scope="module")
def host() -> Iterator[DaemonHost]:
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    settings: dict[str, Any] = {
        "pool__size": "4MiB",
        "limits__transfer_blocks_max": TRANSFER_BLOCKS,
    }
    host = DaemonHost(run, pool / "pool", **settings | QUICK)
    host.start()
    yield host
    host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture
def make(
    host: DaemonHost, model: Path, monkeypatch: pytest.MonkeyPatch, patience: dict[str, Any]
) -> Iterator[Callable[..., MiniEngine]]:
    """Makes engines attached to the daemon, all of one namespace in each test."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made: list[MiniEngine] = []

    def engine(ahead: bool = False, **extra: object) -> MiniEngine:
        settings = {"pending_wait_s": 120, "salt": f"large {id(made)}"}
        config = kv_transfer_config(host.socket, **settings | patience | extra)
        changes = {"max_model_len": 4096, "max_num_batched_tokens": 800, "async_scheduling": ahead}
        made.append(MiniEngine(engine_config(model, config, **changes), ENGINE_BLOCKS))
        wait_ready(made[-1], host)
        return made[-1]

    yield engine
    for one in made:
        one.close()


def story(blocks: int, seed: int = 0) -> list[int]:
    """A prompt of which so many blocks can be cached."""
    return prompt(blocks * TOKENS + 1, seed=seed)


def stored(make: Callable[..., MiniEngine], *stories: list[int]) -> None:
    """Another engine computes these prompts."""
    engine = make()
    for index, tokens in enumerate(stories):
        engine.add(f"first {index}", tokens)
        engine.run()
        wait_stored(engine)
    engine.close()


def load_of(engine: MiniEngine, name: str) -> Any:
    """The connector's, of a request that waits for it."""
    return engine.connector._scheduler._loading.get(name)


def counters(host: DaemonHost) -> Any:
    return host.status().counters


@pytest.mark.parametrize("blocks", [44, 85, 130, 149, 155, 168])
def test_a_prefix_is_loaded_whatever_part_of_its_pool_it_fills(
    make: Callable[..., MiniEngine], host: DaemonHost, blocks: int
) -> None:
    tokens = story(blocks, seed=blocks)
    stored(make, tokens)
    engine = make()
    engine.add("again", tokens)
    engine.run()
    assert engine.cached["again"] == blocks * TOKENS
    assert engine.finished["again"] == output_of(tokens, 8)
    all_came_back(engine)


def test_requests_that_together_want_more_than_the_pool_may_lease_all_load(
    make: Callable[..., MiniEngine], host: DaemonHost
) -> None:
    """Eight requests: all begin with the same 120 blocks, and go on with one or two of their own."""
    stories = [story(120)[:-1] + prompt((1 + index % 2) * TOKENS + 1, seed=50 + index) for index in range(8)]
    stored(make, *stories)
    engine = make()
    for index, tokens in enumerate(stories):
        engine.add(f"again {index}", tokens)
    engine.run()
    for index, tokens in enumerate(stories):
        assert engine.cached[f"again {index}"] == len(tokens) - 1
        assert engine.finished[f"again {index}"] == output_of(tokens, 8)
    all_came_back(engine)


def in_parts(make: Callable[..., MiniEngine]) -> tuple[MiniEngine, list[int]]:
    """An engine one of whose requests, "large", waits for the first of two parts of its load."""
    tokens = story(POOL_BLOCKS, seed=9)
    stored(make, tokens)
    engine = make()
    engine.add("large", tokens)
    step_until(engine, lambda: load_of(engine, "large") is not None, "the load has begun")
    assert load_of(engine, "large").rest is not None
    return engine, tokens


def test_what_has_gone_between_two_parts_is_computed(
    make: Callable[..., MiniEngine], host: DaemonHost
) -> None:
    engine, tokens = in_parts(make)
    rest = load_of(engine, "large").rest
    rest.hashes = [bytes(32)] * len(rest.hashes)  # nobody has that
    engine.run()
    assert 0 < engine.cached["large"] < POOL_BLOCKS * TOKENS
    assert engine.finished["large"] == output_of(tokens, 8)
    all_came_back(engine)


def test_a_daemon_that_dies_between_two_parts_costs_no_request(
    make: Callable[..., MiniEngine], host: DaemonHost
) -> None:
    engine, tokens = in_parts(make)
    host.restart()
    engine.run()
    assert engine.finished["large"] == output_of(tokens, 8)
    all_came_back(engine)


def test_a_request_that_is_aborted_between_two_parts_leaves_nothing(
    make: Callable[..., MiniEngine], host: DaemonHost
) -> None:
    engine, _ = in_parts(make)
    engine.abort(["large"])
    engine.run()
    all_came_back(engine)
    until(lambda: host.status().leases == 0, "no lease is left")


def test_a_reset_between_two_parts_costs_no_request(
    make: Callable[..., MiniEngine], host: DaemonHost
) -> None:
    engine, tokens = in_parts(make)
    engine.connector.reset_cache()
    engine.run()
    assert engine.finished["large"] == output_of(tokens, 8)
    all_came_back(engine)


def test_an_engine_that_fails_on_failed_loads_is_promised_only_what_is_leased(
    make: Callable[..., MiniEngine], host: DaemonHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = story(POOL_BLOCKS, seed=11)
    stored(make, tokens)
    engine = make()
    engine.connector._scheduler._matcher.in_parts = False
    engine.add("again", tokens)
    engine.run()
    assert POOL_BLOCKS // 2 * TOKENS < engine.cached["again"] < POOL_BLOCKS * TOKENS
    assert counters(host).missed_lease_limit > 0
    assert engine.finished["again"] == output_of(tokens, 8)


def test_of_a_prefix_that_is_larger_than_its_pool_the_head_is_kept(
    make: Callable[..., MiniEngine], host: DaemonHost
) -> None:
    """Stored step by step, its end would push out its beginning, and nothing of it could be used."""
    tokens = story(POOL_BLOCKS + 26, seed=12)
    stored(make, tokens)
    engine = make()
    engine.add("again", tokens)
    engine.run()
    assert engine.cached["again"] >= POOL_BLOCKS * TOKENS * 3 // 4
    assert engine.finished["again"] == output_of(tokens, 8)


class LargePrompts(Chaos):
    """Of three families, each of which fills much of the pool, or more than all of it."""

    def _add(self) -> None:
        blocks = self.random.choice([40, 100, 150, POOL_BLOCKS, POOL_BLOCKS + 20])
        tokens = prompt(blocks * TOKENS, seed=self.random.randrange(3))
        tokens += prompt(1 + self.random.randrange(40), seed=self.random.randrange(4))
        count = self.random.randrange(1, 20)
        self.serial += 1
        name = f"{self.tag}{self.serial}"
        self.expected[name] = output_of(tokens, count)
        self.engine.add(name, tokens, count)


@pytest.mark.faults
@pytest.mark.parametrize("seed", repeats(SEEDS))
def test_disorder_in_a_pool_of_a_few_prefixes_costs_no_byte_no_block_and_no_request(
    make: Callable[..., MiniEngine], host: DaemonHost, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("KVTIER_TEST_WORKER_FAULT", "slow-copy:5" if seed % 2 else "")
    host.restart()
    engine = make(ahead=seed % 4 > 1, load_start_deadline_s=0.2, pending_wait_s=0.5)
    chaos = LargePrompts(engine, host, seed)
    chaos.go_on(40)
    chaos.end()
    assert chaos.loaded
    monkeypatch.delenv("KVTIER_TEST_WORKER_FAULT")
    host.restart()
