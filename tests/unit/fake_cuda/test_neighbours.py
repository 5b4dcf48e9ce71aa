"""What one process, or one thread, does to another through the driver: turns on a link, locks, captures."""

import ctypes
import threading
import time
from collections.abc import Callable

import pytest

from tests.support.fake_cuda import FakeCuda
from tests.unit.fake_cuda.host import BYTES, Host
from tests.unit.fake_cuda.peer import Peer
from tests.unit.fake_cuda.raw import Raw
from tests.unit.fake_cuda.refusals import refused

MIB = 1 << 20
SMALL = 4096
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
UNSUPPORTED, INVALIDATED, CAPTURED_EVENT = 900, 901, 907
PAGE = 4096
FABRIC = 8
SLICE_S = 0.2
DEADLINE_S = 30.0


# --- a link


def small_copies(
    make_fake_cuda: Callable[..., FakeCuda],
    make_peer: Callable[..., Peer],
    chunk: int,
    flights: int,
    *,
    waits: bool = False,
) -> list[float]:
    """Seconds for which 4 KiB wait, several times, beside another process that copies without a pause. With
    `waits`, until one has waited for a turn."""
    fake = make_fake_cuda(bandwidth=64 * MIB, slice_us=round(SLICE_S * 1e6))
    raw, peer = Raw(fake.library).start(), make_peer(fake)
    host, address, stream = Host(raw, SMALL), raw.alloc(SMALL), raw.stream()
    peer.tell("copy_steadily", 4096 * MIB, chunk, flights)  # a minute and more
    time.sleep(SLICE_S)
    took: list[float] = []
    ends_s = time.monotonic() + DEADLINE_S  # the other process may not have begun yet
    while len(took) < 4 or (max(took) < SLICE_S / 2 and time.monotonic() < ends_s and waits):
        began_s = time.monotonic()
        raw.copy(address, host.address, SMALL, stream)
        raw.synchronize(stream)
        took.append(time.monotonic() - began_s)
        time.sleep(0.01)
    return took


def test_a_small_copy_waits_for_the_turn_of_a_process_that_leaves_no_gap(
    make_fake_cuda: Callable[..., FakeCuda], make_peer: Callable[..., Peer]
) -> None:
    assert max(small_copies(make_fake_cuda, make_peer, 8 * MIB, 2, waits=True)) > SLICE_S / 2


def test_a_small_copy_waits_for_a_small_chunk_only_of_a_process_that_leaves_gaps(
    make_fake_cuda: Callable[..., FakeCuda], make_peer: Callable[..., Peer]
) -> None:
    """A chunk takes 16 ms here. Whoever has nothing to copy loses its turn."""
    assert min(small_copies(make_fake_cuda, make_peer, MIB, 1)) < SLICE_S / 2


def test_making_a_context_stops_the_copies_of_others(
    make_fake_cuda: Callable[..., FakeCuda], make_peer: Callable[..., Peer]
) -> None:
    fake = make_fake_cuda(bandwidth=1 << 30, context_us=1)
    raw = Raw(fake.library).start()
    host, address, stream = Host(raw, SMALL), raw.alloc(SMALL), raw.stream()
    peer = make_peer(fake, start=False, context_us=400_000)
    peer.tell("start")
    slowest_s = 0.0
    while not peer.has_answered:
        began_s = time.monotonic()
        raw.copy(address, host.address, SMALL, stream)
        raw.synchronize(stream)
        slowest_s = max(slowest_s, time.monotonic() - began_s)
        time.sleep(0.01)
    peer.answer()
    assert slowest_s > 0.2


# --- registering


def test_two_registrations_share_no_page(raw: Raw) -> None:
    host = Host(raw, register=False)
    raw.register(host.address + 100, 8)
    refused(712, raw.register, host.address + 2_000, 8)
    raw.register(host.address + PAGE, PAGE)


def test_registering_takes_time_and_holds_up_the_calls_of_other_threads(
    make_fake_cuda: Callable[..., FakeCuda],
) -> None:
    fake = make_fake_cuda(register_us=100_000)
    raw = Raw(fake.library).start()
    host = Host(raw, 4 * MIB, register=False)
    started, registered = threading.Event(), threading.Event()
    slowest_s = [0.0]

    def other() -> None:
        thread = Raw(fake.library).start()
        while not registered.is_set():
            began_s = time.monotonic()
            thread.event()
            slowest_s[0] = max(slowest_s[0], time.monotonic() - began_s)
            started.set()
            time.sleep(0.005)

    beside = threading.Thread(target=other)
    beside.start()
    started.wait()
    began_s = time.monotonic()
    raw.register(host.address, 4 * MIB)
    assert time.monotonic() - began_s >= 0.4
    registered.set()
    beside.join()
    assert slowest_s[0] > 0.1


# --- fabric


@pytest.mark.parametrize("imex", [False, True])
def test_fabric_handles_need_imex(make_fake_cuda: Callable[..., FakeCuda], imex: bool) -> None:
    raw = Raw(make_fake_cuda(imex=int(imex), granularity=BYTES).library).start()
    if imex:
        raw.create(BYTES, handle_types=FABRIC)
    else:
        refused(800, lambda: raw.create(BYTES, handle_types=FABRIC))
        raw.create(BYTES)


# --- captures


def elsewhere(work: Callable[[], object]) -> None:
    """Runs it in another thread, and raises here what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def register_a_page(fake: FakeCuda, mode: int) -> None:
    """What the client's threads do in an engine, with this capture mode of their own."""
    raw = Raw(fake.library).start()
    raw.thread_mode(mode)
    Host(raw, PAGE)


@pytest.mark.parametrize(
    ("capture", "mode", "allowed"),
    [
        (GLOBAL, GLOBAL, False),
        (GLOBAL, THREAD_LOCAL, True),
        (GLOBAL, RELAXED, True),
        (THREAD_LOCAL, GLOBAL, True),
        (RELAXED, GLOBAL, True),
    ],
)
def test_a_global_capture_forbids_other_threads_to_register_unless_they_are_relaxed(
    fake_cuda: FakeCuda, raw: Raw, capture: int, mode: int, allowed: bool
) -> None:
    stream = raw.stream()
    raw.begin_capture(stream, capture)
    if allowed:
        elsewhere(lambda: register_a_page(fake_cuda, mode))
        raw.end_capture(stream)
    else:
        refused(UNSUPPORTED, elsewhere, lambda: register_a_page(fake_cuda, mode))
        refused(INVALIDATED, raw.end_capture, stream)
    raw.synchronize(stream)


def test_what_is_captured_does_not_run_and_cannot_be_waited_for(raw: Raw) -> None:
    host, address = Host(raw, SMALL), raw.alloc(SMALL)
    stream, event = raw.stream(), raw.event()
    raw.write(address, b"\1" * SMALL)
    raw.begin_capture(stream, RELAXED)
    raw.thread_mode(RELAXED)
    raw.copy(host.address, address, SMALL, stream)
    raw.record(event, stream)
    for call in ("cuEventQuery", "cuEventSynchronize"):
        assert raw.code(call, ctypes.c_void_p(event)) == CAPTURED_EVENT
    refused(UNSUPPORTED, raw.synchronize, stream)
    refused(INVALIDATED, raw.end_capture, stream)
    raw.synchronize(stream)
    assert not host.array.any()
    raw.record(event, stream)
    raw.call("cuEventSynchronize", ctypes.c_void_p(event))
