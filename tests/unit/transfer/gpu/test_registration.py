"""The pool becomes reachable for the GPU, area by area, by one process at a time."""

import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from kvtier_kernels import PoolRecords
from kvtierd.core.ids import Slots
from kvtierd.memory import numa
from kvtierd.memory.host_pool import HostPool
from kvtierd.workers.channel.status import StatusPage, StatusWord, create_status_fd
from kvtierd.workers.copy.gpu import registration
from kvtierd.workers.copy.gpu.registration import PoolNotRegisteredError, PoolRegistration

from tests.unit.transfer.gpu.conftest import Gpu

pytestmark = pytest.mark.fake_gpu

MIB = 1 << 20
EXTENTS = 5
WHOLE = (2 + EXTENTS) * MIB


class Bench:
    def __init__(self, gpu: Gpu, area_bytes: int, lock_deadline_s: float = 30.0) -> None:
        self.pool = HostPool.open(None, (2 + EXTENTS) * MIB, MIB, lock_timeout_s=1)
        mapping = mmap.mmap(self.pool.fd, self.pool.array.nbytes)
        records = PoolRecords(np.frombuffer(mapping, np.uint8))
        fd = create_status_fd()
        self.status = StatusPage(fd)
        os.close(fd)
        self.registration = PoolRegistration(
            gpu.driver, mapping, self.pool.fd, records, self.status, lock_deadline_s, area_bytes
        )

    def ensure(self, slots: Slots) -> None:
        while self.registration.ensure_next(slots):
            pass

    def slot_of(self, extent: int) -> Slots:
        return self.pool.geometry.slots_of(extent, 5_000)[-1:]

    def close(self) -> None:
        self.pool.close()


@pytest.fixture
def bench(gpu: Gpu) -> Iterator[Bench]:
    bench = Bench(gpu, 2 * MIB)
    yield bench
    bench.close()


def test_areas_are_runs_of_whole_extents_and_leave_the_header_out(bench: Bench) -> None:
    assert bench.registration.areas == [(2 * MIB, 2 * MIB), (4 * MIB, 2 * MIB), (6 * MIB, MIB)]
    assert bench.registration.borders.tolist() == [2 * MIB, 4 * MIB, 6 * MIB]


def test_an_area_has_one_extent_at_least(gpu: Gpu) -> None:
    bench = Bench(gpu, 1)
    assert len(bench.registration.areas) == EXTENTS
    bench.close()


def test_what_a_lane_needs_is_registered_once(bench: Bench, gpu: Gpu) -> None:
    one, far = bench.slot_of(1), bench.slot_of(EXTENTS - 1)
    with pytest.raises(PoolNotRegisteredError):
        bench.registration.require(one)
    bench.ensure(np.concatenate([one, far, one]))
    bench.registration.require(np.concatenate([far, one]))
    bench.registration.require(bench.slot_of(0))
    assert bench.status.words.load(StatusWord.REGISTERED_BYTES) == 3 * MIB
    bench.ensure(one)
    bench.registration.register(bench.registration.areas[0])
    assert gpu.fake.calls("cuMemHostRegister_v2", os.getpid()) == 2
    with pytest.raises(PoolNotRegisteredError):
        bench.registration.require(bench.slot_of(2))


def test_what_takes_long_is_done_in_steps(bench: Bench, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages may have to come from far, all the more for an extent of a gigabyte."""
    mapped: list[tuple[int, int]] = []
    monkeypatch.setattr(registration, "POPULATE_BYTES", MIB)
    monkeypatch.setattr(registration, "populate", lambda pool, *piece: mapped.append(piece))
    slots = np.concatenate([bench.slot_of(0), bench.slot_of(EXTENTS - 1)])
    steps = []
    while bench.registration.ensure_next(slots):
        steps.append((len(mapped), gpu.fake.calls("cuMemHostRegister_v2", os.getpid())))
    assert steps == [(1, 0), (2, 0), (2, 1), (3, 1)]
    assert mapped == [(2 * MIB, MIB), (3 * MIB, MIB), (6 * MIB, MIB)]
    bench.registration.require(slots)


def test_slots_that_the_pool_has_not_are_left_to_others(bench: Bench, gpu: Gpu) -> None:
    bench.ensure(np.array([0, 1, 0xFFFF_FFFF], np.uint32))
    assert gpu.fake.calls("cuMemHostRegister_v2", os.getpid()) == 0


def test_the_background_gets_what_is_not_registered_when_it_comes_to_it(bench: Bench) -> None:
    areas = iter(bench.registration.nearest_first(None, 0, WHOLE))
    assert bench.registration.register(next(areas))
    bench.ensure(bench.slot_of(2))
    assert list(areas) == bench.registration.areas[2:]


def test_what_cannot_be_registered_is_named_and_tried_again(
    bench: Bench, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.fake.arm("cuMemHostRegister_v2", 0, 2, os.getpid())
    bad, good = bench.slot_of(2), bench.slot_of(0)
    for _ in range(3):
        bench.ensure(bad)
        with pytest.raises(PoolNotRegisteredError, match=r"area 1 .*OUT_OF_MEMORY"):
            bench.registration.require(bad)
    assert gpu.fake.calls("cuMemHostRegister_v2", os.getpid()) == 3
    assert caplog.text.count("cannot be registered") == 1  # not for each part that needs it
    assert bench.status.words.load(StatusWord.REGISTERED_BYTES) == 0
    gpu.fake.lift(os.getpid())
    bench.ensure(good)
    with pytest.raises(PoolNotRegisteredError, match=r"area 1 .*OUT_OF_MEMORY"):
        bench.registration.require(np.concatenate([good, bad]))
    bench.ensure(bad)
    bench.registration.require(np.concatenate([good, bad]))


def test_another_process_that_registers_is_waited_for_but_not_for_ever(gpu: Gpu) -> None:
    bench = Bench(gpu, 2 * MIB, lock_deadline_s=0.2)
    program = "import fcntl, sys; fcntl.lockf(int(sys.argv[1]), fcntl.LOCK_EX); print(1, flush=True); input()"
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(bench.pool.fd)],
        pass_fds=[bench.pool.fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with other:
        assert other.stdout is not None
        assert other.stdout.readline()
        bench.ensure(bench.slot_of(0))
        with pytest.raises(PoolNotRegisteredError, match="another GPU's worker"):
            bench.registration.require(bench.slot_of(0))
        assert not bench.registration.register(bench.registration.areas[0])
        other.kill()
    bench.ensure(bench.slot_of(0))
    bench.registration.require(bench.slot_of(0))
    bench.close()


def test_the_background_holds_up_no_lane_while_it_waits_for_others(bench: Bench, gpu: Gpu) -> None:
    """Nor does it give up: with eight GPUs somebody registers most of the time."""
    gpu.fake.hang("cuMemHostRegister_v2", 1, os.getpid())
    context = gpu.driver.retain_primary(0)

    def register() -> None:
        context.make_current()
        bench.registration.register(bench.registration.areas[0])

    slow = threading.Thread(target=register, daemon=True)
    slow.start()
    while gpu.fake.calls("cuMemHostRegister_v2", os.getpid()) == 0:
        time.sleep(0.001)
    assert not bench.registration.register(bench.registration.areas[1])
    gpu.fake.lift(os.getpid())
    slow.join(30)
    assert bench.registration.register(bench.registration.areas[1])
    bench.registration.require(np.concatenate([bench.slot_of(0), bench.slot_of(3)]))
    context.release()


def test_the_lock_of_the_pool_is_another(bench: Bench) -> None:
    """Registering must not give up, or take, the lock that says whose pool it is."""
    path = f"/proc/self/fd/{bench.pool.fd}"
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b')\n"
        "try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB); print('free')\n"
        "except OSError: print('held')"
    )

    def state() -> bytes:
        command = [sys.executable, "-c", program, path]
        return subprocess.run(
            command, check=True, capture_output=True, timeout=60, pass_fds=[bench.pool.fd]
        ).stdout.strip()

    before = state()
    bench.ensure(bench.slot_of(0))
    assert state() == before


def test_areas_on_the_gpus_own_memory_node_come_first(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    address, areas = bench.registration.address, bench.registration.areas
    nodes = {areas[0]: 1, areas[1]: 0, areas[2]: 1}

    def nodes_of_pages(addresses: list[int]) -> list[int | None]:
        offset = addresses[0] - address
        [node] = [node for (start, length), node in nodes.items() if start <= offset < start + length]
        return [None, *[node] * (len(addresses) - 1)]

    monkeypatch.setattr(numa, "nodes", lambda: [0, 1])
    monkeypatch.setattr(numa, "nodes_of_pages", nodes_of_pages)
    assert list(bench.registration.nearest_first(0, 0, WHOLE)) == [areas[1], areas[0], areas[2]]
    assert list(bench.registration.nearest_first(1, 0, WHOLE)) == [areas[0], areas[2], areas[1]]
    assert list(bench.registration.nearest_first(None, 0, WHOLE)) == areas
