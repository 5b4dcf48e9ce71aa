"""A rank whose client is registered with the daemon before the thread that makes it has come back with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvtier import Client, Role
from kvtier_engine import link

from tests.support.daemon import DaemonHost
from tests.vllm.mini_engine import TOKENS, MiniEngine, engine_config, output_of
from tests.vllm.mini_rig import all_came_back, wait_ready, wait_stored
from tests.vllm.mini_rig import host as host
from tests.vllm.mini_rig import make as make
from tests.vllm.rig import kv_transfer_config, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
__all__ = ["host", "make"]

LATE_S = 1.0
"""Of the rank's client, after an engine has begun to compute; a step takes a millisecond."""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Ranks' clients come late, once this is set."""
    # An engine that waited for the client as it starts would wait in vain: no scheduler is there yet.
    monkeypatch.setattr(link.Link, "wait_ready", lambda self, timeout_s: False)
    come = threading.Event()

    def make_client(**options: Any) -> Client:
        client = Client(**options)
        if options["role"] is Role.RANK:
            assert client.wait_ready(60)
            assert come.wait(60)
        return client

    monkeypatch.setattr(link, "Client", make_client)
    return come


@pytest.mark.usefixtures("late", "unhurried")
def test_what_is_stored_and_loaded_meanwhile_is_right(
    make: Callable[..., MiniEngine], host: DaemonHost, model: Path, late: threading.Event
) -> None:
    """Blocks that the engine gives to others as soon as it believes that nobody reads or writes them any
    more: no copy may come after that."""
    late.set()
    first = make(salt="late")
    first.add("known", prompt(6 * TOKENS + 1, seed=1), max_tokens=1)
    first.run()
    wait_stored(first)
    late.clear()
    config = kv_transfer_config(host.socket, salt="late", load_start_deadline_s=60)
    engine = MiniEngine(engine_config(model, config), 24)
    try:
        wait_ready(engine)
        threading.Timer(LATE_S, late.set).start()
        engine.add("stored", prompt(6 * TOKENS + 1, seed=2), max_tokens=1)
        engine.add("known", prompt(6 * TOKENS + 1, seed=1), max_tokens=1)
        engine.run()
        assert late.is_set(), "a step that has parts waits for the client"
        assert engine.cached["known"] == 6 * TOKENS
        for number in range(6):  # more than the engine has blocks for: all of them are used anew
            engine.add(f"other{number}", prompt(6 * TOKENS + 1, seed=10 + number), max_tokens=1)
            engine.run()
        all_came_back(engine)
    finally:
        late.set()
        engine.close()
    first.forget()
    for seed in (2, 1, *range(10, 16)):
        first.add(f"again{seed}", prompt(6 * TOKENS + 1, seed=seed), max_tokens=4)
        first.run()
        assert first.cached[f"again{seed}"] == 6 * TOKENS
        assert first.finished[f"again{seed}"] == output_of(prompt(6 * TOKENS + 1, seed=seed), 4)
    all_came_back(first)
