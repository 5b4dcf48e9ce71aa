"""Which memory of a GPU can be shared, as what, and what is said about the rest."""

from __future__ import annotations

import itertools
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from kvtier import KvtierError, NotExportableError, Reason
from kvtier.cuda import DeviceMemory
from kvtier.cuda.export import PACKET_CHUNKS_MAX

from tests.support.engine_gpu import EngineGpu
from tests.unit.client.cuda.conftest import MakeGpu
from tests.unit.fake_cuda.raw import Raw

pytestmark = pytest.mark.fake_gpu
MIB = 1 << 20
FABRIC = 8


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def refused(memory: DeviceMemory) -> KvtierError:
    with pytest.raises(KvtierError) as raised:
        memory.check()
    return raised.value


def test_a_piece_of_an_allocation_is_shared_by_the_handle_of_the_whole_and_an_offset(gpu: EngineGpu) -> None:
    address = gpu.alloc(MIB)
    memory = DeviceMemory(address + 12_345, 1_000)
    assert (memory.device, memory.size_bytes) == (gpu.fake.device_name(), 1_000)
    export = memory.export()
    assert export.next_packet() is None
    [exported] = export.ranges()
    assert exported.bytes == 1_000
    assert exported.ipc.handle == gpu.driver.ipc_export(address)
    assert exported.ipc.offset == 12_345
    assert exported.ipc.buffer_id == gpu.driver.pointer_info(address).buffer_id != 0


def test_memory_that_came_again_with_the_same_handle_has_another_buffer_id(gpu: EngineGpu) -> None:
    first = gpu.alloc(MIB)
    before = DeviceMemory(first, MIB).export().ranges()[0].ipc
    gpu.driver.free(first)
    memory = DeviceMemory(gpu.alloc(MIB), MIB)
    assert memory.export().ranges()[0].ipc.buffer_id != before.buffer_id


def test_chunks_go_by_descriptor_in_packets_and_none_is_left_open(gpu: EngineGpu) -> None:
    with gpu.alloc_chunks(2 * PACKET_CHUNKS_MAX + 3) as chunks:
        before, most = descriptors(), 0
        seen: list[int] = []
        export = DeviceMemory(chunks.address + 100, chunks.size_bytes - 200).export()
        while (packet := export.next_packet()) is not None:
            assert len(packet.fds) == len(packet.sizes_bytes) <= PACKET_CHUNKS_MAX
            assert not any(os.get_inheritable(fd) for fd in packet.fds)
            most = max(most, descriptors() - before)
            seen += packet.sizes_bytes
        assert seen == [chunks.chunk_bytes] * (2 * PACKET_CHUNKS_MAX + 3)
        assert most == PACKET_CHUNKS_MAX
        [exported] = export.ranges()
        assert (exported.chunks.count, exported.chunks.offset) == (len(seen), 100)
        export.close()
        assert descriptors() == before


def test_only_the_chunks_that_a_piece_touches_are_shared(gpu: EngineGpu) -> None:
    with gpu.alloc_chunks(8) as chunks:
        size = chunks.chunk_bytes
        export = DeviceMemory(chunks.address + 2 * size + 7, 2 * size).export()
        packet = export.next_packet()
        assert packet is not None
        assert len(packet.fds) == 3
        assert export.next_packet() is None
        assert (export.ranges()[0].chunks.count, export.ranges()[0].chunks.offset) == (3, 7)


def test_what_is_exported_is_what_lies_there_now(gpu: EngineGpu) -> None:
    """An engine that sleeps gives its chunks away and maps new ones at the same addresses."""
    with gpu.alloc_chunks(1) as chunks:
        memory = DeviceMemory(chunks.address, chunks.size_bytes)
        memory.check()
        chunks.unmap()
        error = refused(memory)
        assert isinstance(error, NotExportableError)
        assert "release_memory" in str(error)
        chunks.map()
        gpu.view(chunks.address, 4)[:] = [1, 2, 3, 4]
        export = memory.export()
        packet = export.next_packet()
        assert packet is not None
        handle = gpu.driver.chunk_import(packet.fds[0])
        other = gpu.driver.reserve(chunks.size_bytes)
        gpu.driver.map_chunk(other, chunks.size_bytes, handle)
        gpu.driver.allow_access(other, chunks.size_bytes, 0)
        assert list(gpu.view(other, 4)) == [1, 2, 3, 4]
        gpu.driver.unmap(other, chunks.size_bytes)
        gpu.driver.unreserve(other, chunks.size_bytes)
        gpu.driver.chunk_release(handle)
        export.close()


def test_both_kinds_may_be_joined_and_offsets_count_through(gpu: EngineGpu) -> None:
    with gpu.alloc_chunks(2) as chunks:
        address = gpu.alloc(MIB)
        memory = DeviceMemory.join(
            [DeviceMemory(address + 64, 128), DeviceMemory(chunks.address, 4_096), DeviceMemory(address, 64)]
        )
        assert memory.range_bytes == (128, 4_096, 64)
        assert memory.size_bytes == 4_288
        assert memory.offset_of(address + 64) == 0
        assert memory.offset_of(chunks.address + 5) == 133
        assert memory.offset_of(address + 1) == 4_225
        for outside in (address + 192, address - 1):
            with pytest.raises(KvtierError) as raised:
                memory.offset_of(outside)
            assert raised.value.reason is Reason.PLANE_BEYOND_MAPPING
        export = memory.export()
        packet = export.next_packet()
        assert packet is not None
        assert len(packet.fds) == 1
        assert export.next_packet() is None
        assert [exported.WhichOneof("source") for exported in export.ranges()] == ["ipc", "chunks", "ipc"]


def test_memory_of_two_gpus_is_not_joined(make_gpu: MakeGpu) -> None:
    gpu = make_gpu(devices=2)
    first = DeviceMemory(gpu.alloc(MIB), MIB)
    other = EngineGpu(gpu.fake, 1)
    second = DeviceMemory(other.alloc(MIB), MIB)
    assert second.device == gpu.fake.device_name(1)
    with pytest.raises(KvtierError, match="on one GPU"):
        DeviceMemory.join([first, second])


def test_the_gpu_is_found_by_the_memory_not_by_what_is_current(make_gpu: MakeGpu) -> None:
    first = make_gpu(devices=2)
    other = EngineGpu(first.fake, 1)
    address = other.alloc(MIB)
    first.context.make_current()
    assert DeviceMemory(address, MIB).device == first.fake.device_name(1)
    assert first.driver.current_context() == first.context.handle


def test_chunks_made_without_a_handle_type_are_refused_with_what_to_change(gpu: EngineGpu) -> None:
    with gpu.alloc_chunks(1, exportable=False) as chunks:
        error = refused(DeviceMemory(chunks.address, chunks.size_bytes))
        assert isinstance(error, NotExportableError)
        for hint in ("expandable_segments", "POSIX_FILE_DESCRIPTOR", "MirrorMemory"):
            assert hint in error.message


def test_chunks_with_fabric_handles_only_are_named_with_what_to_change(make_gpu: MakeGpu) -> None:
    """As torch makes them where there is IMEX."""
    gpu = make_gpu(imex=1)
    raw, size = Raw(gpu.fake.library), gpu.driver.chunk_granularity(gpu.ordinal)
    address = raw.reserve(size)
    raw.map(address, size, raw.create(size, handle_types=FABRIC))
    raw.allow(address, size)
    error = refused(DeviceMemory(address, size))
    assert isinstance(error, NotExportableError)
    for hint in ("fabric handles only", "POSIX_FILE_DESCRIPTOR", "MirrorMemory"):
        assert hint in error.message


def test_ipc_that_is_not_allowed_is_refused_with_what_to_change(gpu: EngineGpu) -> None:
    memory = DeviceMemory(gpu.alloc(MIB), MIB)
    gpu.fake.arm("cuIpcGetMemHandle", 1, 800, os.getpid())
    error = refused(memory)
    assert isinstance(error, NotExportableError)
    for hint in ("CUDA_ERROR_NOT_PERMITTED", "IPC", "container", "MirrorMemory"):
        assert hint in error.message
    memory.check()  # it was for once


def test_a_chunk_that_cannot_be_exported_leaves_nothing_open(gpu: EngineGpu) -> None:
    with gpu.alloc_chunks(5) as chunks:
        before = descriptors()
        gpu.fake.arm("cuMemExportToShareableHandle", 3, 304, os.getpid())
        assert isinstance(refused(DeviceMemory(chunks.address, chunks.size_bytes)), NotExportableError)
        assert descriptors() == before


def test_a_slice_of_a_gpu_is_refused_with_what_to_change(make_gpu: MakeGpu) -> None:
    gpu = make_gpu(mig=1)
    error = refused(DeviceMemory(gpu.alloc(MIB), MIB))
    assert isinstance(error, NotExportableError)
    for hint in ("MIG", "whole GPU", "MirrorMemory"):
        assert hint in error.message


def test_an_export_that_is_given_up_in_the_middle_closes_what_still_comes(gpu: EngineGpu) -> None:
    with gpu.alloc_chunks(3) as chunks:
        before = descriptors()
        export = DeviceMemory(chunks.address, chunks.size_bytes).export()
        gpu.fake.hang("cuMemExportToShareableHandle", 2, os.getpid())
        failed: list[BaseException] = []

        def walk() -> None:
            try:
                export.next_packet()
            except KvtierError as error:
                failed.append(error)

        walking = threading.Thread(target=walk)
        walking.start()
        while gpu.fake.calls("cuMemExportToShareableHandle", os.getpid()) < 2:
            pass
        export.close()
        gpu.fake.lift(os.getpid())
        walking.join(60)
        assert len(failed) == 1
        assert descriptors() == before


# --- what is memory of a GPU ---


def test_host_memory_and_nonsense_are_refused(gpu: EngineGpu) -> None:
    address = gpu.alloc(MIB)
    host = bytearray(100)
    for bad, size in ((id(host), 10), (0, 10), (address, 0), (address, -1), (address, 1 << 40)):
        with pytest.raises(KvtierError) as raised:
            DeviceMemory(bad, size)
        assert raised.value.reason is Reason.DEVICE_MEMORY_INVALID


def test_a_size_beyond_the_allocation_is_refused_even_if_other_memory_follows(gpu: EngineGpu) -> None:
    addresses = sorted(gpu.alloc(2 * MIB) for _ in range(8))
    for first, second in itertools.pairwise(addresses):
        with pytest.raises(KvtierError) as raised:
            DeviceMemory(first, second - first + 10).check()
        assert raised.value.reason is Reason.DEVICE_MEMORY_INVALID


def test_a_thread_without_a_context_names_the_ordinal(gpu: EngineGpu) -> None:
    address = gpu.alloc(MIB)
    found: list[Any] = []

    def ask() -> None:
        try:
            DeviceMemory(address, MIB)
        except KvtierError as error:
            found.append(error.field)
        found.append(DeviceMemory(address, MIB, ordinal=0).device)
        found.append(gpu.driver.current_context())

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(60)
    assert found == ["ordinal", gpu.fake.device_name(), 0]


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CUDA_LIBRARY", "/nonexistent/libcuda.so.1")
    with pytest.raises(KvtierError, match="/nonexistent/libcuda") as raised:
        DeviceMemory(4096, 10)
    assert raised.value.reason is Reason.DEVICE_UNAVAILABLE


# --- tensors ---


class Storage:
    def __init__(self, address: int, size_bytes: int) -> None:
        self._address, self._size_bytes = address, size_bytes

    def data_ptr(self) -> int:
        return self._address

    def nbytes(self) -> int:
        return self._size_bytes


class Tensor:
    """What torch shows of one that begins 256 bytes behind its storage's start."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self._storage = Storage(address, size_bytes)

    def data_ptr(self) -> int:
        return self._storage.data_ptr() + 256

    def untyped_storage(self) -> Storage:
        return self._storage


def test_of_a_torch_tensor_the_whole_storage_is_shared(gpu: EngineGpu) -> None:
    tensor = Tensor(gpu.alloc(MIB), MIB)
    memory = DeviceMemory.of(tensor)
    assert memory.size_bytes == MIB
    assert memory.offset_of(tensor) == 256


@pytest.mark.parametrize(
    ("shape", "strides", "size_bytes"),
    [((4, 8), None, 128), ((4, 8), (64, 4), 224), ((1,), None, 4), ((), None, 4)],
)
def test_of_an_array_the_bytes_that_it_spans_are_shared(
    gpu: EngineGpu, shape: tuple[int, ...], strides: tuple[int, ...] | None, size_bytes: int
) -> None:
    address = gpu.alloc(MIB)
    interface = {"data": (address + 8, False), "shape": shape, "strides": strides, "typestr": "<f4"}
    array = SimpleNamespace(__cuda_array_interface__=interface)
    memory = DeviceMemory.of(array)
    assert memory.size_bytes == size_bytes
    assert memory.offset_of(array) == 0


@pytest.mark.parametrize(
    "bad",
    [
        SimpleNamespace(),
        SimpleNamespace(
            __cuda_array_interface__={
                "data": (4096, False),
                "shape": (2,),
                "strides": (-4,),
                "typestr": "<f4",
            }
        ),
        SimpleNamespace(
            __cuda_array_interface__={"data": (4096, False), "shape": (0,), "strides": None, "typestr": "<f4"}
        ),
    ],
)
def test_of_something_else_nothing_is_shared(gpu: EngineGpu, bad: object) -> None:
    with pytest.raises(KvtierError) as raised:
        DeviceMemory.of(bad)
    assert raised.value.reason is Reason.DEVICE_MEMORY_INVALID


def test_what_it_was_made_of_stays_alive(gpu: EngineGpu) -> None:
    gone = threading.Event()

    class Owner(Tensor):
        def __del__(self) -> None:
            gone.set()

    memory = DeviceMemory.join([DeviceMemory.of(Owner(gpu.alloc(MIB), MIB))])
    assert not gone.is_set()
    del memory
    assert gone.is_set()


def test_no_context_is_left_current(gpu: EngineGpu) -> None:
    """The engine's thread may have another context than ours, or none."""
    memory = DeviceMemory(gpu.alloc(MIB), MIB)
    found: list[int] = []

    def ask() -> None:
        memory.check()
        found.append(gpu.driver.current_context())

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(60)
    assert found == [0]
    assert gpu.driver.current_context() == gpu.context.handle
