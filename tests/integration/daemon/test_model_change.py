"""Another model at a full pool: its blocks have another size, and the old one's extents become its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from kvtier import Client, Group, Namespace, Plane, SharedBuffer

from tests.integration.daemon.conftest import Start
from tests.support.process import DEADLINE_S, Daemon

BATCH = 16
POOL = {"pool__size": "34MiB", "pool__extent_size": "1MiB"}
CAPACITY = 32 << 20

pytestmark = pytest.mark.faults


class Model:
    """What an engine with this model stores: blocks of one size, their content following from their names."""

    def __init__(self, name: str, block_bytes: int) -> None:
        self.name, self.block_bytes = name, block_bytes

    def batches(self, total_bytes: int, life: int) -> list[list[bytes]]:
        """Names of so many bytes' worth of blocks, which no other life has stored."""
        count = total_bytes // (self.block_bytes * BATCH)
        return [
            [hashlib.sha256(f"{self.name}/{life}/{batch}/{i}".encode()).digest() for i in range(BATCH)]
            for batch in range(count)
        ]

    def content(self, block_hash: bytes) -> npt.NDArray[np.uint8]:
        seed = np.frombuffer(block_hash, np.uint64)
        return np.random.Generator(np.random.SFC64(seed)).integers(0, 256, self.block_bytes, np.uint8)


SMALL, LARGE = Model("small", 20_000), Model("large", 150_000)


class Engine:
    """A running engine of one model."""

    def __init__(self, model: Model, client: Client, blocks: npt.NDArray[np.uint8]) -> None:
        self._model, self._client, self._blocks = model, client, blocks

    def store(self, hashes: list[bytes]) -> None:
        for block, name in zip(self._blocks, hashes, strict=True):
            block[:] = self._model.content(name)
        outcome = self._client.store(hashes, range(BATCH)).wait(DEADLINE_S)
        assert outcome.done, outcome

    def found(self, batches: list[list[bytes]]) -> int:
        """How many blocks of these are there; each is loaded and compared, every byte."""
        total = 0
        for hashes in batches:
            self._blocks[:] = 0x5A
            hit = self._client.lookup(hashes, lease=True, timeout_s=DEADLINE_S)
            if hit.hits:
                assert self._client.load(hit, range(hit.hits)).wait(DEADLINE_S).done
            for block, name in zip(self._blocks[: hit.hits], hashes, strict=False):
                assert np.array_equal(block, self._model.content(name)), "a wrong byte"
            total += hit.hits
        return total


@contextmanager
def running(socket: Path, model: Model) -> Iterator[Engine]:
    memory = SharedBuffer.create(BATCH * model.block_bytes)
    plane = Plane(fragment_bytes=model.block_bytes, base_offset=0, block_stride_bytes=model.block_bytes)
    client = Client(
        instance=model.name,
        namespace=Namespace(model=model.name, kv_dtype="uint8", hash_scheme="sha256"),
        groups=[Group(block_tokens=16, num_blocks=BATCH, planes=(plane,))],
        memory=memory,
        socket=socket,
    )
    try:
        assert client.wait_ready(DEADLINE_S), client.status
        yield Engine(model, client, memory.array.reshape(BATCH, model.block_bytes))
    finally:
        client.close()
        memory.close()


def end(daemon: Daemon, how: str) -> None:
    if how == "kill -9":
        daemon.kill()
    else:
        assert daemon.stop() == 0


@pytest.mark.parametrize("how", ["kill -9", "SIGTERM"])
def test_the_extents_of_a_model_that_is_used_no_more_become_the_next_ones(start: Start, how: str) -> None:
    daemon = start(**POOL)
    old = SMALL.batches(2 * CAPACITY, life=0)
    with running(daemon.socket, SMALL) as engine:
        for hashes in old:
            engine.store(hashes)
        assert daemon.status().pool.extents_free == 0, "the pool is full of the first model"
        kept = engine.found(old)
        assert kept * SMALL.block_bytes > CAPACITY / 2
    end(daemon, how)

    daemon = start(**POOL)
    assert daemon.status().pool.recovered_blocks == kept
    new = LARGE.batches(2 * CAPACITY, life=0)
    with running(daemon.socket, LARGE) as engine:
        for hashes in new:
            engine.store(hashes)
        held = engine.found(new)
        assert held * LARGE.block_bytes > CAPACITY / 2, "the second model has the pool"
        assert engine.found(new[-3:]) == 3 * BATCH, "what came last is there"
    status = daemon.status()
    assert status.pool.extents_free == 0
    end(daemon, how)

    daemon = start(**POOL)
    left = daemon.status().pool.recovered_blocks - held
    assert left >= 0
    with running(daemon.socket, SMALL) as engine:
        assert engine.found(old) == left, "what is left of the first model is right"
        again = SMALL.batches(CAPACITY, life=1)
        for hashes in again:
            engine.store(hashes)
        assert engine.found(again) * SMALL.block_bytes > CAPACITY / 2, "and takes its room back"
    assert daemon.status().counters.integrity_failures == 0
    assert daemon.stop() == 0
