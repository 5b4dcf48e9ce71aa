"""What of an engine's GPU memory is mapped, what is refused, and that nothing stays open."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
from kvtier_kernels import DevicePlan
from kvtier_kernels.cuda import CudaError, Driver
from kvtierd.core.errors import Reason, Refusal
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.gpu import imports as imports_module
from kvtierd.workers.copy.gpu.imports import GpuChunk, GpuMemory, Imports

from tests.support.fake_cuda import FakeCuda
from tests.unit.transfer.gpu.conftest import Gpu
from tests.unit.transfer.gpu.exporter import Engine, Exported, content

pytestmark = pytest.mark.fake_gpu

MIB = 1 << 20
CHUNK = 2 * MIB


@pytest.fixture
def imports(gpu: Gpu) -> Iterator[Imports]:
    yield Imports(gpu.driver, gpu.info)
    assert gpu.fake.open_imports() == []


def by_handle(memory: Exported, size_bytes: int, offset: int = 0) -> wire.DeviceRange:
    return wire.DeviceRange(
        bytes=size_bytes, offset=offset, ipc_handle=memory.handle, buffer_id=memory.buffer_id
    )


def message(*ranges: wire.DeviceRange, mapping_bytes: int | None = None) -> wire.MapMemory:
    total = sum(range_.bytes for range_ in ranges) if mapping_bytes is None else mapping_bytes
    return wire.MapMemory(request=1, session=1, registration=1, mapping_bytes=total, ranges=ranges)


def refused(imports: Imports, request: wire.MapMemory, chunks: Sequence[GpuChunk] = ()) -> Refusal:
    with pytest.raises(Refusal) as error:
        imports.map(request, chunks)
    return error.value


def group(*planes: tuple[int, int, int], blocks: int = 4) -> wire.MappedGroup:
    """Planes as (base offset, block stride, fragment bytes)."""
    bases, strides, sizes = zip(*planes, strict=True) if planes else ((), (), ())
    return wire.MappedGroup(
        group=7, num_blocks=blocks, base_offsets=bases, block_strides=strides, fragment_bytes=sizes
    )


def first_byte_of(memory: GpuMemory, offset: int) -> int:
    """The byte at an offset of the mapping, by the address that a plan gives it."""
    plan = memory.plan(group((offset, 1, 1), blocks=1))
    device, _, _ = plan.describe(np.zeros(1, np.uint32), 4096, 8192, np.ones(1, np.uint32))
    return int(FakeCuda.view(int(device[0]), 1)[0])


def test_ranges_are_one_mapping_each_at_its_offset(imports: Imports, engine: Engine, gpu: Gpu) -> None:
    one, two = engine.alloc(MIB, seed=1), engine.alloc(MIB, seed=2)
    memory, used = imports.map(message(by_handle(one, 1000, 24), by_handle(two, 5000)), [])
    assert used == 0
    want = np.concatenate([content(MIB, 1)[24:1024], content(MIB, 2)[:5000]])
    for offset in (0, 999, 1000, 5999):
        assert first_byte_of(memory, offset) == want[offset]
    assert len(gpu.fake.open_imports()) == 2
    memory.unmap()


def test_an_allocation_in_two_ranges_and_registrations_is_let_go_of_with_the_last(
    imports: Imports, engine: Engine, gpu: Gpu
) -> None:
    one = engine.alloc(MIB, seed=1)
    first, _ = imports.map(message(by_handle(one, 100), by_handle(one, 100, 500)), [])
    second, _ = imports.map(message(by_handle(one, 100, 1_000)), [])
    first.unmap()
    assert len(gpu.fake.open_imports()) == 1
    assert first_byte_of(second, 99) == content(MIB, 1)[1_099]
    second.unmap()


def test_chunks_are_mapped_one_after_another_and_live_as_long_as_their_mapping(
    imports: Imports, engine: Engine, gpu: Gpu
) -> None:
    chunks = []
    for seed in range(3):
        fd = engine.chunk(CHUNK, seed)
        chunks.append(imports.chunk(fd, CHUNK))
        os.close(fd)
    ranges = [
        wire.DeviceRange(bytes=CHUNK, offset=CHUNK - 500, chunks=2),
        wire.DeviceRange(bytes=10, chunks=1),
    ]
    memory, used = imports.map(message(*ranges), chunks)
    assert used == 3
    for chunk in chunks:
        chunk.release()
    want = np.concatenate([content(CHUNK, 0)[-500:], content(CHUNK, 1)[:-500], content(CHUNK, 2)[:10]])
    for offset in (0, 499, 500, CHUNK - 1, CHUNK, CHUNK + 9):
        assert first_byte_of(memory, offset) == want[offset]
    assert gpu.fake.open_imports() != []
    memory.unmap()


def test_a_handle_that_came_back_with_other_memory_is_refused_until_the_old_is_let_go_of(
    imports: Imports, engine: Engine
) -> None:
    one = engine.alloc(MIB, seed=1)
    memory, _ = imports.map(message(by_handle(one, 100)), [])
    again = Exported(one.address, one.handle, one.buffer_id + 1)
    refusal = refused(imports, message(by_handle(again, 100)))
    assert refusal.reason == Reason.WORKER_UNAVAILABLE
    assert refusal.field == "ranges[0].buffer_id"
    assert "try again" in refusal.message
    memory.unmap()
    imports.map(message(by_handle(again, 100)), [])[0].unmap()


def test_the_handle_of_a_dead_process_is_refused(imports: Imports, engine: Engine) -> None:
    one = engine.alloc(MIB)
    engine.close()
    refusal = refused(imports, message(by_handle(one, 100)))
    assert (refusal.reason, refusal.field) == (Reason.IMPORT_REFUSED, "ranges[0].handle")
    assert "the engine has just ended" in refusal.message


@pytest.mark.parametrize(
    ("code", "sticky", "reason"),
    [
        (1, None, Reason.IMPORT_REFUSED),
        (201, None, Reason.IMPORT_REFUSED),
        (205, None, Reason.IMPORT_REFUSED),
        (400, None, Reason.IMPORT_REFUSED),
        (800, None, Reason.IMPORT_REFUSED),
        (801, None, Reason.IMPORT_REFUSED),
        (999, False, Reason.IMPORT_REFUSED),
        (2, None, Reason.DEVICE_OUT_OF_MEMORY),
        (217, None, Reason.DEVICE_MEMORY_INVALID),
    ],
)
def test_what_a_mirror_gets_around_is_told_apart(
    code: int,
    sticky: bool | None,
    reason: Reason,
    imports: Imports,
    engine: Engine,
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = engine.alloc(MIB)

    def refuse(handle: bytes) -> int:
        raise CudaError("cuIpcOpenMemHandle_v2", code, f"ERROR_{code}", sticky=sticky)

    with monkeypatch.context() as patch:
        patch.setattr(gpu.driver, "ipc_open", refuse)
        refusal = refused(imports, message(by_handle(one, 100)))
    assert (refusal.reason, refusal.field) == (reason, "ranges[0].handle")
    assert f"ERROR_{code}" in refusal.message
    if reason is Reason.IMPORT_REFUSED:
        assert refusal.value == f"ERROR_{code}"
    imports.map(message(by_handle(one, 100)), [])[0].unmap()


def test_a_range_beyond_its_allocation_is_refused(imports: Imports, engine: Engine) -> None:
    one, two = engine.alloc(MIB), engine.alloc(MIB)
    for offset, size_bytes in ((0, MIB + 1), (MIB, 1), (1, MIB), ((1 << 64) - 1, 2), (0, (1 << 64) - 101)):
        refusal = refused(imports, message(by_handle(one, 100), by_handle(two, size_bytes, offset)))
        assert (refusal.reason, refusal.field) == (Reason.DEVICE_MEMORY_INVALID, "ranges[1].offset")


def test_memory_of_another_gpu_is_refused(imports: Imports, gpu: Gpu) -> None:
    other = Engine(gpu.fake, ordinal=1)
    try:
        refusal = refused(imports, message(by_handle(other.alloc(MIB), 100)))
    finally:
        other.close()
    assert refusal.reason == Reason.DEVICE_MEMORY_INVALID
    assert "on this GPU" in refusal.message


def test_a_descriptor_that_is_no_chunk_is_refused(imports: Imports) -> None:
    fd = os.memfd_create("kvt-test")
    with pytest.raises(Refusal, match="DEVICE_MEMORY_INVALID"):
        imports.chunk(fd, CHUNK)
    os.close(fd)
    with pytest.raises(Refusal, match="multiple of"):
        imports.chunk(-1, CHUNK - 4096)


def test_a_chunk_smaller_than_it_says_is_refused(imports: Imports, engine: Engine) -> None:
    chunks = []
    for claimed in (CHUNK, 2 * CHUNK):
        fd = engine.chunk(CHUNK)
        chunks.append(imports.chunk(fd, claimed))
        os.close(fd)
    refusal = refused(imports, message(wire.DeviceRange(bytes=2 * CHUNK, chunks=2)), chunks)
    assert (refusal.reason, refusal.field) == (Reason.DEVICE_MEMORY_INVALID, "ranges[0].chunks")
    # Nothing has changed: they may still be mapped as they are.
    memory, used = imports.map(message(wire.DeviceRange(bytes=CHUNK, chunks=1)), chunks)
    assert used == 1
    memory.unmap()
    for chunk in chunks:
        chunk.release()


def test_ranges_that_make_no_sense_are_refused(imports: Imports, engine: Engine) -> None:
    one = engine.alloc(MIB)
    both = by_handle(one, 100)
    both.chunks = 1
    for ranges, field in (
        ((), "ranges"),
        ((wire.DeviceRange(bytes=0, ipc_handle=one.handle),), "ranges[0].bytes"),
        ((by_handle(one, 10), wire.DeviceRange(bytes=10)), "ranges[1].handle"),
        ((wire.DeviceRange(bytes=10, ipc_handle=one.handle[:63]),), "ranges[0].handle"),
        ((both,), "ranges[0].handle"),
        ((wire.DeviceRange(bytes=10, chunks=1),), "chunks"),
        ((by_handle(one, 10),) * 4_097, "ranges"),
    ):
        refusal = refused(imports, message(*ranges))
        assert (refusal.reason, refusal.field) == (Reason.DEVICE_MEMORY_INVALID, field)
    refusal = refused(imports, message(by_handle(one, 10), mapping_bytes=11))
    assert refusal.field == "mapping_bytes"


def test_a_plane_lies_wholly_inside_one_range(imports: Imports, engine: Engine) -> None:
    one, two = engine.alloc(MIB), engine.alloc(MIB)
    memory, _ = imports.map(message(by_handle(one, 1_000), by_handle(two, 1_000)), [])
    plan = memory.plan(group((0, 250, 250), (1_000, 100, 50)))
    assert isinstance(plan, DevicePlan)
    assert (plan.slot_bytes, plan.planes) == (300, 2)
    for bad in (
        group((1, 250, 250)),
        group((1_000, 100, 50), (700, 100, 100)),
        group((2_000, 1, 1)),
        group((0, 1 << 63, 1), blocks=1 << 62),
        group((0, 10, 20)),
        group(),
        wire.MappedGroup(group=7, num_blocks=1, base_offsets=[0, 1], block_strides=[1], fragment_bytes=[1]),
    ):
        with pytest.raises(Refusal) as error:
            memory.plan(bad)
        assert (error.value.reason, error.value.field) == (Reason.PLANE_BEYOND_MAPPING, "groups[7]")
    memory.unmap()


def test_a_mapping_that_fails_half_way_leaves_nothing_open(
    imports: Imports, engine: Engine, gpu: Gpu
) -> None:
    fds = [engine.chunk(CHUNK) for _ in range(2)]
    chunks = [imports.chunk(fd, CHUNK) for fd in fds]
    for fd in fds:
        os.close(fd)
    wanted = message(
        by_handle(engine.alloc(MIB), 100),
        wire.DeviceRange(bytes=10, chunks=1),
        by_handle(engine.alloc(MIB), 100),
        wire.DeviceRange(bytes=10, chunks=1),
    )
    for function in ("cuIpcOpenMemHandle_v2", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
        for n in (1, 2):
            gpu.fake.arm(function, n, 2, os.getpid())
            assert refused(imports, wanted, chunks).reason == Reason.DEVICE_OUT_OF_MEMORY
            memory, _ = imports.map(wanted, chunks)
            memory.unmap()
    for chunk in chunks:
        chunk.release()


def test_mapping_goes_on_while_other_memory_is_being_let_go_of(
    imports: Imports, engine: Engine, gpu: Gpu
) -> None:
    one, two = engine.alloc(MIB), engine.alloc(MIB, seed=2)
    memory, _ = imports.map(message(by_handle(one, 100)), [])
    gpu.fake.hang("cuIpcCloseMemHandle", 1, os.getpid())
    context = gpu.driver.retain_primary(0)

    def let_go() -> None:
        context.make_current()
        memory.unmap()

    slow = threading.Thread(target=let_go, daemon=True)
    slow.start()
    other, _ = imports.map(message(by_handle(two, 100)), [])
    assert first_byte_of(other, 0) == content(MIB, 2)[0]
    gpu.fake.lift(os.getpid())
    slow.join(30)
    assert not slow.is_alive()
    other.unmap()
    context.release()


def test_chunks_of_another_gpu_are_refused(imports: Imports, engine: Engine, gpu: Gpu) -> None:
    other = Engine(gpu.fake, ordinal=1)
    chunks = []
    try:
        for owner in (engine, other):
            fd = owner.chunk(CHUNK)
            chunks.append(imports.chunk(fd, CHUNK))
            os.close(fd)
        refusal = refused(imports, message(wire.DeviceRange(bytes=2 * CHUNK, chunks=2)), chunks)
    finally:
        for chunk in chunks:
            chunk.release()
        other.close()
    assert (refusal.reason, refusal.field) == (Reason.DEVICE_MEMORY_INVALID, "ranges[0].chunks")
    assert gpu.info.name in refusal.message


@dataclass
class Steps:
    """A driver whose slow calls are counted from step to step."""

    driver: Driver
    calls: int = 0
    calls_since: int = 0
    most: int = 0
    """Between two steps."""

    def step(self) -> None:
        self.calls_since = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.driver, name)
        if name not in (
            "ipc_open",
            "ipc_close",
            "map_chunk",
            "allow_access",
            "chunk_import",
            "chunk_release",
            "unmap",
        ):
            return method

        def counted(*arguments: Any) -> Any:
            self.calls += 1
            self.calls_since += 1
            self.most = max(self.most, self.calls_since)
            return method(*arguments)

        return counted


def test_much_memory_is_taken_and_let_go_of_in_steps(
    gpu: Gpu, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker is not stuck because its client has a thousand pieces of memory."""
    monkeypatch.setattr(imports_module, "ACCESS_CHUNKS", 2)
    steps = Steps(gpu.driver)
    imports = Imports(cast(Driver, steps), gpu.info, steps.step)
    fds = [engine.chunk(CHUNK) for _ in range(3)]
    chunks = [imports.chunk(fd, CHUNK) for fd in fds]
    for fd in fds:
        os.close(fd)
    handles = [by_handle(engine.alloc(MIB), 100) for _ in range(3)]
    wanted = message(*handles, wire.DeviceRange(bytes=10, chunks=3))
    memory, _ = imports.map(wanted, chunks)
    assert first_byte_of(memory, 309) == content(CHUNK, 0)[9]
    memory.unmap()
    gpu.fake.arm("cuMemSetAccess", 2, 2, os.getpid())
    refused(imports, wanted, chunks)
    for chunk in chunks:
        chunk.release()
    assert steps.calls == 30
    assert steps.most == 1
