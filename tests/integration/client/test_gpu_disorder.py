"""One engine on a GPU through anything: restarts, dead workers, sleep, revoked parts, late work. Every
byte of every load is checked, and so is that nothing else was touched."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable

import pytest
from kvtier import Client, Doorbell, Namespace, Outcome, Reason, Transfer

from tests.integration.client.conftest import MakeGpu
from tests.support.daemon import DaemonHost, until
from tests.support.fake_cuda import make_fake_cuda
from tests.support.gpu_client import GpuCache, options, ready
from tests.support.length import LONG, rounds
from tests.support.plain_client import BLOCKS, READY_S, TRANSFER_S, block_hashes

__all__ = ["make_fake_cuda"]
pytestmark = [pytest.mark.fake_gpu, pytest.mark.faults]

ROUNDS = rounds(30, 400)
BATCH = 8
INTERFERENCE = (
    Reason.CANCELLED,
    Reason.EPOCH_ENDED,
    Reason.INSTANCE_INCOMPLETE,
    Reason.NOT_ATTACHED,
    Reason.REVOKED,
    Reason.UNKNOWN_LEASE,
    Reason.WORKER_LOST,
)


class Engine:
    """A client, its cache, its stream, and what it knows to be where."""

    def __init__(self, host: DaemonHost, make_gpu: MakeGpu, namespace: Namespace, chunks: bool) -> None:
        self.host = host
        self.gpu = make_gpu(granularity=65_536)
        host.start()
        self.cache = GpuCache(self.gpu, chunks=chunks)
        self.source = GpuCache(self.gpu)
        self.stream = self.gpu.stream()
        self.client = ready(Client(**options(self.cache, host.socket, "one", namespace)))
        self.random = random.Random(f"{namespace.tenant}")
        self.step = 0
        self.families = 0
        self.stored: list[list[bytes]] = []
        self.loads = self.misses = self.kills = 0

    def blocks(self) -> list[int]:
        return self.random.sample(range(BLOCKS), BATCH)

    def compute(self, ids: list[int]) -> list[bytes]:
        """The stream brings new content into these blocks, later, and then rings. The caches start alike."""
        self.families += 1
        hashes = block_hashes(f"family {self.families}", range(BATCH))
        self.source.planes[:] = self.cache.planes
        for block, value in zip(ids, hashes, strict=True):
            self.source.fill(block, value)
        self.gpu.fake.delay(self.stream, self.random.choice([0.0, 0.001, 0.02]))
        size = self.cache.memory.size_bytes
        self.gpu.driver.copy_async(
            self.cache.planes.ctypes.data, self.source.planes.ctypes.data, size, self.stream
        )
        self.step += 1
        self.client.ring_on(self.stream, 0, self.step)
        return hashes

    def settle(self) -> None:
        """The engine itself waits for its stream before it goes on."""
        self.gpu.driver.stream_synchronize(self.stream)

    # --- what may happen ---

    def store(self) -> None:
        ids = self.blocks()
        hashes = self.compute(ids)
        transfer = self.client.store(hashes, ids, doorbell=Doorbell(0, self.step))
        self.interfere(transfer)
        outcome = transfer.wait(TRANSFER_S)
        until(lambda: transfer.fenced, "its blocks may be reused")
        self.settle()
        self.check_end(outcome)
        if outcome.done:
            self.stored.append(hashes)

    def load(self) -> None:
        if not self.stored:
            return
        hashes = self.random.choice(self.stored)
        self.cache.wipe()
        with self.client.lookup(hashes, lease=True, timeout_s=READY_S) as hit:
            if not hit.lease:
                self.misses += 1
                return
            ids = self.blocks()[: hit.hits]
            self.step += 1
            self.gpu.fake.delay(self.stream, self.random.choice([0.0, 0.01]))
            self.client.ring_on(self.stream, 0, self.step)
            transfer = self.client.load(hit, ids, doorbell=Doorbell(0, self.step))
            self.interfere(transfer)
            outcome = transfer.wait(TRANSFER_S)
            until(lambda: transfer.fenced, "its blocks may be reused")
            self.check_end(outcome)
        self.settle()
        planes = self.cache.planes
        for block in set(range(BLOCKS)) - set(ids):
            assert bool((planes[:, block] == 0x3F).all()), f"block {block} was not loaded to"
        if outcome.done:
            self.loads += 1
            for block, value in zip(ids, hashes, strict=False):
                assert self.cache.right(block, value), f"block {block} has wrong bytes"

    def check_end(self, outcome: Outcome) -> None:
        """What was done to it may have ended it; but no gate is ever forgotten, and no copy fails."""
        assert outcome.done or (outcome.error is not None and outcome.error.reason in INTERFERENCE), outcome

    def interfere(self, transfer: Transfer) -> None:
        chance = self.random.random()
        if chance < 0.15:
            transfer.revoke()
        elif chance < 0.3:
            self.disturb()

    def sleep(self) -> None:
        assert self.client.release_memory(READY_S), self.client.status
        self.cache.free()
        self.cache.allocate()
        self.cache.wipe()
        self.client.register_memory(self.cache.memory)

    def disturb(self) -> None:
        self.kills += 1
        self.random.choice([self.kill_worker, self.host.restart])()

    def kill_worker(self) -> None:
        for worker in self.host.status().workers:
            if worker.device != "cpu" and worker.state == "live":
                with contextlib.suppress(ProcessLookupError):  # killed before, and gone since it was named
                    os.kill(worker.pid, signal.SIGKILL)

    def run(self, rounds: int) -> None:
        actions: list[Callable[[], None]] = [self.store, self.load, self.sleep, self.disturb]
        for _ in range(rounds):
            self.random.choices(actions, [6, 6, 2, 1])[0]()
            if self.random.random() < 0.8:
                ready(self.client)

    def finish(self) -> None:
        ready(self.client)
        self.store()
        self.load()
        assert self.client.close()
        until(lambda: self.gpu.fake.open_imports() == [], "nothing of it is open any more")
        assert self.gpu.fake.refusals() == []


@pytest.mark.parametrize(
    "chunks", [pytest.param(False, id="allocation"), pytest.param(True, id="chunks", marks=pytest.mark.long)]
)
@pytest.mark.timeout(1_800 if LONG else 240)
def test_whatever_happens_no_byte_is_wrong_and_nothing_stays_open(
    idle_host: DaemonHost,
    make_gpu: MakeGpu,
    namespace: Namespace,
    chunks: bool,
    proved: Callable[[str], None],
) -> None:
    engine = Engine(idle_host, make_gpu, namespace, chunks)
    try:
        engine.run(ROUNDS)
        engine.finish()
    finally:
        engine.client.close()
    assert engine.loads > 0
    proved(f"a client on a GPU: {engine.kills} kills, {engine.loads} loads of {BATCH} blocks, no byte wrong")
