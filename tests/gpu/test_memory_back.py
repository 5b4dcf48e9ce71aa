"""Memory that an engine gives back, or leaves behind when it is killed, is free for others.

These look at what the whole GPU has in use: run them while nobody else uses it.
"""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest

from tests.gpu.conftest import Place, StartEngine, gpu_worker, places
from tests.gpu.parts.child import Child
from tests.gpu.parts.device import Device
from tests.gpu.parts.right import right, shuffled
from tests.support.daemon import DaemonHost, until

MIB = 1 << 20
WAIT_S = 30.0
SLACK_BYTES = 256 << 20
"""A real driver keeps a little of what it once took; a victim's cache is four times as large."""


@pytest.fixture
def fake_bandwidth() -> int:
    """So little that a kill falls among copies."""
    return 100 << 20


def memory_used(engine: Child) -> int:
    return int(engine.ask("used")["bytes"])


def test_an_engine_sleeps_gives_its_memory_back_and_wakes_with_other_memory(
    start_engine: StartEngine, family: str
) -> None:
    engine = start_engine()
    assert engine.ask("store", family=family, numbers=list(range(16)), ids=shuffled(16))["done"]
    for _ in range(2):
        slept = engine.ask("sleep")
        assert slept["released"]
        assert slept["freed"] > 0, "somebody still held the memory"
        assert slept["ready"], slept["why"]
        assert right(engine.ask("load", family=family, numbers=list(range(16)), ids=shuffled(16)), 16)


@pytest.mark.faults
@pytest.mark.parametrize("place", places(real=("driver", "chunks", "torch-caching")), indirect=True)
def test_an_engine_killed_among_its_copies_gives_all_its_memory_back(
    start_engine: StartEngine, host: DaemonHost, place: Place, family: str
) -> None:
    survivor = start_engine("survivor", kind="driver")
    blocks: dict[str, Any] = {"family": family, "numbers": list(range(32))}
    assert survivor.ask("store", ids=shuffled(32), **blocks)["done"]
    before = memory_used(survivor)
    mapped = gpu_worker(host).mapped_bytes
    slack = place.pick(SLACK_BYTES, 0)
    for turn in range(place.pick(3, 2)):
        victim = start_engine(f"victim-{turn}", num_blocks=place.pick(1_024, 64))
        assert memory_used(survivor) > before + slack
        victim.ask("churn", family=f"{family}-{turn}")
        time.sleep(random.uniform(0.05, 0.5))
        victim.kill()
        victim.close()
        until(lambda: memory_used(survivor) <= before + slack, "the dead engine's memory to be free")
        # A victim that is fast enough has filled the pool with its own.
        loaded = survivor.ask("load", ids=shuffled(32), **blocks)
        if loaded["hits"] < 32:
            assert survivor.ask("store", ids=shuffled(32), **blocks)["done"]
            loaded = survivor.ask("load", ids=shuffled(32), **blocks)
        assert right(loaded, 32)
        until(lambda: gpu_worker(host).mapped_bytes == mapped, "the daemon to know that it is unmapped")


@pytest.mark.parametrize("place", places(real=("driver",), fake=("driver",)), indirect=True)
def test_an_allocation_stays_as_long_as_another_process_has_it_open(place: Place, device: Device) -> None:
    """Its exporter may be killed: the memory goes when the last importer closes it."""
    n = 64 * MIB
    with Child("tests.gpu.children.owner") as owner:
        [handle] = owner.ask("legacy", bytes=n, count=1)["handles"]
        address = device.driver.ipc_open(bytes.fromhex(handle))
        content = device.read(address, n)
        owner.kill()
        owner.close()
    assert np.array_equal(device.read(address, n), content)
    used = device.used_bytes()
    device.driver.ipc_close(address)
    end = time.monotonic() + WAIT_S
    while used - device.used_bytes() < n:
        assert time.monotonic() < end, "the memory is still in use"
        time.sleep(0.01)
