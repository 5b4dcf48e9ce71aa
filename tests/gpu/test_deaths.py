"""A copy worker that dies among its copies: nothing lands after the fence, and another takes its place."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.gpu.conftest import Place, StartEngine, gpu_worker, places
from tests.gpu.parts.right import right, shuffled
from tests.support.daemon import DaemonHost
from tests.support.fake_cuda import FakeCuda


@pytest.fixture
def fake_bandwidth() -> int:
    """So little that a kill falls among copies."""
    return 100 << 20


@pytest.fixture
def pool_mib(place: Place) -> int:
    """An instance may lease a quarter of it: all of the engine's cache."""
    return place.pick(3074, 66)


@pytest.mark.faults
@pytest.mark.parametrize(
    "place", places(real=("driver", "chunks", "torch-caching"), fake=("driver",)), indirect=True
)
def test_a_copy_worker_killed_among_its_copies_is_replaced_and_nothing_lands_after_the_fence(
    start_engine: StartEngine, host: DaemonHost, place: Place, family: str, fake: FakeCuda | None
) -> None:
    count = place.pick(512, 64)  # half a gigabyte on a GPU: about 10 ms
    engine = start_engine(num_blocks=count)
    asked: dict[str, Any] = {
        "family": family,
        "numbers": list(range(count)),
        "ids": shuffled(count, of=count),
    }
    assert engine.ask("store", **asked)["done"]
    among = 0
    rounds = place.pick(4, 3)
    for number in range(rounds):
        worker = gpu_worker(host).pid
        if fake is not None and number == rounds - 1:
            fake.hang("cuEventSynchronize", 1, worker)  # however late the kill is, it falls among the copies
        assert engine.ask("begin_load", **asked)["hits"] == count
        os.kill(worker, signal.SIGKILL)
        outcome = engine.ask("outcome")
        assert outcome["fenced"], outcome["said"]
        assert outcome["changed"] == 0
        among += not outcome["done"]
        loaded = engine.ask("load", **asked)
        for _ in range(100):
            if loaded["hits"] == count and loaded["done"]:
                break
            engine.ask("wait_ready")
            loaded = engine.ask("load", **asked)
        assert right(loaded, count)
    assert among, "no kill fell among the copies"
