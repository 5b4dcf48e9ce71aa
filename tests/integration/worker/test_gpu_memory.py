"""Device memory of other processes: what a worker takes, what it refuses, and how it lets go."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kvtierd.core.actions import Direction
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.stimuli import PartOutcome
from kvtierd.wire.worker_pb2 import DeviceRange

from tests.integration.worker.devices import (
    GPU_13,
    Allocation,
    DeviceMemory,
    Foreign,
    Gpu,
    Joined,
    memfd,
    on,
)
from tests.integration.worker.rig import GROUP, Client, Layout, Rig, until

pytestmark = on(GPU_13)

ROOT = Path(__file__).parents[3]
LAYOUT = Layout()
SIZE = LAYOUT.mapping_bytes


async def round_trip(rig: Rig, client: Client) -> None:
    """Stores some blocks and loads them back in another order."""
    client.fill(1)
    slots = await rig.store(client, [3, 0, 63, 17])
    before = [client.block(block) for block in (3, 0, 63, 17)]
    client.fill(2)
    untouched = client.block(20)
    part, _ = rig.post(client, Direction.LOAD, [10, 11, 12, 63], slots, verify=True)
    assert (await rig.finished(part)).outcome == PartOutcome.DONE
    assert [client.block(block) for block in (10, 11, 12, 63)] == before
    assert client.block(20) == untouched


@pytest.mark.parametrize("offset", [0, 1_000_003])
async def test_memory_anywhere_in_an_allocation_is_shared_by_handle(rig: Rig, gpu: Gpu, offset: int) -> None:
    await round_trip(rig, await rig.client(LAYOUT, gpu.allocate(SIZE, offset)))


@pytest.mark.parametrize("offset", [0, 4_097])
async def test_memory_made_of_chunks_is_shared_by_descriptors(rig: Rig, gpu: Gpu, offset: int) -> None:
    large = Layout(num_blocks=1_000)
    memory = gpu.chunked(large.mapping_bytes, offset)
    assert memory.chunks > 4
    client = await rig.client(large, memory)
    await round_trip(rig, client)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await rig.released(client.session)
    assert rig.mapped() == []


async def test_each_plane_may_lie_in_a_range_of_its_own(rig: Rig, gpu: Gpu) -> None:
    ends = [*LAYOUT.bases[1:], SIZE]
    sizes = [end - base for base, end in zip(LAYOUT.bases, ends, strict=True)]
    memories: list[DeviceMemory] = [
        gpu.allocate(sizes[0], 77),
        gpu.chunked(sizes[1], 640),
        gpu.chunked(sizes[2]),
    ]
    client = await rig.client(LAYOUT, Joined(memories))
    await round_trip(rig, client)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await rig.released(client.session)
    assert rig.mapped() == []


async def test_chunks_that_no_registration_took_are_let_go_of_with_the_session(rig: Rig, gpu: Gpu) -> None:
    memory = gpu.chunked(8 << 20)
    client = rig.new_client(LAYOUT, memory)
    await rig.map_words(client)
    fds, sizes = memory.chunk_fds()
    await rig.supervisor.orders.add_chunks(rig.worker, client.session, fds, sizes)
    for fd in fds:
        os.close(fd)
    assert len(rig.mapped()) == 1 + len(fds)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await rig.released(client.session)
    assert rig.mapped() == []


class Described(DeviceMemory):
    """What a client says of its memory, true or not."""

    def __init__(self, ranges: list[DeviceRange], fds: list[int] | None = None, chunk_bytes: int = 0) -> None:
        self._ranges = ranges
        self._fds = fds or []
        self._chunk_bytes = chunk_bytes

    def ranges(self) -> list[DeviceRange]:
        return self._ranges

    def chunk_fds(self) -> tuple[list[int], list[int]]:
        return self._fds, [self._chunk_bytes] * len(self._fds)


async def refused(rig: Rig, cache: DeviceMemory) -> Refusal:
    """Registers this; it must be refused, and leave nothing that hinders a registration that is in order."""
    client = rig.new_client(LAYOUT, cache)
    await rig.map_words(client)
    with pytest.raises(Refusal) as refusal:
        await rig.map_memory(client)
    assert not [name for name in rig.mapped() if "legacy" in name]
    client.cache = rig.new_memory(SIZE)
    await rig.map_memory(client)
    await round_trip(rig, client)
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await rig.released(client.session)
    assert rig.mapped() == []
    return refusal.value


async def test_a_range_beyond_its_allocation_is_refused(rig: Rig, gpu: Gpu) -> None:
    memory = gpu.allocate(SIZE)
    [honest] = memory.ranges()
    for offset in (1, SIZE, 2**63):
        lie = DeviceRange(bytes=SIZE, offset=offset, ipc_handle=honest.ipc_handle, buffer_id=honest.buffer_id)
        refusal = await refused(rig, Described([lie]))
        assert (refusal.reason, refusal.field) == (Reason.DEVICE_MEMORY_INVALID, "ranges[0].offset")


async def test_a_handle_that_names_no_memory_is_refused(rig: Rig, gpu: Gpu) -> None:
    gone = gpu.allocate(SIZE)
    [freed] = gone.ranges()
    gone.close()
    for range_ in (
        freed,
        DeviceRange(bytes=SIZE, offset=0, ipc_handle=bytes(64), buffer_id=1),
        DeviceRange(bytes=SIZE, offset=0, ipc_handle=b"\xff" * 64, buffer_id=1),
    ):
        refusal = await refused(rig, Described([range_]))
        assert (refusal.reason, refusal.field) == (Reason.IMPORT_REFUSED, "ranges[0].handle")


async def test_memory_of_another_gpu_is_refused(rig: Rig, other_gpu: Gpu) -> None:
    assert (await refused(rig, other_gpu.allocate(SIZE))).reason == Reason.DEVICE_MEMORY_INVALID


async def test_a_plane_that_lies_in_two_ranges_is_refused(rig: Rig, gpu: Gpu) -> None:
    memories = [gpu.allocate(SIZE - 10), gpu.allocate(10)]
    refusal = await refused(rig, Joined(memories))
    assert (refusal.reason, refusal.field) == (Reason.PLANE_BEYOND_MAPPING, f"groups[{GROUP}]")
    assert "plane 2" in refusal.message


async def test_what_is_no_chunk_is_refused(rig: Rig, gpu: Gpu) -> None:
    granularity = gpu.driver.chunk_granularity(0)
    lie = DeviceRange(bytes=SIZE, offset=0, chunks=1)
    refusal = await refused(rig, Described([lie], [memfd(granularity)], granularity))
    assert (refusal.reason, refusal.field) == (Reason.DEVICE_MEMORY_INVALID, "chunks")


async def test_a_chunk_of_another_size_than_it_says_is_refused(rig: Rig, gpu: Gpu) -> None:
    memory = gpu.chunked(1)
    for factor in (0, 3):
        fds, _ = memory.chunk_fds()
        lie = Described([DeviceRange(bytes=SIZE, offset=0, chunks=1)], fds, factor * memory.chunk_bytes)
        assert (await refused(rig, lie)).reason == Reason.DEVICE_MEMORY_INVALID
    memory.close()


@pytest.mark.parametrize(
    ("chunks", "offset"),
    [(2, 0), (1, 1), (1, 2 << 20), (1, 2**63)],
    ids=["too few", "too short", "beyond", "far"],
)
async def test_ranges_beyond_their_chunks_are_refused(rig: Rig, gpu: Gpu, chunks: int, offset: int) -> None:
    memory = gpu.chunked(1)
    size = memory.chunk_bytes
    fds, _ = memory.chunk_fds()
    refusal = await refused(
        rig, Described([DeviceRange(bytes=size, offset=offset, chunks=chunks)], fds, size)
    )
    assert refusal.reason == Reason.DEVICE_MEMORY_INVALID
    memory.close()


async def test_host_memory_is_refused_and_the_device_named(rig: Rig, gpu: Gpu) -> None:
    client = rig.new_client()
    await rig.map_words(client)
    fd = memfd(SIZE)
    with pytest.raises(Refusal, match=f"name {gpu.name}"):
        await rig.supervisor.orders.map_memory(
            rig.worker, client.session, client.registration, fd, SIZE, [LAYOUT.mapping()]
        )
    os.close(fd)


async def test_a_handle_that_came_back_with_other_memory_waits_for_the_old_to_go(rig: Rig, gpu: Gpu) -> None:
    """The driver would answer with the old memory."""
    memory = gpu.allocate(SIZE)
    [old] = memory.ranges()
    first = await rig.client(LAYOUT, Foreign(old))
    memory.close()
    second = rig.new_client(LAYOUT, gpu.allocate(SIZE))
    assert isinstance(second.cache, Allocation)
    [new] = second.cache.ranges()
    assert new.ipc_handle == old.ipc_handle
    assert new.buffer_id != old.buffer_id
    await rig.map_words(second)
    with pytest.raises(Refusal, match="stale") as refusal:
        await rig.map_memory(second)
    assert refusal.value.reason == Reason.WORKER_UNAVAILABLE
    rig.supervisor.orders.release_session(rig.worker, first.session)
    await rig.released(first.session)
    await rig.map_memory(second)
    await round_trip(rig, second)


async def test_sessions_share_an_allocation_and_let_go_of_it_one_by_one(rig: Rig, gpu: Gpu) -> None:
    memory = gpu.allocate(SIZE)
    clients = [rig.new_client(LAYOUT, Foreign(memory.ranges()[0])) for _ in range(3)]
    for client in clients:
        await rig.map(client)
    for client in clients[:2]:
        rig.supervisor.orders.release_session(rig.worker, client.session)
        await rig.released(client.session)
    last = clients[2]
    last.cache = memory
    await round_trip(rig, last)
    rig.supervisor.orders.release_session(rig.worker, last.session)
    await rig.released(last.session)
    assert rig.mapped() == []


@contextlib.contextmanager
def engine(gpu: Gpu, size: int, byte: int) -> Iterator[tuple[subprocess.Popen[str], DeviceRange]]:
    """Another process with memory of the GPU."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.worker.exporter", str(size), str(byte)],
        env=os.environ | gpu.fake.environment,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        handle, buffer_id = process.stdout.readline().split()
        yield (
            process,
            DeviceRange(bytes=size, offset=0, ipc_handle=bytes.fromhex(handle), buffer_id=int(buffer_id)),
        )
        process.kill()


async def test_a_killed_engines_memory_is_free_when_its_session_has_been_released(rig: Rig, gpu: Gpu) -> None:
    used = gpu.fake.hbm_used()
    with engine(gpu, SIZE, 0xAB) as (process, range_):
        client = await rig.client(LAYOUT, Foreign(range_))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert gpu.fake.hbm_used() - used >= SIZE  # as long as anybody has it open
    slots = await rig.store(client, [0, 1])  # which is still safe
    assert set(rig.slot(int(slots[1]), LAYOUT.slot_bytes)) == {0xAB}
    rig.supervisor.orders.release_session(rig.worker, client.session)
    await rig.released(client.session)
    assert gpu.fake.hbm_used() == used
    await until(lambda: rig.mapped() == [])
