"""Beside a prefill/decode connector in vLLM's MultiConnector: both load and store, each what is its own, and
what the other one fails to load is never stored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from kvtier_vllm.model.namespace import version_of

from tests.support.daemon import DaemonHost
from tests.vllm.mini_engine import TOKENS, MiniEngine, engine_config, output_of
from tests.vllm.mini_rig import all_came_back, client, wait_ready, wait_stored
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        version_of(vllm.__version__) < (0, 31),
        reason="this vLLM's MultiConnector passes no memory on, which the KV cache of a CPU needs",
    ),
]
__all__ = ["host", "make"]

POOL_BLOCKS = 64
LENGTH, BLOCKS = 6 * TOKENS + 5, 6
PEER = {
    "kv_connector": "PeerConnector",
    "kv_connector_module_path": "tests.vllm.peer_connector",
    "kv_role": "kv_both",
}


class TwoConnectors(MiniEngine):
    """Its model computes nonsense from what was not received."""

    @property
    def connector(self) -> Any:
        """Ours."""
        return next(one for one in self.scheduler.connector._connectors if hasattr(one, "_scheduler"))

    def spoilt(self, name: str) -> bool:
        """Whether this step's load of the peer fails for that request."""
        meta = self.worker._get_connector_metadata()
        parts = [part for part in meta.metadata if hasattr(part, "receives")]
        return any(one.request == name and one.fails for part in parts for one in part.receives)

    def _check(self, name: str, table: Any, digests: Any) -> None:
        self._nonsense = self.spoilt(name)
        if not self._nonsense:
            super()._check(name, table, digests)

    def _write(self, table: Any, digests: Any, first: int) -> None:
        super()._write(table, digests ^ digests if self._nonsense else digests, first)


@pytest.fixture(params=["peer first", "kvtier first"])
def both(
    request: pytest.FixtureRequest,
    host: DaemonHost,
    model: Path,
    patience: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., TwoConnectors]]:
    """Makes engines with two connectors, in either order."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    made: list[TwoConnectors] = []

    def engine(salt: str) -> TwoConnectors:
        ours = kv_transfer_config(host.socket, salt=salt, **patience)
        children = [PEER, ours] if request.param == "peer first" else [ours, PEER]
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": children},
        }
        made.append(TwoConnectors(engine_config(model, config), POOL_BLOCKS))
        wait_ready(made[-1])
        return made[-1]

    yield engine
    for one in made:
        one.close()


def compute(engine: MiniEngine, name: str, tokens: list[int], peer: dict[str, Any] | None = None) -> int:
    engine.add(name, tokens, max_tokens=24, kv_transfer_params={"peer": peer or {}})
    engine.run()
    wait_stored(engine)
    engine.step()
    assert engine.finished[name] == output_of(tokens, 24)
    assert engine.free_blocks == engine.blocks - 1
    assert not engine.connector._scheduler._requests
    return engine.cached[name]


def restored(make: Callable[..., MiniEngine], salt: str, tokens: list[int]) -> int:
    """What another engine gets, whose every step checks what it got."""
    engine = make(salt)
    engine.add("other", tokens)
    engine.run()
    assert engine.finished["other"] == output_of(tokens, 8)
    all_came_back(engine)
    return engine.cached["other"]


def test_what_is_computed_beside_a_peer_is_stored_and_restored(
    both: Callable[..., TwoConnectors], make: Callable[..., MiniEngine], request: pytest.FixtureRequest
) -> None:
    salt, tokens = request.node.name, prompt(LENGTH)
    engine = both(salt)
    assert compute(engine, "cold", tokens, {"sends": True}) == 0
    engine.forget()
    assert compute(engine, "again", tokens, {"sends": True}) == BLOCKS * TOKENS
    assert restored(make, salt, tokens) == BLOCKS * TOKENS


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_peer_loads_is_stored_too(
    both: Callable[..., TwoConnectors],
    make: Callable[..., MiniEngine],
    asynchronous: bool,
    request: pytest.FixtureRequest,
) -> None:
    salt, tokens = request.node.name, prompt(LENGTH, seed=1)
    engine = both(salt)
    wish = {"tokens": 4 * TOKENS, "asynchronous": asynchronous}
    assert compute(engine, "received", tokens, wish) == 4 * TOKENS
    assert restored(make, salt, tokens) == BLOCKS * TOKENS


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_load_of_the_peer_is_recomputed_and_never_stored(
    both: Callable[..., TwoConnectors],
    make: Callable[..., MiniEngine],
    asynchronous: bool,
    request: pytest.FixtureRequest,
) -> None:
    salt, tokens = request.node.name, prompt(LENGTH, seed=2)
    engine = both(salt)
    wish = {"tokens": 4 * TOKENS, "asynchronous": asynchronous, "fails": True, "sends": True}
    engine.add("received", tokens, max_tokens=24, kv_transfer_params={"peer": wish})
    while engine.scheduler.has_requests():
        engine.step()
        wait_stored(engine)  # whatever is stored is stored before the next step makes it good
    assert engine.finished["received"] == output_of(tokens, 24)
    wait_ready(engine)
    engine.forget()
    compute(engine, "again", tokens)  # what is loaded is checked; what was not stored is now
    assert restored(make, salt, tokens) == BLOCKS * TOKENS


def test_only_one_of_two_that_could_load_does(
    both: Callable[..., TwoConnectors], request: pytest.FixtureRequest
) -> None:
    engine, tokens = both(request.node.name), prompt(LENGTH, seed=3)
    compute(engine, "cold", tokens)
    engine.forget()
    loaded = compute(engine, "again", tokens, {"tokens": 2 * TOKENS})
    loads = engine.connector._scheduler.totals()["loads"]
    first = engine.scheduler.connector._connectors[0] is engine.connector
    assert (loaded, loads) == ((BLOCKS * TOKENS, 1) if first else (2 * TOKENS, 0))
    assert client(engine).status.leases == 0


@pytest.mark.parametrize("killed", [False, True])
def test_aborts_and_a_dead_daemon_leave_nothing_behind(
    both: Callable[..., TwoConnectors], host: DaemonHost, killed: bool, request: pytest.FixtureRequest
) -> None:
    engine = both(request.node.name)
    for round_ in range(4):
        names = [f"{round_}/{index}" for index in range(8)]
        for index, name in enumerate(names):
            wish = {"tokens": 2 * TOKENS * (index % 3), "asynchronous": index > 3, "sends": index % 2 == 0}
            engine.add(name, prompt(LENGTH, seed=10 + index), 40, {"peer": wish})
        for _ in range(1 + round_):
            engine.step()
        engine.abort(names[round_ % 2 :: 2])
        if killed and round_ == 1:
            host.kill9()
        try:
            engine.run()
        finally:
            if killed and round_ == 1:
                host.start()
        wait_ready(engine)
        engine.forget()
    assert engine.free_blocks == engine.blocks - 1
    assert not engine.connector._scheduler._requests


def test_its_statistics_pass_through_vllms_own_log(
    both: Callable[..., TwoConnectors], request: pytest.FixtureRequest
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    engine = both(request.node.name)
    compute(engine, "cold", prompt(LENGTH, seed=4))
    compute(engine, "last", prompt(3 * TOKENS, seed=5))
    logging, lines = KVConnectorLogging(engine.scheduler.vllm_config.kv_transfer_config), []
    for data in engine.connector_stats:
        logging.observe(dict(data))
    logging.log(lambda text, *values: lines.append(text % values))
    [line] = lines
    assert "KvtierConnector" in line
    assert "stored blocks" in line
