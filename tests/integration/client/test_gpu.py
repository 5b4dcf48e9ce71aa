"""Clients whose memory is on a GPU, with a real daemon and its copy worker, on the fake driver."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kvtier.aio
import pytest
from kvtier import Client, ClientState, Doorbell, Namespace, Outcome, Reason, Transfer
from kvtier.cuda import MirrorMemory
from kvtier_kernels.cuda import CudaError

from tests.integration.client.conftest import MakeGpu
from tests.support.daemon import DaemonHost, until
from tests.support.engine_gpu import EngineGpu
from tests.support.fake_cuda import make_fake_cuda
from tests.support.gpu_client import GpuCache, options, ready
from tests.support.plain_client import READY_S, TRANSFER_S, block_hashes

__all__ = ["make_fake_cuda"]
pytestmark = pytest.mark.fake_gpu

HASHES = block_hashes("gpu", range(12))
IDS = range(len(HASHES))
WORK_S = 0.2
"""Of the engine's stream: far longer than a copy takes."""


@pytest.fixture
def gpu(make_gpu: MakeGpu) -> EngineGpu:
    """With chunks so small that a cache has several."""
    return make_gpu(granularity=65_536)


@pytest.fixture
def gpu_host(gpu: EngineGpu, idle_host: DaemonHost) -> DaemonHost:
    """A running daemon on the same machine."""
    idle_host.start()
    return idle_host


@pytest.fixture(params=[False, True], ids=["allocation", "chunks"])
def cache(request: pytest.FixtureRequest, gpu: EngineGpu) -> GpuCache:
    return GpuCache(gpu, chunks=request.param)


@pytest.fixture
def client(gpu_host: DaemonHost, cache: GpuCache, namespace: Namespace) -> Iterator[Client]:
    with Client(**options(cache, gpu_host.socket, "one", namespace)) as made:
        yield ready(made)


def store(client: Client, cache: GpuCache) -> Outcome:
    for index, value in enumerate(HASHES):
        cache.fill(index, value)
    return client.store(HASHES, IDS).wait(TRANSFER_S)


def load(client: Client, cache: GpuCache) -> None:
    """Loads everything and checks every byte."""
    cache.wipe()
    with client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
        assert hit.hits == len(HASHES), hit
        outcome = client.load(hit, IDS).wait(TRANSFER_S)
    assert outcome.done, outcome
    cache.check(HASHES)


def began_late(transfer: Transfer, since_s: float) -> bool:
    """Whether it does not end before the work of the stream, which was given some after `since_s`. Only where
    this test itself came late may it have ended."""
    fenced = transfer.fenced
    return not fenced or time.monotonic() - since_s >= WORK_S


def test_what_is_stored_from_a_gpu_is_loaded_back_byte_by_byte(
    gpu: EngineGpu, client: Client, cache: GpuCache
) -> None:
    assert store(client, cache).done
    load(client, cache)
    assert client.status.stream_doorbells == "stream writes"
    assert gpu.fake.refusals() == []


def test_an_engine_that_captures_a_graph_does_not_notice(
    gpu: EngineGpu, gpu_host: DaemonHost, cache: GpuCache, namespace: Namespace
) -> None:
    """A global capture forbids every thread of the process what allocates, registers or waits, unless that
    thread has said that it knows: one such call, and the engine has lost its graph."""
    captured, stream, busy = gpu.stream(), gpu.stream(), ctypes.c_int()
    gpu.fake.raw.cuStreamBeginCapture_v2(ctypes.c_void_p(captured), 0)
    with Client(**options(cache, gpu_host.socket, "one", namespace)) as client:
        ready(client)
        for index, value in enumerate(HASHES):
            cache.fill(index, value)
        transfer = client.store(HASHES, IDS, doorbell=Doorbell(0, 1))
        client.ring_on(stream, 0, 1)
        assert transfer.wait(TRANSFER_S).done
        load(client, cache)
        gpu.fake.raw.cuStreamIsCapturing(ctypes.c_void_p(captured), ctypes.byref(busy))
        assert busy.value == 1, "and 2 if it was broken"
    assert gpu.fake.raw.cuStreamEndCapture(ctypes.c_void_p(captured), None) == 0


def test_a_store_waits_for_the_work_that_the_stream_holds(
    gpu: EngineGpu, client: Client, cache: GpuCache
) -> None:
    """The bytes that the blocks shall have are written by the stream itself, late."""
    source = GpuCache(gpu)
    for index, value in enumerate(HASHES):
        source.fill(index, value)
    cache.wipe()
    stream = gpu.stream()
    transfer = client.store(HASHES, IDS, doorbell=Doorbell(0, 1))
    until(lambda: transfer.results is not None, "it was accepted")
    since_s = time.monotonic()
    gpu.fake.delay(stream, WORK_S)
    gpu.driver.copy_async(
        cache.planes.ctypes.data, source.planes.ctypes.data, source.memory.size_bytes, stream
    )
    client.ring_on(stream, 0, 1)
    assert began_late(transfer, since_s)
    assert transfer.wait(TRANSFER_S).done
    load(client, cache)


def test_a_load_does_not_touch_blocks_that_the_stream_still_writes(
    gpu: EngineGpu, client: Client, cache: GpuCache
) -> None:
    assert store(client, cache).done
    garbage = GpuCache(gpu)
    garbage.wipe()
    stream = gpu.stream()
    with client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
        since_s = time.monotonic()
        gpu.fake.delay(stream, WORK_S)
        gpu.driver.copy_async(
            cache.planes.ctypes.data, garbage.planes.ctypes.data, garbage.memory.size_bytes, stream
        )
        client.ring_on(stream, 3, 9)
        transfer = client.load(hit, IDS, doorbell=Doorbell(3, 9))
        assert began_late(transfer, since_s)
        assert transfer.wait(TRANSFER_S).done
    cache.check(HASHES)


def test_a_doorbell_rung_before_there_is_a_daemon_lets_a_later_part_start(
    gpu: EngineGpu, idle_host: DaemonHost, namespace: Namespace
) -> None:
    cache = GpuCache(gpu)
    stream = gpu.stream()
    with Client(**options(cache, idle_host.socket, "one", namespace)) as client:
        client.ring_on(stream, 0, 4)
        gpu.fake.delay(stream, WORK_S)
        client.ring_on(stream, 0, 5)
        gpu.fake.delay(stream, 10 * WORK_S)
        client.ring_on(stream, 0, 6)
        idle_host.start()
        ready(client)
        for index, value in enumerate(HASHES):
            cache.fill(index, value)
        for step, part in ((4, slice(0, 4)), (5, slice(4, 8)), (6, slice(8, 12))):
            transfer = client.store(HASHES[part], list(IDS)[part], doorbell=Doorbell(0, step))
            assert transfer.wait(TRANSFER_S).done
        load(client, cache)


def test_a_write_queued_before_the_daemon_was_restarted_opens_its_gate_afterwards(
    gpu: EngineGpu, gpu_host: DaemonHost, client: Client, cache: GpuCache
) -> None:
    stream = gpu.stream()
    since_s = time.monotonic()
    gpu.fake.delay(stream, 15 * WORK_S)
    client.ring_on(stream, 0, 1)
    gpu_host.restart()
    until(lambda: client.status.counters.registrations >= 2, "it is registered again")
    ready(client)
    for index, value in enumerate(HASHES):
        cache.fill(index, value)
    transfer = client.store(HASHES, IDS, doorbell=Doorbell(0, 1))
    assert transfer.wait(TRANSFER_S).done
    assert time.monotonic() - since_s >= 15 * WORK_S, "not before the stream was there"
    load(client, cache)


def test_after_a_restart_of_the_daemon_memory_is_exported_again_and_the_cache_is_warm(
    gpu: EngineGpu, gpu_host: DaemonHost, client: Client, cache: GpuCache
) -> None:
    assert store(client, cache).done
    exports = "cuIpcGetMemHandle", "cuMemExportToShareableHandle"
    before = sum(gpu.fake.calls(name, os.getpid()) for name in exports)
    gpu_host.restart()
    until(lambda: client.status.counters.registrations >= 2, "it is registered again")
    ready(client)
    assert sum(gpu.fake.calls(name, os.getpid()) for name in exports) > before
    load(client, cache)


def test_when_the_copy_worker_dies_memory_is_registered_with_the_next_one(
    gpu: EngineGpu, gpu_host: DaemonHost, client: Client, cache: GpuCache
) -> None:
    assert store(client, cache).done
    [worker] = [worker for worker in gpu_host.status().workers if worker.device == cache.memory.device]
    os.kill(worker.pid, 9)
    until(lambda: client.status.counters.registrations >= 2, "it is registered again")
    ready(client)
    load(client, cache)


# --- sleep and wake ---


def test_memory_is_given_back_freed_and_taken_again_with_the_same_handle(
    gpu: EngineGpu, gpu_host: DaemonHost, client: Client, cache: GpuCache
) -> None:
    assert store(client, cache).done
    for _ in range(3):
        assert client.release_memory(READY_S)
        assert gpu.fake.open_imports() == []
        assert client.lookup(HASHES).hits == 0
        assert client.status.state is ClientState.ATTACHED
        cache.free()
        cache.allocate()
        cache.wipe()
        client.register_memory(cache.memory)
        ready(client)
        load(client, cache)
    assert gpu.fake.refusals() == []


def test_memory_of_cuda_malloc_may_come_again_with_the_same_handle(gpu: EngineGpu) -> None:
    """What the test above means by it."""
    cache = GpuCache(gpu)
    before = cache.memory.export().ranges()[0].ipc
    cache.free()
    cache.allocate()
    after = cache.memory.export().ranges()[0].ipc
    assert before.handle == after.handle
    assert before.buffer_id != after.buffer_id


def test_a_handle_that_comes_again_while_the_old_one_is_still_open_is_waited_for(
    gpu: EngineGpu, gpu_host: DaemonHost, namespace: Namespace
) -> None:
    """An engine that restarts at once gets the memory, and the handle, of the one that went."""
    cache = GpuCache(gpu)
    with Client(**options(cache, gpu_host.socket, "one", namespace)) as first:
        ready(first)
        assert store(first, cache).done
        [worker] = [worker for worker in gpu_host.status().workers if worker.device == cache.memory.device]
        gpu.fake.hang("cuIpcCloseMemHandle", 1, worker.pid, pause_ms=1_000)
    cache.free()
    cache.allocate()
    with Client(**options(cache, gpu_host.socket, "two", namespace)) as second:
        ready(second)
        assert second.status.counters.epochs == 1
        load(second, cache)


def test_a_copy_that_runs_is_over_when_the_memory_is_given_back(
    gpu: EngineGpu, client: Client, cache: GpuCache
) -> None:
    assert store(client, cache).done
    cache.wipe()
    with client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
        gated = client.load(hit, IDS, doorbell=Doorbell(0, 99))
        assert client.release_memory(READY_S)
        assert gpu.fake.open_imports() == []
        outcome = gated.wait(TRANSFER_S)
        assert outcome.fenced
        assert not outcome.done
    cache.check([])


def test_memory_that_nobody_has_is_given_back_at_once_and_kept_from_the_next_daemon(
    gpu: EngineGpu, idle_host: DaemonHost, namespace: Namespace
) -> None:
    cache = GpuCache(gpu)
    with Client(**options(cache, idle_host.socket, "one", namespace)) as client:
        assert client.release_memory(READY_S)
        cache.free()
        idle_host.start()
        until(lambda: client.epoch is not None, "it is attached")
        status = client.status
        assert status.state is ClientState.ATTACHED
        assert "register_memory" in status.why
        assert client.lookup(HASHES).error is not None
        cache.allocate()
        client.register_memory(cache.memory)
        ready(client)
        assert store(client, cache).done
        load(client, cache)


def test_memory_is_given_back_while_the_worker_is_lost(
    gpu: EngineGpu, gpu_host: DaemonHost, client: Client, cache: GpuCache
) -> None:
    [worker] = [worker for worker in gpu_host.status().workers if worker.device == cache.memory.device]
    os.kill(worker.pid, 9)
    assert client.release_memory(READY_S)
    until(lambda: gpu.fake.open_imports() == [], "its mappings went with it")
    cache.free()
    cache.allocate()
    client.register_memory(cache.memory)
    ready(client)
    assert store(client, cache).done
    load(client, cache)


def test_releasing_and_registering_at_random_moments_never_leaves_it_stuck(
    gpu: EngineGpu, client: Client, cache: GpuCache
) -> None:
    assert store(client, cache).done
    for round_ in range(12):
        if round_ % 3:
            client.wait_ready(0.01 * (round_ % 3))
        while not client.release_memory(0.0):
            pass
        client.register_memory(cache.memory)
    ready(client)
    load(client, cache)


async def test_asyncio_clients_do_the_same(
    gpu: EngineGpu, gpu_host: DaemonHost, namespace: Namespace
) -> None:
    cache = GpuCache(gpu, chunks=True)
    stream = gpu.stream()
    async with kvtier.aio.Client(**options(cache, gpu_host.socket, "one", namespace)) as client:
        assert await client.wait_ready(READY_S), client.status
        for index, value in enumerate(HASHES):
            cache.fill(index, value)
        transfer = client.store(HASHES, IDS, doorbell=Doorbell(0, 1))
        client.ring_on(stream, 0, 1)
        assert (await transfer.wait(TRANSFER_S)).done
        assert await client.release_memory(READY_S)
        assert gpu.fake.open_imports() == []
        cache.free()
        cache.allocate()
        client.register_memory(cache.memory)
        assert await client.wait_ready(READY_S), client.status
        cache.wipe()
        with await client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
            assert (await client.load(hit, IDS).wait(TRANSFER_S)).done
        cache.check(HASHES)


async def test_an_asyncio_client_may_be_closed_while_the_driver_hangs(
    gpu: EngineGpu, gpu_host: DaemonHost, namespace: Namespace
) -> None:
    cache = GpuCache(gpu, chunks=True)
    gpu.fake.hang("cuMemExportToShareableHandle", 1, os.getpid())
    before = _chunk_descriptors(gpu)
    client = kvtier.aio.Client(**options(cache, gpu_host.socket, "one", namespace))
    async with asyncio.timeout(READY_S):
        while gpu.fake.calls("cuMemExportToShareableHandle", os.getpid()) == 0:
            await client.wait_ready(0.01)
        assert await client.close()
    gpu.fake.lift(os.getpid())
    until(lambda: not any(one.name == "kvtier-work" for one in threading.enumerate()), "the thread ends")
    assert _chunk_descriptors(gpu) == before


def _chunk_descriptors(gpu: EngineGpu) -> list[str]:
    """What this process has open of the fake driver's memory; gRPC opens things of its own when it likes."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the listing's own
    return sorted(link for link in links if link.startswith(gpu.fake.environment["FAKE_CUDA_DIR"]))


# --- a daemon that needs its time ---

SLOW_START_MS = 6_000
IMPATIENT = {"server__heartbeat_interval_s": "0.2", "server__session_silence_s": "4"}
"""And yet more patient than a busy machine may keep this process waiting."""


@pytest.fixture
def slow_host(
    gpu: EngineGpu, socket_dir: Path, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DaemonHost]:
    """Its copy worker needs longer for its context than a session may be silent."""
    monkeypatch.setenv("FAKE_CUDA_HANG", f"cuDevicePrimaryCtxRetain:1:{SLOW_START_MS}")
    host = DaemonHost(socket_dir, shm_dir / "pool", **IMPATIENT)
    host.start()
    yield host
    host.stop()


def test_a_client_stays_alive_while_it_is_registered(
    gpu: EngineGpu, slow_host: DaemonHost, namespace: Namespace
) -> None:
    cache = GpuCache(gpu)
    with Client(**options(cache, slow_host.socket, "one", namespace)) as client:
        ready(client)
        assert client.status.counters.epochs == 1


async def test_an_asyncio_client_stays_alive_while_it_is_registered(
    gpu: EngineGpu, slow_host: DaemonHost, namespace: Namespace
) -> None:
    cache = GpuCache(gpu)
    async with kvtier.aio.Client(**options(cache, slow_host.socket, "one", namespace)) as client:
        assert await client.wait_ready(READY_S), client.status
        assert client.status.counters.epochs == 1


# --- a driver that does not do everything ---


def test_where_streams_cannot_write_events_ring(
    gpu: EngineGpu, gpu_host: DaemonHost, namespace: Namespace
) -> None:
    gpu.fake.arm("cuStreamWriteValue64_v2", 0, 801, os.getpid())
    cache = GpuCache(gpu)
    source = GpuCache(gpu)
    for index, value in enumerate(HASHES):
        source.fill(index, value)
    stream = gpu.stream()
    with Client(**options(cache, gpu_host.socket, "one", namespace)) as client:
        ready(client)
        assert "CUDA_ERROR_NOT_SUPPORTED" in client.status.stream_doorbells
        transfer = client.store(HASHES, IDS, doorbell=Doorbell(0, 1))
        since_s = time.monotonic()
        gpu.fake.delay(stream, WORK_S)
        gpu.driver.copy_async(
            cache.planes.ctypes.data, source.planes.ctypes.data, source.memory.size_bytes, stream
        )
        client.ring_on(stream, 0, 1)
        assert began_late(transfer, since_s)
        assert transfer.wait(TRANSFER_S).done
        load(client, cache)


def test_memory_that_cannot_be_exported_is_said_once_and_tried_again(
    gpu: EngineGpu, gpu_host: DaemonHost, namespace: Namespace, caplog: pytest.LogCaptureFixture
) -> None:
    cache = GpuCache(gpu)
    gpu.fake.arm("cuIpcGetMemHandle", 0, 800, os.getpid())
    with Client(**options(cache, gpu_host.socket, "one", namespace)) as client:
        until(lambda: gpu.fake.calls("cuIpcGetMemHandle", os.getpid()) >= 2, "it was tried again")
        status = client.status
        assert status.state is ClientState.ATTACHED
        assert status.counters.epochs == 1, "other ranks of the instance are left in peace"
        assert "CUDA_ERROR_NOT_PERMITTED" in status.why
        error = client.lookup(HASHES).error
        assert error is not None
        assert error.reason is Reason.INSTANCE_INCOMPLETE
        gpu.fake.lift(os.getpid())
        ready(client)
        assert store(client, cache).done
    assert caplog.text.count("cuIpcGetMemHandle was refused") == 1


def test_through_a_mirror_the_same_blocks_come_back(
    gpu: EngineGpu, gpu_host: DaemonHost, namespace: Namespace
) -> None:
    cache = GpuCache(gpu)
    with MirrorMemory(cache.memory, [cache.group]) as mirror:
        given = options(cache, gpu_host.socket, "one", namespace) | {"memory": mirror}
        with Client(**given) as client:
            ready(client)
            for index, value in enumerate(HASHES):
                cache.fill(index, value)
            mirror.copy_out(IDS)
            assert client.store(HASHES, IDS).wait(TRANSFER_S).done
            mirror.discard(IDS)
            assert mirror.held_bytes == 0
            cache.wipe()
            with client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
                assert not client.load(hit, IDS).wait(TRANSFER_S).done, "the daemon took memory for us"
            assert mirror.held_bytes == 0
            mirror.populate(IDS)
            with client.lookup(HASHES, lease=True, timeout_s=READY_S) as hit:
                assert client.load(hit, IDS).wait(TRANSFER_S).done
            mirror.copy_in(IDS)
            cache.check(HASHES)
            assert mirror.held_bytes == 0
            stream = gpu.stream()
            mirror.copy_out([40])
            client.ring_on(stream, 0, 1)
            more = client.store(block_hashes("more", [1]), [40], doorbell=Doorbell(0, 1))
            assert more.wait(TRANSFER_S).done


def test_a_client_in_host_memory_has_no_streams(
    gpu_host: DaemonHost, connect_to: Callable[..., object]
) -> None:
    plain = connect_to(gpu_host)
    with pytest.raises(kvtier.KvtierError, match="use ring"):
        plain.client.ring_on(1, 0, 1)  # type: ignore[attr-defined]


def test_the_engine_that_loses_its_context_does_not_wait_for_us(
    gpu: EngineGpu, client: Client, cache: GpuCache
) -> None:
    gpu.fake.arm("cuStreamWriteValue64_v2", 1, 719, os.getpid())
    stream = gpu.stream()
    with pytest.raises(kvtier.KvtierError) as raised:
        client.ring_on(stream, 0, 1)
    assert raised.value.reason is Reason.DEVICE_UNAVAILABLE
    with pytest.raises(CudaError):
        gpu.driver.stream_is_done(stream)
    assert client.close()


def test_two_engines_share_a_gpu_and_find_each_others_blocks(
    gpu: EngineGpu, gpu_host: DaemonHost, client: Client, cache: GpuCache, namespace: Namespace
) -> None:
    assert store(client, cache).done
    other = GpuCache(gpu)
    with Client(**options(other, gpu_host.socket, "two", namespace)) as second:
        ready(second)
        load(second, other)


def test_a_cache_of_many_chunks_takes_few_descriptors(
    make_gpu: MakeGpu, idle_host: DaemonHost, namespace: Namespace
) -> None:
    cache = GpuCache(make_gpu(granularity=4_096), chunks=True)
    assert cache.gpu.fake.hbm_used() > 256 * 4_096
    idle_host.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_descriptor() + 100, hard))
    try:
        with Client(**options(cache, idle_host.socket, "one", namespace)) as client:
            ready(client)
            assert store(client, cache).done
            load(client, cache)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def max_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))
