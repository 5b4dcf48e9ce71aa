"""Streams, events and values written by streams."""

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from kvtier_kernels.cuda import CudaError, Driver

from tests.unit.cuda.conftest import Gpu, random_bytes

MIB = 1 << 20
DEADLINE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def stream_and_event(driver: Driver, priority: int = 0) -> tuple[int, int]:
    return driver.stream_create(priority), driver.event_create()


class Pinned:
    """Registered host memory."""

    def __init__(self, gpu: Gpu, n: int) -> None:
        self._map = mmap.mmap(-1, n)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address: int = self.bytes.ctypes.data
        gpu.driver.host_register(self.address, n)


def test_a_copy_is_done_when_itsstream_and_event_say_so(gpu_of_version: Gpu) -> None:
    driver = gpu_of_version.driver
    least, greatest = driver.stream_priority_range()
    assert greatest <= least
    host, ptr = Pinned(gpu_of_version, 2 * MIB), driver.alloc(MIB)
    stream, event = stream_and_event(driver, greatest)
    assert driver.stream_is_done(stream)
    assert driver.event_is_done(event)
    host.bytes[:MIB] = random_bytes(MIB)
    driver.copy_async(ptr, host.address, MIB, stream)
    driver.copy_async(host.address + MIB, ptr, MIB, stream)
    driver.event_record(event, stream)
    driver.event_synchronize(event)
    assert driver.event_is_done(event)
    assert (host.bytes[:MIB] == host.bytes[MIB:]).all()
    driver.stream_synchronize(stream)
    assert driver.stream_is_done(stream)
    driver.event_destroy(event)
    driver.stream_destroy(stream)
    driver.free(ptr)
    driver.host_unregister(host.address)


def test_a_value_is_written_after_what_came_before_it(gpu_of_version: Gpu) -> None:
    driver = gpu_of_version.driver
    host, words = Pinned(gpu_of_version, MIB), Pinned(gpu_of_version, 4096)
    ptr, stream = driver.alloc(MIB), driver.stream_create()
    value = 0xFEDC_BA98_7654_3210
    host.bytes[:] = 7
    driver.copy_async(ptr, host.address, MIB, stream)
    driver.write_value(stream, driver.host_device_pointer(words.address) + 8, value)
    until(lambda: int(words.bytes[8:16].view(np.uint64)[0]) == value)
    back = np.zeros(MIB, np.uint8)
    driver.copy_to_host(back.ctypes.data, ptr, MIB)
    assert (back == 7).all()
    assert not words.bytes[:8].any()
    assert not words.bytes[16:].any()


def test_waiting_for_an_event_lets_other_threads_run(gpu: Gpu) -> None:
    """The event is done only when another thread of this interpreter has seen to it."""
    driver = gpu.driver
    gpu.fake.hang("cuEventSynchronize", 1, os.getpid())
    stream, event = stream_and_event(driver)
    driver.event_record(event, stream)
    waiting = threading.Timer(0.1, lambda: gpu.fake.lift(os.getpid()))
    waiting.start()
    driver.event_synchronize(event)
    waiting.join(DEADLINE_S)


def test_an_event_destroyed_twice_is_refused(gpu: Gpu) -> None:
    event = gpu.driver.event_create()
    gpu.driver.event_destroy(event)
    with pytest.raises(CudaError, match="cuEventDestroy_v2") as refused:
        gpu.driver.event_destroy(event)
    assert not refused.value.sticky


def test_a_failure_under_way_surfaces_at_the_query(gpu: Gpu) -> None:
    driver = gpu.driver
    stream, event = stream_and_event(driver)
    driver.event_record(event, stream)
    gpu.fail("cuEventQuery", 719)
    with pytest.raises(CudaError) as lost:
        driver.event_is_done(event)
    assert lost.value.sticky
    assert lost.value.name == "CUDA_ERROR_LAUNCH_FAILED"
    with pytest.raises(CudaError) as still:
        driver.stream_is_done(stream)
    assert still.value.sticky


def test_work_under_way_is_not_done_and_no_error(gpu_of_version: Gpu) -> None:
    driver = gpu_of_version.driver
    stream, event = stream_and_event(driver)
    gate = Pinned(gpu_of_version, 4096)
    # Work that ends when we say so, not by itself while this process waits for the processor.
    waits = gpu_of_version.fake.raw.cuStreamWaitValue64_v2
    assert waits(ctypes.c_void_p(stream), ctypes.c_uint64(gate.address), ctypes.c_uint64(1), 0) == 0
    driver.event_record(event, stream)
    assert not driver.stream_is_done(stream)
    assert not driver.event_is_done(event)
    gate.bytes[0] = 1
    driver.event_synchronize(event)
    assert driver.event_is_done(event)
    until(lambda: driver.stream_is_done(stream))
