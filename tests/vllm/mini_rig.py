"""A daemon, engines around a model that only checks, and disorder for them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import DaemonHost, until
from tests.support.leaks import SHM, SHM_PREFIX, SOCKET_PREFIX
from tests.support.length import rounds
from tests.vllm.conftest import QUICK
from tests.vllm.mini_engine import TOKENS, MiniEngine, engine_config, output_of
from tests.vllm.rig import kv_transfer_config, prompt

BLOCKS = 48
SEEDS = range(rounds(4, 40))
MORE_ACTS = 5
"""So many times as long may a world go on that has loaded nothing yet."""


@pytest.fixture(scope="module")
def host() -> Iterator[DaemonHost]:
    """A daemon with a pool so small that it evicts."""
    run = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir="/tmp"))
    pool = Path(tempfile.mkdtemp(prefix=SHM_PREFIX, dir=SHM))
    host = DaemonHost(run, pool / "pool", pool__size="6MiB", **QUICK)
    host.start()
    yield host
    host.stop()
    shutil.rmtree(run)
    shutil.rmtree(pool)


@pytest.fixture
def make(
    host: DaemonHost, model: Path, patience: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., MiniEngine]]:
    """Makes engines, attached to the daemon, each in a namespace of its own unless `salt` says otherwise."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made: list[MiniEngine] = []

    def engine(salt: str | None = None, changes: dict[str, Any] | None = None, **extra: object) -> MiniEngine:
        options = patience | {"salt": salt or f"engine {id(made)}/{len(made)}"} | extra
        config = kv_transfer_config(host.socket, **options)
        made.append(MiniEngine(engine_config(model, config, **changes or {}), BLOCKS))
        wait_ready(made[-1])
        return made[-1]

    yield engine
    host.thaw()
    for one in made:
        one.close()


def client(engine: MiniEngine) -> Any:
    return engine.connector._scheduler.link.client


def wait_ready(engine: MiniEngine, host: DaemonHost | None = None) -> None:
    """`host`: to the daemon that runs now; after a restart it may take a while until the end of the one
    before is noticed."""
    nonce = None if host is None else host.status().boot_nonce

    def attached() -> bool:
        one = client(engine)
        return one is not None and one.ready and nonce in (None, one.status.boot_nonce)

    until(attached, "the engine is attached")


def step_until(engine: MiniEngine, condition: Callable[[], bool], what: str) -> None:
    def stepped() -> bool:
        engine.step()
        return condition()

    until(stepped, what)


def wait_stored(engine: MiniEngine) -> None:
    until(lambda: client(engine).status.transfers_active == 0, "all transfers have ended")


def all_came_back(engine: MiniEngine) -> None:
    """No request is left, nor a block that anybody holds, nor anything in the connector's books."""
    engine.run()
    wait_stored(engine)
    engine.step()  # what the daemon reported before the workers looked
    assert engine.free_blocks == engine.blocks - 1
    side, worker = engine.connector._scheduler, engine.worker._worker
    assert not side._requests
    assert not len(side._leaving)
    matcher = side._matcher
    assert [matcher._matches, matcher._since_s, matcher._waiting] == [{}, {}, set()]
    assert [side._ahead._unasked, side._ahead._prefetched] == [{}, set()]
    assert [worker._loads, worker._stores, worker._held] == [[], [], {}]
    assert [side._audits._open, side._audits._chosen, worker._audits._followed] == [{}, set(), {}]


class Chaos:
    """Random work, and random trouble for the daemon, from one seed."""

    def __init__(self, engine: MiniEngine, host: DaemonHost, seed: int) -> None:
        self.engine, self.host = engine, host
        self.random = random.Random(seed)
        self.expected: dict[str, list[int]] = {}
        self.serial = 0
        self.tag = f"s{seed}-"
        self.frozen = False

    @property
    def loaded(self) -> int:
        """Loads that were submitted."""
        return int(client(self.engine).status.counters.loads)

    def go_on(self, acts: int) -> None:
        """So many acts, and more of them until something was loaded: where a machine is so slow that its
        daemon is taken for silent most of the time, that may need some more."""
        for number in range(MORE_ACTS * acts):
            if number >= acts and self.loaded:
                break
            self.act()

    def act(self) -> None:
        """Something happens; then a few steps."""
        trouble = self.random.random()
        if trouble < 0.02:
            self._thaw()
            self.host.restart()
        elif trouble < 0.05:
            self._thaw()
            for worker in self.host.status().workers:
                with contextlib.suppress(ProcessLookupError):  # its daemon may be about to notice its end
                    os.kill(worker.pid, signal.SIGKILL)
        elif trouble < 0.09:
            self._thaw()
            self.host.freeze(workers=self.random.random() < 0.5)
            self.frozen = True
        elif trouble < 0.2:
            self._thaw()
            wait_ready(self.engine)
        elif trouble < 0.3:
            self._thaw()  # a copy that has started ends with its worker only
            self.engine.run()
            self.engine.forget()
        elif trouble < 0.33:
            self.engine.scheduler.reset_prefix_cache()  # refused while requests use blocks
        elif trouble < 0.43 and self.engine.scheduler.requests:
            self.engine.abort([self.random.choice(list(self.engine.scheduler.requests))])
        else:
            self._add()
        for _ in range(self.random.randrange(12)):
            self.engine.step()

    def end(self) -> None:
        """Everything comes to its end, and is right."""
        self._thaw()
        all_came_back(self.engine)
        for name, tokens in self.engine.finished.items():
            assert tokens == self.expected[name][: len(tokens)]

    def _thaw(self) -> None:
        if self.frozen:
            self.host.thaw()
            self.frozen = False

    def _add(self) -> None:
        family = self.random.randrange(4)
        tokens = prompt(self.random.choice([1, 5, 9]) * TOKENS + self.random.randrange(3), seed=family)
        tokens += prompt(self.random.randrange(120), seed=self.random.randrange(6))
        if not tokens:
            return
        count = self.random.randrange(1, 60)
        self.serial += 1
        name = f"{self.tag}{self.serial}"
        self.expected[name] = output_of(tokens, count)
        self.engine.add(name, tokens, count)


def compute(engine: MiniEngine, name: str, tokens: list[int], **request: Any) -> int:
    """Runs one request until its stores are over; returns the tokens that nobody computed for it."""
    max_tokens = request.get("max_tokens", 8)
    engine.add(name, tokens, **request)
    engine.run()
    wait_stored(engine)
    engine.step()
    assert engine.finished[name] == output_of(tokens, max_tokens)
    return engine.cached[name]


def held_blocks(engine: MiniEngine, tokens: list[int], **request: Any) -> int:
    """How many blocks of a prefix the daemon has for an engine that has nothing itself."""
    engine.forget()
    name, only_look = f"look {len(engine.finished)}", {"kvtier": {"store": False}}
    return compute(engine, name, tokens, kv_transfer_params=only_look, **request) // TOKENS


def hashes_of(engine: MiniEngine, tokens: list[int], **changes: Any) -> list[bytes]:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("hashes", tokens, SamplingParams(), None, block_hasher=engine._hasher, **changes)
    return list(request.block_hashes)
