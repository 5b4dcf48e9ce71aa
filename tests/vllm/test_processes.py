"""Engines as processes: several of one engine, and engines that are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemon import DaemonHost, until
from tests.vllm.engine import Engine, EngineOptions
from tests.vllm.rig import BLOCK, Rig, prompt
from tests.vllm.separate_processes import run_in_processes

pytestmark = [pytest.mark.vllm, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]


def caches_of(pid: int) -> set[str]:
    """KV caches of engines that a process maps: their inodes."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a worker that has ended meanwhile
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in lines if "memfd:kvtier-kv" in line}
    return set()


def mapped(host: DaemonHost) -> set[str]:
    """Those that the daemon's copy workers map."""
    return set().union(*(caches_of(worker.pid) for worker in host.status().workers))


def attached(host: DaemonHost) -> set[int]:
    """Processes of engines."""
    return {session.pid for instance in host.status().instances for session in instance.sessions}


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("while it starts", marks=pytest.mark.long),
        "while it computes",
        pytest.param("idle", marks=pytest.mark.long),
    ],
)
def test_a_killed_engine_leaves_nothing_behind(
    moment: str,
    options: EngineOptions,
    session_host: DaemonHost,
    tmp_path: Path,
    proved: Callable[[str], None],
    count: Counter[str],
) -> None:
    engine = Engine.launch(options, tmp_path / "log")
    try:
        if moment == "while it starts":
            until(lambda: engine.pid in attached(session_host), "the engine attaches")
        else:
            engine.wait_ready()
            rig = Rig(session_host, engine)
            rig.wait_ready()
            assert caches_of(engine.pid) & mapped(session_host)
        if moment == "while it computes":
            stored = session_host.status().counters.stored_blocks
            engine.send(
                "generate",
                prompts=[prompt(600, seed=70 + index) for index in range(6)],
                max_tokens=200,
                logprobs=1,
                engine_timeout_s=60,
            )
            until(lambda: session_host.status().counters.stored_blocks > stored, "blocks are stored")
        os.killpg(engine.pid, signal.SIGSTOP)  # it shares no more than this
        memory = caches_of(engine.pid)
    finally:
        engine.kill()
    count["engine_kills"] += 1
    killed_s = time.monotonic()
    until(
        # Of this engine alone: others may come and go, as those of the tests before.
        lambda: engine.pid not in attached(session_host) and not memory & mapped(session_host),
        "sessions and mappings of the killed engine are gone",
    )
    took_s = time.monotonic() - killed_s
    assert took_s < 10  # under a second on a quiet machine
    proved(f"The daemon let go of an engine killed {moment} within {took_s:.2f} s.")
    assert session_host.status().state == "serving"


def test_blocks_of_a_killed_engine_are_whole(rig: Rig) -> None:
    """What the engine killed while it computed had stored is right, as far as it got."""
    for index in range(6):
        tokens = prompt(600, seed=70 + index)
        restored = rig.generate(tokens)
        rig.engine.drain()
        rig.engine.reset_prefix_cache()
        with_rest = rig.generate(tokens)
        assert with_rest.tokens == restored.tokens


@pytest.mark.long  # those of test_parallel.py are as well
def test_scheduler_and_worker_in_processes_of_their_own(
    options: EngineOptions, session_host: DaemonHost, tmp_path: Path
) -> None:
    tokens = prompt(11 * BLOCK + 5, seed=80)
    results = run_in_processes(options, tokens, tmp_path / "log")
    assert [results[name]["cached"] for name in ("cold", "hit", "restored")] == [0, 11 * BLOCK, 11 * BLOCK]
    assert results["restored"]["tokens"] == results["hit"]["tokens"]
    assert results["restored"]["logprobs"] == results["hit"]["logprobs"]
