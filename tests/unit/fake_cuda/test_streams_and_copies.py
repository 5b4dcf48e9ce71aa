"""Order and completion, the three ways to copy, and what a real device would not put up with."""

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest

from tests.support.fake_cuda import FakeCuda
from tests.support.process import until
from tests.unit.fake_cuda.host import BYTES, Host
from tests.unit.fake_cuda.raw import ANY, DURING_CALL, STREAM, Copy2D, Raw
from tests.unit.fake_cuda.refusals import refused

HALF = BYTES // 2
LONG_S = 30.0
"""A forward pass that outlasts the test; closing the fake ends it."""


@pytest.fixture
def host(raw: Raw) -> Host:
    return Host(raw)


def wait_value(raw: Raw, stream: int, address: int, value: int) -> None:
    handle, at, least = ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint64(value)
    raw.call("cuStreamWaitValue64_v2", handle, at, least, 0)


# --- order


def test_a_copy_happens_when_the_stream_gets_to_it(fake_cuda: FakeCuda, raw: Raw, host: Host):
    """What is read before the event says so is old."""
    address = raw.alloc(BYTES)
    host.array[:] = 1
    fake_cuda.view(address, BYTES)[:] = 2
    gate = np.zeros(1, np.uint64)
    raw.register(gate.ctypes.data, 8)
    stream, event = raw.stream(), raw.event()
    wait_value(raw, stream, gate.ctypes.data, 5)
    raw.copy(host.address, address, BYTES, stream)
    raw.record(event, stream)
    assert not raw.is_done(event)
    assert raw.code("cuStreamQuery", ctypes.c_void_p(stream)) == 600
    assert (host.array == 1).all()
    fake_cuda.view(address, BYTES)[:] = 3
    gate[0] = 5
    raw.call("cuEventSynchronize", ctypes.c_void_p(event))
    assert (host.array == 3).all()
    assert raw.code("cuStreamQuery", ctypes.c_void_p(stream)) == 0


def test_an_event_says_what_was_submitted_before_it_and_nothing_else(raw: Raw, host: Host):
    stream, early, late = raw.stream(), raw.event(), raw.event()
    assert raw.is_done(late), "an event never recorded counts as complete"
    raw.record(early, stream)
    raw.delay(stream, LONG_S)
    raw.record(late, stream)
    raw.call("cuEventSynchronize", ctypes.c_void_p(early))
    assert not raw.is_done(late)


def test_streams_go_on_independently_and_wait_where_told(raw: Raw, fake_cuda: FakeCuda):
    address = raw.alloc(BYTES)
    first, second, third = raw.stream(), raw.stream(), raw.stream()
    event = raw.event()
    raw.delay(first, LONG_S)
    raw.record(event, first)
    raw.call("cuStreamWaitEvent", ctypes.c_void_p(second), ctypes.c_void_p(event), 0)
    fill(raw, address, 7, second)
    fill(raw, address + HALF, 8, third)
    raw.synchronize(third)
    assert fake_cuda.view(address, BYTES)[HALF] == 8
    assert raw.code("cuStreamQuery", ctypes.c_void_p(second)) == 600
    assert fake_cuda.view(address, BYTES)[0] == 0


def fill(raw: Raw, address: int, value: int, stream: int) -> None:
    size, handle = ctypes.c_size_t(4096), ctypes.c_void_p(stream)
    raw.call("cuMemsetD8Async", ctypes.c_uint64(address), ctypes.c_ubyte(value), size, handle)


def test_a_word_is_written_after_the_work_before_it(raw: Raw, fake_cuda: FakeCuda, host: Host):
    address, stream = raw.alloc(BYTES), raw.stream()
    word = host.array[:8].view(np.uint64)
    fill(raw, address, 9, stream)
    raw.write_value(stream, host.address, 1 << 40)
    until(lambda: word[0] == 1 << 40, "the word is written")
    assert fake_cuda.view(address, 1)[0] == 9
    refused(1, raw.write_value, stream, host.address + 4, 1)
    refused(1, raw.write_value, stream, host.address + BYTES, 1)


@pytest.mark.parametrize("memops", ["none", "silent"])
def test_words_may_be_refused_or_never_written(make_fake_cuda: Callable[..., FakeCuda], memops: str):
    raw = Raw(make_fake_cuda(memops=memops).library).start()
    host, stream = Host(raw), raw.stream()
    if memops == "none":
        refused(801, raw.write_value, stream, host.address, 1)
    else:
        raw.write_value(stream, host.address, 1)
        raw.synchronize(stream)
        assert host.array[0] == 0


def test_a_destroyed_stream_finishes_and_is_a_stream_no_more(raw: Raw, fake_cuda: FakeCuda):
    address, stream = raw.alloc(BYTES), raw.stream()
    raw.delay(stream, 0.01)
    fill(raw, address, 4, stream)
    raw.call("cuStreamDestroy_v2", ctypes.c_void_p(stream))
    refused(400, raw.synchronize, stream)
    until(lambda: fake_cuda.view(address, 1)[0] == 4, "it has finished")


def test_freeing_waits_for_the_work_on_it(raw: Raw, host: Host):
    address, stream = raw.alloc(BYTES), raw.stream()
    raw.delay(stream, 0.02)
    raw.copy(host.address, address, BYTES, stream)
    raw.free(address)
    assert raw.code("cuStreamQuery", ctypes.c_void_p(stream)) in (0, 600)
    raw.synchronize(stream)
    refused(1, raw.free, address)


def test_functions_of_the_host_run_in_order(raw: Raw, fake_cuda: FakeCuda):
    address, stream = raw.alloc(BYTES), raw.stream()
    seen: list[int] = []

    def look(_: int) -> None:
        seen.append(int(fake_cuda.view(address, 1)[0]))

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(look)
    for value in (1, 2):
        fill(raw, address, value, stream)
        raw.call("cuLaunchHostFunc", ctypes.c_void_p(stream), function, None)
    raw.synchronize(stream)
    assert seen == [1, 2]


def test_the_latency_of_a_stream_can_be_set(make_fake_cuda: Callable[..., FakeCuda]):
    fake = make_fake_cuda(latency_us=30_000_000)
    raw = Raw(fake.library).start()
    host, address, stream = Host(raw), raw.alloc(BYTES), raw.stream()
    host.array[:] = 1
    raw.copy(address, host.address, BYTES, stream)
    assert fake.view(address, 1)[0] == 0


# --- copies

Way = Callable[[Raw, list[tuple[int, int, int]], int], None]


def by_batch(raw: Raw, copies: list[tuple[int, int, int]], stream: int) -> None:
    assert raw.batch(copies, STREAM, stream) == 0


def by_old_batch(raw: Raw, copies: list[tuple[int, int, int]], stream: int) -> None:
    assert raw.batch(copies, STREAM, stream, old=True) == 0


def by_loop(raw: Raw, copies: list[tuple[int, int, int]], stream: int) -> None:
    for copy in copies:
        raw.copy(*copy, stream)


@pytest.mark.parametrize("way", [by_batch, by_old_batch, by_loop])
@pytest.mark.parametrize("eager", [0, 1])
def test_every_way_moves_exactly_what_it_is_told(
    make_fake_cuda: Callable[..., FakeCuda], way: Way, eager: int
):
    fake = make_fake_cuda(eager=eager)
    raw = Raw(fake.library).start()
    host, back = Host(raw), Host(raw)
    address, stream = raw.alloc(BYTES), raw.stream()
    content = host.random(1)
    order = np.random.default_rng(2).permutation(BYTES // 4096)
    pages = [(address + 4096 * int(to), host.address + 4096 * at, 4096) for at, to in enumerate(order)]
    way(raw, pages, stream)
    way(raw, [(back.address, address, HALF)], stream)
    raw.synchronize(stream)
    expected = np.empty((BYTES // 4096, 4096), np.uint8)
    expected[order] = content.reshape(-1, 4096)
    assert (fake.view(address, BYTES) == expected.reshape(-1)).all()
    assert (back.array[:HALF] == expected.reshape(-1)[:HALF]).all()
    assert not back.array[HALF:].any()


def test_rows_are_copied_by_pitch(raw: Raw, fake_cuda: FakeCuda, host: Host):
    address, stream = raw.alloc(BYTES), raw.stream()
    content = host.random(3)
    raw.call("cuMemcpy2DAsync_v2", ctypes.byref(rows(address, host.address, 1000)), ctypes.c_void_p(stream))
    raw.synchronize(stream)
    device = fake_cuda.view(address, 4096 * 16).reshape(16, 4096)
    assert (device[:, :1000] == content[: 1024 * 16].reshape(16, 1024)[:, :1000]).all()
    assert not device[:, 1000:].any()


def rows(address: int, host: int, width: int, height: int = 16) -> Copy2D:
    return Copy2D(
        source_type=1,
        source_host=host,
        source_pitch=1024,
        destination_type=2,
        destination_device=address,
        destination_pitch=4096,
        width=width,
        height=height,
    )


def test_rows_wider_than_their_pitch_or_out_of_memory_are_refused(raw: Raw, host: Host):
    address, stream = raw.alloc(BYTES), raw.stream()
    wide, long = rows(address, host.address, 1025), rows(address, host.address, 1000, 257)
    for wrong in (wide, long, rows(address, 8, 1)):
        assert raw.code("cuMemcpy2DAsync_v2", ctypes.byref(wrong), ctypes.c_void_p(stream)) == 1


def test_an_eager_driver_reads_sources_of_any_order_during_the_call(make_fake_cuda: Callable[..., FakeCuda]):
    """And those in stream order when their turn comes, so a store that says ANY is caught."""
    fake = make_fake_cuda(eager=1)
    raw = Raw(fake.library).start()
    host, address, stream = Host(raw), raw.alloc(BYTES), raw.stream()
    gate = host.array[-8:].view(np.uint64)
    wait_value(raw, stream, gate.ctypes.data, 1)
    view = fake.view(address, BYTES)
    for index, order in enumerate((STREAM, DURING_CALL, ANY)):
        assert raw.batch([(host.address + index, address, 1)], order, stream) == 0
    view[0] = 5
    gate[0] = 1
    raw.synchronize(stream)
    assert host.array[:3].tolist() == [5, 0, 0]


def test_a_throttled_copy_can_be_seen_half_done(make_fake_cuda: Callable[..., FakeCuda]):
    # A quarter of a second until the first piece, and 15 more until the last: time enough to look between.
    size = 16 * BYTES
    fake = make_fake_cuda(bandwidth=BYTES)
    raw = Raw(fake.library).start()
    host, address, stream = Host(raw, size), raw.alloc(size), raw.stream()
    host.array[:] = 1
    raw.copy(address, host.address, size, stream)
    view = fake.view(address, size)
    until(lambda: view[0] == 1, "the first piece has arrived")
    assert view[-1] == 0
    assert raw.code("cuStreamQuery", ctypes.c_void_p(stream)) == 600


# --- refusals


def test_asynchronous_copies_need_registered_host_memory(raw: Raw, fake_cuda: FakeCuda):
    host, address, stream = Host(raw, register=False), raw.alloc(BYTES), raw.stream()
    refused(1, raw.copy, address, host.address, BYTES, stream)
    assert raw.batch([(address, host.address, 8)], ANY, stream) == 1
    assert "neither device memory nor registered" in fake_cuda.refusals()[-1]
    raw.write(address, b"synchronous ones do not")


def test_a_copy_may_not_span_two_registrations(raw: Raw, fake_cuda: FakeCuda):
    host, address, stream = Host(raw, register=False), raw.alloc(BYTES), raw.stream()
    raw.register(host.address, HALF)
    raw.register(host.address + HALF, HALF)
    refused(1, raw.copy, address, host.address + HALF - 1, 2, stream)
    assert "spans two host registrations" in fake_cuda.refusals()[-1]
    raw.copy(address, host.address + HALF, 2, stream)
    raw.copy(address, host.address + HALF - 2, 2, stream)


def test_host_memory_is_registered_once_and_must_exist(raw: Raw, host: Host):
    refused(712, raw.register, host.address, BYTES)
    refused(712, raw.register, host.address + HALF, HALF)
    refused(1, raw.register, 4096, 4096)
    raw.unregister(host.address)
    refused(713, raw.unregister, host.address)
    raw.register(host.address, BYTES)
    refused(713, raw.unregister, host.address + HALF)


@pytest.mark.parametrize("offset", [-1, 1, BYTES])
def test_copies_stay_inside_their_allocation(raw: Raw, host: Host, offset: int):
    address, stream = raw.alloc(BYTES), raw.stream()
    raw.alloc(BYTES)
    refused(1, raw.copy, address + offset, host.address, BYTES, stream)
    refused(1, raw.copy, host.address, address + offset, BYTES, stream)


def test_freed_memory_is_no_device_memory(raw: Raw, host: Host):
    address, stream = raw.alloc(BYTES), raw.stream()
    raw.free(address)
    refused(1, raw.copy, address, host.address, BYTES, stream)


def test_batches_refuse_the_null_stream_too_many_and_unknown_orders(raw: Raw, host: Host):
    address, stream = raw.alloc(BYTES), raw.stream()
    one = [(address, host.address, 8)]
    assert raw.batch(one, ANY, 0) == 1
    assert raw.batch(one, 0, stream) == 1
    assert raw.batch(one * 4097, ANY, stream) == 1
    assert raw.batch(one * 4096, ANY, stream) == 0
    assert raw.batch([*one, (address, host.address, BYTES + 1)], ANY, stream) == 1
    assert raw.batch([], ANY, stream) == 1


def test_unregistering_under_a_copy_loses_the_context(raw: Raw, host: Host):
    address, stream = raw.alloc(BYTES), raw.stream()
    raw.delay(stream, LONG_S)
    raw.copy(address, host.address, BYTES, stream)
    refused(700, raw.unregister, host.address)
    refused(700, raw.synchronize, stream)


# --- contexts


def test_calls_need_a_context_in_their_thread(raw: Raw):
    codes: list[int] = []

    def elsewhere() -> None:
        codes.append(raw.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1)))
        codes.append(raw.code("cuCtxPopCurrent_v2", None))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert codes == [201, 201]


def test_the_last_release_ends_everything_in_the_context(raw: Raw, fake_cuda: FakeCuda, host: Host):
    raw.alloc(BYTES)
    stream = raw.stream()
    raw.delay(stream, LONG_S)
    assert fake_cuda.hbm_used(contexts=True) > BYTES
    raw.call("cuDevicePrimaryCtxRelease_v2", 0)
    assert fake_cuda.hbm_used(contexts=True) == 0
    assert raw.code("cuMemAlloc_v2", ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(1)) == 709
    assert raw.code("cuDevicePrimaryCtxRelease_v2", 0) == 201
