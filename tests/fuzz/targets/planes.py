"""Where a client says that its planes lie: what the front accepts by unbounded arithmetic, the worker's
native plans must accept as well, and nothing outside of these planes may ever be touched."""

from __future__ import annotations

import functools
import itertools
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvtier.v1 import side_pb2
from kvtier_kernels import PAGE_BYTES, CopyPlan
from kvtierd.core.errors import Refusal
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc.memory_check import (
    F_SEAL_SHRINK,
    Descriptor,
    check_chunks,
    check_memory,
    check_ranges,
    ranges_of,
)
from kvtierd.wire import worker_pb2 as wire
from kvtierd.workers.copy.gpu.imports import GpuMemory

from tests.fuzz.messages import edited
from tests.fuzz.source import Source
from tests.fuzz.target import Target
from tests.fuzz.targets.hello import check_refusal

SMALL_BYTES = 64 << 10
"""Mappings up to this size are really copied from and to."""
LARGE_BYTES = 1 << 36
"""Addresses without memory, over which plans can be made."""
POOL_PAGES = 40
FILL, CANARY = 0x5A, 0xC3
NO_RESERVE = 0x4000
"""MAP_NORESERVE, which Python 3.11 has no name for."""
RANGE_ADDRESS = 1 << 44
"""Where the double of a GPU maps its first range; each range has so many addresses of its own."""


@functools.cache
def _addresses() -> memoryview:
    """A mapping that takes no memory as long as nobody touches it."""
    return memoryview(mmap.mmap(-1, LARGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE))


class _NoImports:
    """As far as `GpuMemory` knows what has imported its pieces."""

    def let_go(self, piece: object) -> None:
        """Nothing was imported."""


def _geometry(source: Source) -> tuple[GroupGeometry, ...]:
    """Of a Hello: sizes up to 2^32 - 1 in all, as its own checks allow."""
    groups = []
    for _ in range(source.below(3) + 1):
        sizes = [max(1, source.choice((64, 512, 1, 4096, source.number(16), source.hostile() % (1 << 30))))]
        sizes *= source.below(3) + 1
        groups.append(GroupGeometry(1, 16, 0, tuple((size, "kv") for size in sizes)))
    return tuple(groups)


def _request(source: Source, geometry: Sequence[GroupGeometry]) -> side_pb2.RegisterMemory:
    """A sound layout, planes one after the other, and then what an input makes of it."""
    request = side_pb2.RegisterMemory()
    blocks, offset = source.choice((4, 1, 2, 7, 1000)), 0
    for index, group in enumerate(geometry):
        place = request.groups.add(group=index, num_blocks=blocks)
        for size, _ in group.planes:
            stride = size + source.choice((0, 0, 64, 1))
            place.planes.add(base_offset=offset, block_stride_bytes=stride)
            offset += blocks * stride
    request.mapping_bytes = offset
    if source.flag():
        rest, pieces = offset, source.below(3)
        for piece in range(pieces):
            part = rest if piece == pieces - 1 else rest // 2
            request.ranges.add(bytes=part, ipc=side_pb2.CudaIpc(handle=bytes(64), offset=source.number(16)))
            rest -= part
    edited(request, source)
    return request


def run(data: bytes) -> None:
    source = Source(data)
    geometry = _geometry(source)
    request = _request(source, geometry)
    size_bytes = source.choice((request.mapping_bytes, SMALL_BYTES, source.hostile() % (1 << 63)))
    try:
        if ranges := ranges_of(request):
            chunks = [source.choice((4096, 8192, source.hostile())) for _ in range(source.below(4))]
            if chunks:
                check_chunks(len(chunks), chunks)
            check_ranges(ranges, chunks, request.mapping_bytes, request.groups, geometry)
        else:
            found = Descriptor(True, size_bytes, size_bytes, F_SEAL_SHRINK, writable=True)
            check_memory(found, request.mapping_bytes, request.groups, geometry, sparse=source.flag())
    except Refusal as refusal:
        check_refusal(refusal)
        return
    for place, group in zip(request.groups, geometry, strict=True):
        mapped = wire.MappedGroup(
            group=place.group,
            num_blocks=place.num_blocks,
            base_offsets=[plane.base_offset for plane in place.planes],
            block_strides=[plane.block_stride_bytes for plane in place.planes],
            fragment_bytes=[size for size, _ in group.planes],
        )
        if ranges:
            _check_device(mapped, [(part.bytes, RANGE_ADDRESS) for part in ranges], source)
        elif request.mapping_bytes <= SMALL_BYTES:
            _check_copies(mapped, request.mapping_bytes, source)
        elif request.mapping_bytes <= LARGE_BYTES:
            plan = _plan(_addresses()[: request.mapping_bytes], mapped)
            assert plan.slot_bytes == sum(mapped.fragment_bytes)


def _plan(memory: memoryview, group: wire.MappedGroup) -> CopyPlan:
    return CopyPlan(
        memory,
        np.array(group.base_offsets, np.uint64),
        np.array(group.block_strides, np.uint64),
        np.array(group.fragment_bytes, np.uint64),
        group.num_blocks,
    )


def _ids(source: Source, blocks: int) -> list[int]:
    """Blocks of a copy: most often blocks that there are, each once."""
    last = [blocks - 1] if source.flag() else []
    wanted = [*last, *(source.below(blocks) for _ in range(source.below(4)))]
    if source.one_in(8):
        wanted.append(source.choice((blocks, blocks + 1, (1 << 32) - 1)))
    return [each & 0xFFFF_FFFF for each in (wanted if source.one_in(4) else dict.fromkeys(wanted))]


def _fragments(group: wire.MappedGroup, block: int) -> list[tuple[int, int]]:
    planes = zip(group.base_offsets, group.block_strides, group.fragment_bytes, strict=True)
    return [(base + block * stride, size) for base, stride, size in planes]


def _check_copies(group: wire.MappedGroup, mapping_bytes: int, source: Source) -> None:
    """Copies to the engine and back, in memory with canaries around it, and compares with plain Python."""
    around = np.full(mapping_bytes + 2 * PAGE_BYTES, CANARY, np.uint8)
    memory = around[PAGE_BYTES : PAGE_BYTES + mapping_bytes]
    memory[:] = FILL
    plan = _plan(memory.data, group)
    pool = np.arange(POOL_PAGES * PAGE_BYTES, dtype=np.uint32).astype(np.uint8) ^ np.uint8(0x33)
    ids = _ids(source, group.num_blocks)
    pages = -(-plan.slot_bytes // PAGE_BYTES)
    slots = [1 + number * pages + source.below(2) for number in range(len(ids))]
    if source.one_in(8):
        slots = [source.hostile() & 0xFFFF_FFFF for _ in ids]
    id_array, slot_array = np.array(ids, np.uint32), np.array(slots, np.uint32)
    expected = around.copy()
    pool_before = pool.copy()
    try:
        plan.scatter(id_array, pool.data, slot_array)
    except ValueError:
        pass
    else:
        for block, slot in zip(ids, slots, strict=True):
            at = slot * PAGE_BYTES
            for begin, size in _fragments(group, block):
                expected[PAGE_BYTES + begin : PAGE_BYTES + begin + size] = pool[at : at + size]
                at += size
    # Planes may lie over each other, which is the engine's affair. It is then known where nothing landed.
    touched = _touched(group, ids, len(around))
    assert (around[~touched] == expected[~touched]).all(), "a load wrote outside of its blocks"
    if _apart(group):
        assert (around == expected).all(), "a load did not write what the slots hold"
    assert (pool == pool_before).all(), "a load wrote to the pool"
    _check_gather(plan, group, around, pool, id_array, slot_array)


def _check_gather(
    plan: CopyPlan,
    group: wire.MappedGroup,
    around: npt.NDArray[np.uint8],
    pool: npt.NDArray[np.uint8],
    ids: npt.NDArray[np.uint32],
    slots: npt.NDArray[np.uint32],
) -> None:
    memory_before, expected = around.copy(), pool.copy()
    try:
        plan.gather(ids, pool.data, slots, np.empty(len(ids), np.uint64))
    except ValueError:
        pass
    else:
        for block, slot in zip(ids.tolist(), slots.tolist(), strict=True):
            at = slot * PAGE_BYTES
            for begin, size in _fragments(group, block):
                expected[at : at + size] = around[PAGE_BYTES + begin : PAGE_BYTES + begin + size]
                at += size
    assert (pool == expected).all(), "a store did not write its blocks, or wrote outside of its slots"
    assert (around == memory_before).all(), "a store wrote to the engine's memory"


def _touched(group: wire.MappedGroup, ids: Sequence[int], length: int) -> npt.NDArray[np.bool_]:
    touched = np.zeros(length, bool)
    for block in ids:
        for begin, size in _fragments(group, block) if block < group.num_blocks else ():
            touched[PAGE_BYTES + begin : PAGE_BYTES + begin + size] = True
    return touched


def _apart(group: wire.MappedGroup) -> bool:
    """Whether no two planes take the same bytes, as far as their spans tell."""
    planes = zip(group.base_offsets, group.block_strides, group.fragment_bytes, strict=True)
    spans = sorted((base, base + (group.num_blocks - 1) * stride + size) for base, stride, size in planes)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def _check_device(group: wire.MappedGroup, ranges: Sequence[tuple[int, int]], source: Source) -> None:
    """Plans copies in a GPU's addresses: each lies in one range, and in its block's fragments."""
    if any(size > RANGE_ADDRESS for size, _ in ranges):
        return  # more than one range has addresses for here; no GPU has so much either
    memory = GpuMemory(_NoImports())  # type: ignore[arg-type]
    spans = []
    for number, (size, _) in enumerate(ranges):
        address = (number + 1) * RANGE_ADDRESS
        memory.add(size, address, None)  # type: ignore[arg-type]
        spans.append((address, address + size))
    plan = memory.plan(group)
    assert plan.slot_bytes == sum(group.fragment_bytes)
    ids = _ids(source, group.num_blocks)
    pages = -(-plan.slot_bytes // PAGE_BYTES)
    slots = [1 + number * pages for number in range(len(ids))]
    if slots and slots[-1] + pages >= 1 << 32:
        return
    pool_bytes = (slots[-1] + pages if slots else 1) * PAGE_BYTES
    for to_device in (False, True):
        try:
            devices, hosts, sizes = plan.describe(
                np.array(ids, np.uint32), PAGE_BYTES, pool_bytes, np.array(slots, np.uint32), to_device
            )
        except ValueError:
            continue
        copied = 0
        for device, host, size in zip(devices.tolist(), hosts.tolist(), sizes.tolist(), strict=True):
            assert any(begin <= device and device + size <= end for begin, end in spans), "outside of a range"
            assert 2 * PAGE_BYTES <= host <= host + size <= PAGE_BYTES + pool_bytes, "outside of the pool"
            copied += size
        assert copied == plan.slot_bytes * len(ids)


TARGET = Target(run, ("kvtierd.rpc.memory_check", "kvtierd.workers.copy.gpu.imports"), bytes_max=300)
