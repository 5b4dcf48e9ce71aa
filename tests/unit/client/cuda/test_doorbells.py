"""Doorbells rung by streams: in order, after the work before them, into memory that stays."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from kvtier import KvtierError, Reason, SharedBuffer
from kvtier.cuda import DeviceMemory, doorbells, events
from kvtier.cuda.doorbells import GpuDoorbells
from kvtier_kernels import SharedWords

from tests.support.daemon import until
from tests.support.engine_gpu import EngineGpu
from tests.support.fake_cuda import environment_of
from tests.unit.client.cuda.conftest import MakeGpu

pytestmark = pytest.mark.fake_gpu

NOT_SUPPORTED, LAUNCH_FAILED = 801, 719
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that comes late, because its thread waits for the processor, writes words all the same."""
    monkeypatch.setattr(doorbells, "TEST_DEADLINE_S", PATIENCE_S)


class Work:
    """What a stream does until the test ends it; by itself it might end while the test waits for the
    processor."""

    def __init__(self, gpu: EngineGpu, stream: int) -> None:
        address = gpu.alloc(8)
        self._word = gpu.view(address, 8)
        self._word[:] = 0
        waits = gpu.fake.raw.cuStreamWaitValue64_v2
        assert waits(ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint64(1), 0) == 0

    def end(self) -> None:
        self._word[0] = 1


class Rung:
    """What the thread has rung, in order."""

    def __init__(self) -> None:
        self.all: list[tuple[int, int]] = []

    def __call__(self, doorbell: int, value: int) -> None:
        self.all.append((doorbell, value))


@pytest.fixture
def rung() -> Rung:
    return Rung()


@pytest.fixture
def bells(gpu: EngineGpu, rung: Rung) -> Iterator[GpuDoorbells]:
    made = DeviceMemory(gpu.alloc(4096), 4096).stream_doorbells(rung)
    yield made
    close(made)


def close(bells: GpuDoorbells) -> None:
    """And the thread is gone before its driver is."""
    bells.close()
    until(lambda: not any(one.name == "kvtier-events" for one in threading.enumerate()), "the thread ends")


@pytest.fixture
def page() -> Iterator[SharedBuffer]:
    with SharedBuffer.create(64) as buffer:
        yield buffer


def word(page: SharedBuffer, index: int = 0) -> int:
    return SharedWords(page.array, 8).load(index)


def exposed(bells: GpuDoorbells, page: SharedBuffer) -> int:
    address = bells.expose(page, 64)
    assert address is not None
    return address


def without_writes(gpu: EngineGpu) -> None:
    gpu.fake.arm("cuStreamWriteValue64_v2", 0, NOT_SUPPORTED, os.getpid())


# --- written by the stream ---


def test_a_stream_rings_after_the_work_before_and_nobody_waits(
    gpu: EngineGpu, bells: GpuDoorbells, page: SharedBuffer
) -> None:
    address, stream = exposed(bells, page), gpu.stream()
    assert bells.mode == "stream writes"
    work = Work(gpu, stream)
    bells.ring_on(stream, address + 8, 1, 7)
    assert word(page, 1) == 0
    work.end()
    until(lambda: word(page, 1) == 7, "the doorbell has rung")
    assert word(page) == 0


def test_streams_come_in_the_forms_that_engines_have_them(
    gpu: EngineGpu, bells: GpuDoorbells, page: SharedBuffer
) -> None:
    address, stream = exposed(bells, page), gpu.stream()
    forms = [
        stream,
        SimpleNamespace(cuda_stream=stream),
        SimpleNamespace(__cuda_stream__=lambda: (0, stream)),
    ]
    for value, form in enumerate(forms, 1):
        bells.ring_on(form, address, 0, value)
        until(lambda value=value: word(page) == value, "the doorbell has rung")
    with pytest.raises(KvtierError, match=r"torch\.cuda\.Stream"):
        bells.ring_on(object(), address, 0, 9)


def test_no_context_is_left_current_in_the_engines_thread(
    gpu: EngineGpu, bells: GpuDoorbells, page: SharedBuffer
) -> None:
    address, stream, found = exposed(bells, page), gpu.stream(), []

    def ring() -> None:
        bells.ring_on(stream, address, 0, 1)
        found.append(gpu.driver.current_context())

    ringing = threading.Thread(target=ring)
    ringing.start()
    ringing.join(60)
    assert found == [0]


def test_the_device_is_never_synchronised(gpu: EngineGpu, bells: GpuDoorbells, page: SharedBuffer) -> None:
    bells.ring_on(gpu.stream(), exposed(bells, page), 0, 1)
    waits = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize", "cuMemHostUnregister")
    assert [name for name in waits if name in gpu.fake.functions() and gpu.fake.calls(name)] == []


def test_a_page_that_is_closed_while_it_is_exposed_spoils_nothing(
    gpu: EngineGpu, bells: GpuDoorbells, page: SharedBuffer
) -> None:
    """A client is closed while its registration runs."""
    closed, answers = SharedBuffer.create(64), list[int | None]()
    gpu.fake.hang("cuStreamCreateWithPriority", 1, os.getpid())
    exposing = threading.Thread(target=lambda: answers.append(bells.expose(closed, 64)))
    exposing.start()
    until(lambda: gpu.fake.calls("cuStreamCreateWithPriority") > 0, "the test of doorbells is under way")
    closed.close()
    gpu.fake.lift(os.getpid())
    exposing.join(10)
    assert answers == [None]
    assert bells.mode == "stream writes"
    assert bells.expose(page, 64) is not None


def test_a_process_without_descriptors_has_no_page_for_the_moment(
    gpu: EngineGpu, bells: GpuDoorbells, page: SharedBuffer
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert bells.expose(page, 64) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    stream = gpu.stream()
    bells.ring_on(stream, exposed(bells, page), 0, 7)
    gpu.driver.stream_synchronize(stream)
    assert word(page) == 7


def test_the_pages_of_a_process_are_bounded(
    gpu: EngineGpu, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorbells, "PAGES_MAX", 3)
    bells = DeviceMemory(gpu.alloc(4096), 4096).stream_doorbells(rung)
    addresses = []
    for _ in range(3):  # one more was taken for the test of the writes
        with SharedBuffer.create(64) as buffer:
            addresses.append(bells.expose(buffer, 64))
    assert addresses[-1] is None
    assert None not in addresses[:-1]
    assert "3 registrations" in bells.mode
    bells.ring_on(gpu.stream(), None, 0, 5)
    until(lambda: rung.all == [(0, 5)], "the thread has rung")
    close(bells)


# --- by a thread, after an event ---


@pytest.mark.parametrize("refused", ["cuStreamWriteValue64_v2", "cuMemHostRegister_v2"])
def test_where_streams_cannot_write_a_thread_rings_after_the_work(
    gpu: EngineGpu, bells: GpuDoorbells, rung: Rung, page: SharedBuffer, refused: str
) -> None:
    gpu.fake.arm(refused, 0, NOT_SUPPORTED, os.getpid())
    assert bells.expose(page, 64) is None
    assert "CUDA_ERROR_NOT_SUPPORTED" in bells.mode
    stream = gpu.stream()
    work = Work(gpu, stream)
    bells.ring_on(stream, None, 3, 8)
    assert rung.all == []
    work.end()
    until(lambda: rung.all == [(3, 8)], "the thread has rung")


def test_a_write_that_never_arrives_is_found_out(make_gpu: MakeGpu, rung: Rung, page: SharedBuffer) -> None:
    gpu = make_gpu(memops="silent")
    bells = DeviceMemory(gpu.alloc(4096), 4096).stream_doorbells(rung)
    assert bells.expose(page, 64) is None
    assert "did not arrive" in bells.mode
    bells.ring_on(gpu.stream(), None, 3, 8)
    until(lambda: rung.all == [(3, 8)], "the thread has rung")
    close(bells)


def test_a_write_that_is_refused_once_becomes_an_event(
    gpu: EngineGpu, bells: GpuDoorbells, rung: Rung, page: SharedBuffer
) -> None:
    address = exposed(bells, page)
    gpu.fake.arm("cuStreamWriteValue64_v2", 1, NOT_SUPPORTED, os.getpid())
    bells.ring_on(gpu.stream(), address, 0, 4)
    until(lambda: rung.all == [(0, 4)], "the thread has rung")
    bells.ring_on(gpu.stream(), address, 0, 5)
    until(lambda: word(page) == 5, "the stream rings again")


def test_where_neither_works_the_caller_hears_it(gpu: EngineGpu, bells: GpuDoorbells) -> None:
    gpu.fake.arm("cuEventRecord", 1, NOT_SUPPORTED, os.getpid())
    with pytest.raises(KvtierError, match="cuEventRecord") as raised:
        bells.ring_on(gpu.stream(), None, 0, 1)
    assert raised.value.reason is Reason.DEVICE_UNAVAILABLE


def test_each_doorbell_rings_in_order_and_none_waits_for_another(
    gpu: EngineGpu, bells: GpuDoorbells, rung: Rung
) -> None:
    slow, fast = gpu.stream(), gpu.stream()
    values = range(1, 6)
    works = []
    for value in values:
        works.append(Work(gpu, slow))
        bells.ring_on(slow, None, 0, value)
        bells.ring_on(fast, None, 1, value)
    until(lambda: len(rung.all) == 5, "the fast ones have rung")
    for value, work in zip(values, works, strict=True):
        work.end()
        until(lambda value=value: len(rung.all) == 5 + value, "the next slow one has rung")
    assert rung.all == [(doorbell, value) for doorbell in (1, 0) for value in values]


def test_more_rings_than_may_wait_come_together_and_late_but_come(
    gpu: EngineGpu, bells: GpuDoorbells, rung: Rung, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RINGS_MAX", 4)
    stream = gpu.stream()
    work = Work(gpu, stream)
    for value in range(1, 8):
        bells.ring_on(stream, None, 0, value)
    gpu.fake.delay(stream, 0.15)
    bells.ring_on(stream, None, 0, 8)
    assert gpu.fake.calls("cuEventCreate", os.getpid()) == 4
    work.end()
    until(lambda: len(rung.all) == 4, "all have rung")
    assert rung.all == [(0, 1), (0, 2), (0, 3), (0, 8)]
    assert gpu.driver.stream_is_done(stream), "the last rang after everything that it stands for"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_replaced_aloud(gpu: EngineGpu, caplog: pytest.LogCaptureFixture) -> None:
    rung: list[int] = []

    def ring(doorbell: int, value: int) -> None:
        if value == 1:
            raise SystemExit
        rung.append(value)

    bells = DeviceMemory(gpu.alloc(4096), 4096).stream_doorbells(ring)
    stream = gpu.stream()
    bells.ring_on(stream, None, 0, 1)
    first = bells._events._thread
    assert first is not None
    first.join(PATIENCE_S)  # for a moment it is alive after it has left the list of threads
    assert not first.is_alive()
    bells.ring_on(stream, None, 0, 2)
    until(lambda: rung == [2], "another one rings")
    assert "has died" in caplog.text
    close(bells)


def test_a_ring_that_fails_does_not_stop_those_after_it(
    gpu: EngineGpu, caplog: pytest.LogCaptureFixture
) -> None:
    rung: list[int] = []

    def ring(doorbell: int, value: int) -> None:
        rung.append(value)
        if value == 1:
            raise ValueError("no")

    bells = DeviceMemory(gpu.alloc(4096), 4096).stream_doorbells(ring)
    for value in (1, 2):
        bells.ring_on(gpu.stream(), None, 0, value)
    until(lambda: rung == [1, 2], "both were rung")
    close(bells)
    assert "was not rung" in caplog.text


def test_when_the_context_is_lost_gates_stay_shut(
    gpu: EngineGpu, bells: GpuDoorbells, rung: Rung, caplog: pytest.LogCaptureFixture
) -> None:
    stream = gpu.stream()
    Work(gpu, stream)
    gpu.fake.arm("cuEventQuery", 1, LAUNCH_FAILED, os.getpid())
    bells.ring_on(stream, None, 0, 1)
    until(lambda: "are lost" in caplog.text, "it was noticed")
    with pytest.raises(KvtierError):
        bells.ring_on(stream, None, 0, 2)
    assert rung.all == []


def test_after_close_nothing_is_rung(gpu: EngineGpu, bells: GpuDoorbells, rung: Rung) -> None:
    stream = gpu.stream()
    work = Work(gpu, stream)
    bells.ring_on(stream, None, 0, 1)
    close(bells)
    bells.ring_on(stream, None, 0, 2)
    work.end()
    gpu.driver.stream_synchronize(stream)
    assert rung.all == []


# --- memory that stays mapped: the fake writes it as a GPU would, and dies if it is gone ---

PROGRAM = """
import os, sys, time
from kvtier import SharedBuffer
from kvtier.cuda import DeviceMemory, doorbells
from tests.support.fake_cuda import FakeCuda
from kvtier_kernels.cuda import load
import ctypes

driver = load()
context = driver.retain_primary(0)
context.make_current()
raw = ctypes.CDLL(driver.path)
raw.fake_cuda_delay.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
doorbells.TEST_DEADLINE_S = 60.0
bells = DeviceMemory(driver.alloc(4096), 4096).stream_doorbells(print)
page = SharedBuffer.create(64)
seen = os.dup(page.fileno())
address = bells.expose(page, 64)
stream = driver.stream_create()
gate = driver.alloc(8)
work = ctypes.c_uint64.from_address(gate)
work.value = 0
assert raw.cuStreamWaitValue64_v2(ctypes.c_void_p(stream), ctypes.c_uint64(gate), ctypes.c_uint64(1), 0) == 0
assert raw.fake_cuda_delay(stream, 200_000) == 0
bells.ring_on(stream, address, 0, 77)
bells.close()
page.close()
def word():
    return int.from_bytes(os.pread(seen, 8, 0), sys.byteorder)
assert word() == 0
"""


# Not before here, however long the program has waited for the processor, does the stream go on.
LANDED = "work.value = 1; driver.stream_synchronize(stream); assert word() == 77"


def run(gpu: EngineGpu, program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env=environment_of(gpu.fake),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    "program",
    [
        LANDED,
        f"import gc; del page, bells; gc.collect(); {LANDED}",
        f"child = os.fork()\nif not child: sys.exit(0)\nassert os.waitpid(child, 0)[1] == 0; {LANDED}",
        # The write lands after the interpreter has taken everything apart.
        "libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.usleep, ctypes.c_void_p(400_000), None)\n"
        "work.value = 1",
    ],
    ids=["closed", "collected", "after a fork", "at exit"],
)
def test_a_write_that_is_queued_lands_in_mapped_memory(gpu: EngineGpu, program: str) -> None:
    done = run(gpu, program)
    assert (done.returncode, done.stderr) == (0, "")


def test_pages_are_unmapped_by_nobody(gpu: EngineGpu, bells: GpuDoorbells) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("kept-by-test" in line for line in maps)

    buffer = SharedBuffer.create(64, "kept-by-test")
    assert mapped() == 1
    assert bells.expose(buffer, 64) is not None
    buffer.close()
    del buffer
    assert mapped() == 1
