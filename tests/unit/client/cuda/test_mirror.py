"""A mirror in host memory: every byte goes where it belongs, and no more memory is taken than is in use."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier import Group, KvtierError, Plane, Reason
from kvtier.cuda import DeviceMemory, MirrorMemory, mirror

from tests.support.engine_gpu import EngineGpu
from tests.unit.client.cuda.conftest import MakeGpu

pytestmark = pytest.mark.fake_gpu

PAGE = 4_096
BLOCKS = 32


def group(*planes: tuple[int, int, int], blocks: int = BLOCKS) -> Group:
    """(base, stride, fragment) each"""
    return Group(
        block_tokens=16,
        num_blocks=blocks,
        planes=tuple(
            Plane(base_offset=base, block_stride_bytes=stride, fragment_bytes=fragment)
            for base, stride, fragment in planes
        ),
    )


TWO_PLANES = group((0, 2 * PAGE, 2 * PAGE), (BLOCKS * 2 * PAGE, 2 * PAGE, 2 * PAGE))
SIZE = 2 * BLOCKS * 2 * PAGE


class Pair:
    """Device memory full of random bytes, and its mirror."""

    def __init__(self, gpu: EngineGpu, *groups: Group, size: int = SIZE) -> None:
        self.groups = groups or (TWO_PLANES,)
        self.address = gpu.alloc(size + 2 * PAGE) + PAGE
        self.device = gpu.view(self.address, size)
        self.device[:] = np.random.default_rng(7).integers(0, 256, size, dtype=np.uint8)
        self.before = self.device.copy()
        self.memory = DeviceMemory(self.address, size)
        self.mirror = MirrorMemory(self.memory, self.groups)
        self.host = self.mirror._buffer.array

    def inside(self, ids: list[int], number: int = 0) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which bytes belong to these blocks."""
        found = np.zeros(len(self.device), bool)
        for plane in self.groups[number].planes:
            for block in ids:
                start = plane.base_offset + block * plane.block_stride_bytes
                found[start : start + plane.fragment_bytes] = True
        return found


def test_what_is_copied_out_is_there_and_nothing_else(gpu: EngineGpu) -> None:
    pair = Pair(gpu)
    pair.mirror.copy_out([5, 3, 4, 31, 0])
    inside = pair.inside([5, 3, 4, 31, 0])
    assert np.array_equal(pair.host[inside], pair.before[inside])
    assert pair.mirror.held_bytes == 5 * 4 * PAGE
    assert not pair.host[~inside].any()
    pair.mirror.discard([5, 3, 4, 31, 0])
    assert pair.mirror.held_bytes <= BLOCKS * 4 * PAGE - 5 * 4 * PAGE, "reading took what was not there"
    assert not pair.host.any()


def test_what_is_copied_in_is_there_and_nothing_else(gpu: EngineGpu) -> None:
    pair = Pair(gpu)
    ids = [9, 8, 20]
    inside = pair.inside(ids)
    new = np.random.default_rng(8).integers(0, 256, SIZE, dtype=np.uint8)
    pair.host[inside] = new[inside]
    pair.mirror.copy_in(ids)
    assert np.array_equal(pair.device, np.where(inside, new, pair.before))
    assert pair.mirror.held_bytes == 0


def test_blocks_get_their_memory_before_they_are_loaded(gpu: EngineGpu) -> None:
    pair = Pair(gpu)
    ids = [9, 8, 20]
    pair.mirror.copy_out([9])
    pair.mirror.populate(ids)
    assert pair.mirror.held_bytes == len(ids) * 4 * PAGE
    assert np.array_equal(pair.host[pair.inside([9])], pair.before[pair.inside([9])]), "it was there before"
    pair.mirror.discard(ids)
    assert pair.mirror.held_bytes == 0


def test_a_mirror_of_a_large_cache_takes_nothing(gpu: EngineGpu) -> None:
    size = 512 << 20
    memory = DeviceMemory(gpu.alloc(size), size)
    made = MirrorMemory(memory, [group((0, size // BLOCKS, 4096))])
    assert made.size_bytes == os.fstat(made.fileno()).st_size == size
    made.copy_out([1, 2, 3])
    assert made.held_bytes == 3 * 4096
    made.close()


def test_blocks_larger_than_the_staging_memory_go_in_pieces(
    gpu: EngineGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "STAGING_BYTES", 3 * PAGE)
    pair = Pair(gpu)
    pair.mirror.copy_out(range(BLOCKS))
    assert np.array_equal(pair.host, pair.before)
    pair.device[:] = 0
    pair.mirror.copy_in(list(range(BLOCKS)), discard=False)
    assert np.array_equal(pair.device, pair.before)


def test_ranges_that_lie_apart_on_the_device_are_one_after_another_in_the_mirror(gpu: EngineGpu) -> None:
    with gpu.alloc_chunks(1, exportable=False) as chunks:
        half = BLOCKS * PAGE
        first = gpu.alloc(half)
        memory = DeviceMemory.join([DeviceMemory(first, half), DeviceMemory(chunks.address, half)])
        gpu.view(first, half)[:] = 1
        gpu.view(chunks.address, half)[:] = 2
        made = MirrorMemory(memory, [group((0, PAGE, PAGE), (half, PAGE, PAGE))])
        made.copy_out(range(BLOCKS))
        assert set(made._buffer.array[:half]) == {1}
        assert set(made._buffer.array[half:]) == {2}
        made.close()


def test_the_second_group_has_its_own_blocks(gpu: EngineGpu) -> None:
    pair = Pair(gpu, group((0, PAGE, PAGE)), group((BLOCKS * PAGE, 300, 200)))
    pair.mirror.copy_out([4], group=1)
    inside = pair.inside([4], 1)
    assert np.array_equal(pair.host[inside], pair.before[inside])
    assert not pair.host[~inside].any()
    with pytest.raises(KvtierError) as raised:
        pair.mirror.copy_out([4], group=2)
    assert raised.value.reason is Reason.UNKNOWN_GROUP


@pytest.mark.parametrize("bad", [[BLOCKS], [-1], [1, 1]])
def test_blocks_that_do_not_exist_are_refused_and_nothing_is_copied(gpu: EngineGpu, bad: list[int]) -> None:
    pair = Pair(gpu)
    for call in (pair.mirror.copy_out, pair.mirror.copy_in, pair.mirror.discard):
        with pytest.raises(KvtierError):
            call(bad)
    assert pair.mirror.held_bytes == 0


def test_a_shape_that_does_not_fit_is_refused(gpu: EngineGpu) -> None:
    memory = DeviceMemory(gpu.alloc(PAGE), PAGE)
    with pytest.raises(KvtierError) as raised:
        MirrorMemory(memory, [group((0, PAGE, PAGE))])
    assert raised.value.reason is Reason.PLANE_BEYOND_MAPPING


@pytest.mark.parametrize("version", [13000, 12040])
def test_a_copy_that_fails_is_over_when_that_is_said(make_gpu: MakeGpu, version: int) -> None:
    gpu = make_gpu(version=version)
    pair = Pair(gpu)
    pair.mirror.copy_out([0])
    pair.mirror.discard([0])
    call = "cuMemcpyAsync" if version == 12040 else "cuMemcpyBatchAsync_v2"
    gpu.fake.arm(call, 1, 1, os.getpid())
    waits = gpu.fake.calls("cuStreamSynchronize")
    with pytest.raises(KvtierError, match="failed") as raised:
        pair.mirror.copy_out([1, 3, 5])
    assert raised.value.reason is Reason.DEVICE_UNAVAILABLE
    assert gpu.fake.calls("cuStreamSynchronize") == waits + 1
    pair.mirror.copy_out([1, 3, 5])
    inside = pair.inside([1, 3, 5])
    assert np.array_equal(pair.host[inside], pair.before[inside])


@pytest.mark.parametrize("call", ["cuStreamCreateWithPriority", "cuMemHostRegister_v2"])
def test_what_could_not_be_prepared_is_prepared_the_next_time(gpu: EngineGpu, call: str) -> None:
    pair = Pair(gpu)
    gpu.fake.arm(call, 1, 2, os.getpid())
    with pytest.raises(KvtierError, match=call):
        pair.mirror.copy_out([1])
    pair.mirror.copy_out([1])
    inside = pair.inside([1])
    assert np.array_equal(pair.host[inside], pair.before[inside])


def test_the_engines_streams_and_contexts_are_left_alone(gpu: EngineGpu) -> None:
    pair = Pair(gpu)
    busy = gpu.stream()
    gpu.fake.delay(busy, 30)
    found: list[object] = []

    def copy() -> None:
        pair.mirror.copy_out(range(BLOCKS))
        found.append(gpu.driver.current_context())

    copying = threading.Thread(target=copy)
    copying.start()
    copying.join(15)
    assert found == [0]
    assert not gpu.driver.stream_is_done(busy)
    assert gpu.fake.calls("cuCtxSynchronize") == 0
    assert np.array_equal(pair.host, pair.before)


def test_several_threads_may_copy_other_blocks(gpu: EngineGpu) -> None:
    pair = Pair(gpu)
    parts = [list(range(start, BLOCKS, 4)) for start in range(4)]
    threads = [threading.Thread(target=pair.mirror.copy_out, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert np.array_equal(pair.host, pair.before)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ids=st.lists(st.integers(0, 15), unique=True),
    fragments=st.lists(st.integers(1, 700), min_size=1, max_size=3),
    gap=st.integers(0, 3),
)
def test_any_shape_there_and_back(gpu: EngineGpu, ids: list[int], fragments: list[int], gap: int) -> None:
    planes, base = [], 0
    for fragment in fragments:
        planes.append((base, fragment + gap, fragment))
        base += 16 * (fragment + gap)
    pair = Pair(gpu, group(*planes, blocks=16), size=base)
    pair.mirror.copy_out(ids)
    inside = pair.inside(ids)
    assert np.array_equal(pair.host, np.where(inside, pair.before, 0))
    pair.device[:] = 0
    pair.mirror.copy_in(ids)
    assert np.array_equal(pair.device, np.where(inside, pair.before, 0))
    gpu.driver.free(pair.address - PAGE)
    pair.host = np.zeros(0, np.uint8)
    pair.mirror.close()
