"""The order of copies between a GPU's KV cache and its mirror, where blocks are reused."""

from __future__ import annotations

import logging
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from kvtier import Group, PartRef, PartState, Plane
from kvtier.cuda import DeviceMemory
from kvtier_vllm.worker.mirroring import MirrorSharing
from kvtier_vllm.worker.parts import TrackedPart
from kvtier_vllm.worker.sharing import Landing

from tests.support.fake_cuda import FakeCuda
from tests.support.process import until
from tests.vllm.fake_gpu import FakeEngineGpu, Gate, alloc

pytestmark = [pytest.mark.vllm, pytest.mark.fake_gpu]

PAGE, BLOCKS = 4096, 4
LOAD, STORE = 0, 1
LAG_S = 0.3


class Daemon:
    """What a client tells of its daemon: which doorbells rang, what has become of parts."""

    def __init__(self) -> None:
        self.rung: list[tuple[int, int]] = []
        self.states: dict[int, PartState] = {}
        self.lock = threading.Lock()

    def ring(self, doorbell: int, value: int) -> None:
        with self.lock:
            self.rung.append((doorbell, value))

    def part_state(self, ref: PartRef) -> PartState:
        return self.states.get(ref.ticket, PartState.ARMED)

    def revoke(self, ref: PartRef) -> PartState:
        return self.states.setdefault(ref.ticket, PartState.REVOKED)


class Bench:
    """Four blocks of a page on a GPU, and their mirror."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake, self.gpu, self.daemon = fake, FakeEngineGpu(), Daemon()
        address = alloc(self.gpu, BLOCKS * PAGE)
        self.device = fake.view(address, BLOCKS * PAGE).reshape(BLOCKS, PAGE)
        plane = Plane(fragment_bytes=PAGE, base_offset=0, block_stride_bytes=PAGE)
        group = Group(block_tokens=1, num_blocks=BLOCKS, planes=(plane,))
        memory = DeviceMemory(address, BLOCKS * PAGE)
        self.sharing = MirrorSharing(memory, group, self.gpu, logging.getLogger("test"))
        self.memory = cast(Any, self.sharing.client_memory)
        self.mapping = mmap.mmap(self.memory.fileno(), BLOCKS * PAGE)
        self.mirror = np.frombuffer(self.mapping, np.uint8).reshape(BLOCKS, PAGE)
        """As the daemon maps it."""
        self.tickets = 0
        self.gate = Gate(fake, self.gpu)

    def part(self, direction: Any, *block_ids: int) -> TrackedPart:
        self.tickets += 1
        client: Any = self.daemon
        return TrackedPart(client, PartRef(1, self.tickets, 0, direction), block_ids, 0.0)

    def end(self, part: TrackedPart, state: PartState = PartState.DONE) -> None:
        """The daemon ends a part."""
        self.daemon.states[part.ref.ticket] = state

    def let_store(self, step: int, *parts: TrackedPart) -> None:
        client: Any = self.daemon
        self.sharing.let_store(client, step, parts)

    def let_load(self, step: int, *parts: TrackedPart) -> None:
        client: Any = self.daemon
        self.sharing.let_load(client, step, parts)

    def lag(self) -> None:
        self.fake.delay(self.gpu.stream(), LAG_S)

    def busy(self) -> None:
        """The stream has something to do, until `gate` is opened."""
        self.gate.shut()
        self.gate.wait(self.gpu.stream())

    def wait_rung(self, *expected: tuple[int, int]) -> None:
        until(lambda: len(self.daemon.rung) >= len(expected), f"{expected} have rung")
        assert self.daemon.rung == list(expected)

    def wait_landed(self, part: TrackedPart) -> Landing:
        until(lambda: self.sharing.landing(part) is not Landing.PENDING, "the load has landed")
        return self.sharing.landing(part)


@pytest.fixture
def bench(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name, value in fake_cuda.environment.items():
        monkeypatch.setenv(name, value)
    bench = Bench(fake_cuda)
    yield bench
    bench.gate.open()
    assert bench.sharing.close(10)
    del bench.mirror
    bench.mapping.close()


def test_a_store_starts_when_its_blocks_are_computed_and_in_the_mirror(bench: Bench) -> None:
    store = bench.part("store", 1, 3)
    bench.busy()
    bench.let_store(7, store)
    assert bench.daemon.rung == []
    bench.device[1], bench.device[3] = 11, 33  # what the stream was busy with
    bench.gate.open()
    bench.wait_rung((STORE, 7))
    assert (bench.mirror[1] == 11).all()
    assert (bench.mirror[3] == 33).all()
    assert not bench.mirror[2].any()


def test_a_load_reaches_the_engine_when_it_no_longer_writes_the_blocks(bench: Bench) -> None:
    load = bench.part("load", 2)
    bench.busy()
    bench.let_load(5, load)
    bench.wait_rung((LOAD, 5))  # the mirror is nobody's but the daemon's
    assert bench.memory.held_bytes == PAGE, "a load's blocks have memory before it may start"
    bench.mirror[2] = 22
    bench.end(load)
    assert bench.sharing.landing(load) is Landing.PENDING
    bench.device[2] = 99  # what the stream was busy with
    bench.gate.open()
    assert bench.wait_landed(load) is Landing.DONE
    assert (bench.device[2] == 22).all()


def test_a_load_into_a_block_that_was_about_to_be_stored_is_not_written_over(bench: Bench) -> None:
    store, load = bench.part("store", 1), bench.part("load", 1)
    bench.device[1] = 11
    bench.lag()
    bench.let_store(1, store)
    store.revoke()  # its request is preempted, and the block given to another
    bench.sharing.over(store)
    bench.let_load(2, load)
    bench.wait_rung((STORE, 1), (LOAD, 2))
    bench.mirror[1] = 55
    bench.end(load)
    assert bench.wait_landed(load) is Landing.DONE
    assert (bench.device[1] == 55).all()


def test_the_mirror_is_emptied_when_the_last_user_of_a_block_is_over(bench: Bench) -> None:
    one, two = bench.part("store", 0, 1), bench.part("store", 1, 2)
    bench.device[:] = 7
    bench.let_store(1, one, two)
    bench.wait_rung((STORE, 1))
    bench.end(one)
    bench.sharing.over(one)
    until(lambda: bench.memory.held_bytes == 2 * PAGE, "one block is emptied")
    assert (bench.mirror[1:3] == 7).all()
    bench.end(two)
    bench.sharing.over(two)
    until(lambda: bench.memory.held_bytes == 0, "all are")


def test_what_is_not_in_the_mirror_never_starts(bench: Bench) -> None:
    """A later doorbell lets everything before it go."""
    failed, good = bench.part("store", 0), bench.part("store", 1)
    bench.fake.arm("cuMemcpyBatchAsync_v2", 1, 2, os.getpid())
    bench.let_store(1, failed)
    bench.let_store(2, good)
    bench.wait_rung((STORE, 2))
    assert failed.state() is PartState.REVOKED
    assert good.state() is PartState.ARMED


def test_nothing_is_copied_while_the_engine_sleeps(bench: Bench) -> None:
    late, load = bench.part("store", 0), bench.part("load", 1)
    bench.let_load(1, load)
    bench.wait_rung((LOAD, 1))
    bench.lag()
    bench.let_store(1, late)
    assert bench.sharing.sleep(None, 10)
    assert bench.daemon.rung in ([(LOAD, 1)], [(LOAD, 1), (STORE, 1)])  # it may have run already
    copies = bench.fake.calls("cuMemcpyBatchAsync_v2")
    store = bench.part("store", 2)
    bench.let_store(2, store)
    assert store.state() is PartState.REVOKED
    bench.end(load)
    assert bench.wait_landed(load) is Landing.FAILED
    assert bench.fake.calls("cuMemcpyBatchAsync_v2") == copies
    bench.sharing.wake(None, 10)
    again = bench.part("store", 2)
    bench.let_store(3, again)
    until(lambda: (STORE, 3) in bench.daemon.rung, "stores go on")
