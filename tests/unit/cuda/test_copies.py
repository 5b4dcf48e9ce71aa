"""Batched copies by every method that a driver has, byte by byte."""

import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtier_kernels.cuda import DESCRIPTORS_PER_CALL, Copies, CopyMethod, CudaError, CudaUnavailableError
from numpy.typing import NDArray

from tests.unit.cuda.conftest import Gpu, random_bytes

METHODS = {
    13000: (CopyMethod.BATCH_V2, CopyMethod.BATCH, CopyMethod.LOOP),
    12080: (CopyMethod.BATCH, CopyMethod.LOOP),
    12040: (CopyMethod.LOOP,),
}
BYTES = 4 << 20
U64 = NDArray[np.uint64]


class Rig:
    """Device memory and registered host memory of the same size, and a stream."""

    def __init__(self, gpu: Gpu, n: int = BYTES) -> None:
        self.gpu, self.driver, self.n = gpu, gpu.driver, n
        self._map = mmap.mmap(-1, n)
        self.host = np.frombuffer(self._map, np.uint8)
        self.host_address: int = self.host.ctypes.data
        self.driver.host_register(self.host_address, n)
        self.device = self.driver.alloc(n)
        self.stream = self.driver.stream_create()

    def device_bytes(self) -> NDArray[np.uint8]:
        self.driver.stream_synchronize(self.stream)
        out = np.zeros(self.n, np.uint8)
        self.driver.copy_to_host(out.ctypes.data, self.device, self.n)
        return out

    def set_device(self, data: NDArray[np.uint8]) -> None:
        self.driver.copy_to_device(self.device, data.ctypes.data, data.size)

    def close(self) -> None:
        self.driver.stream_synchronize(self.stream)
        self.driver.stream_destroy(self.stream)
        self.driver.free(self.device)
        self.driver.host_unregister(self.host_address)


@pytest.fixture
def rig(gpu_of_version: Gpu):
    rig = Rig(gpu_of_version)
    yield rig
    rig.close()


def u64(values: Any) -> U64:
    return np.asarray(values, np.uint64)


def test_the_newest_form_the_driver_has_is_chosen(gpu_of_version: Gpu, version: int) -> None:
    copies = Copies(gpu_of_version.driver)
    assert copies.method is METHODS[version][0]
    assert copies.method.value in copies.describe()
    assert {13000: "13.0", 12080: "12.8", 12040: "12.4"}[version] in copies.describe()


def test_a_form_the_driver_lacks_is_refused_and_every_other_can_be_chosen(
    gpu_of_version: Gpu, version: int
) -> None:
    for method in CopyMethod:
        if method in METHODS[version]:
            assert Copies(gpu_of_version.driver, method).method is method
        else:
            with pytest.raises(CudaUnavailableError, match=f"{method.value}.*needs a newer driver"):
                Copies(gpu_of_version.driver, method)


@pytest.mark.parametrize("prefer_overlap", [False, True])
def test_every_method_copies_the_same_bytes_both_ways(rig: Rig, version: int, prefer_overlap: bool) -> None:
    """3 descriptors more than two calls take, scattered, none of a round size."""
    n = 2 * DESCRIPTORS_PER_CALL + 3
    room = BYTES // n
    chance = np.random.default_rng(version)
    sizes = u64(chance.integers(1, room + 1, n))
    sources, targets = u64(chance.permutation(n) * room), u64(chance.permutation(n) * room)
    for method in METHODS[version]:
        copies = Copies(rig.driver, method, prefer_overlap=prefer_overlap)
        data = random_bytes(BYTES, seed=1)
        expected = np.full(BYTES, 0xA5, np.uint8)
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            expected[target : target + size] = data[source : source + size]

        rig.set_device(np.full(BYTES, 0xA5, np.uint8))
        rig.host[:] = data
        copies.to_device(targets + u64(rig.device), sources + u64(rig.host_address), sizes, rig.stream)
        assert (rig.device_bytes() == expected).all(), method

        rig.set_device(data)
        rig.host[:] = 0xA5
        copies.to_host(targets + u64(rig.host_address), sources + u64(rig.device), sizes, rig.stream)
        rig.driver.stream_synchronize(rig.stream)
        assert (rig.host == expected).all(), method


@given(
    spans=st.lists(st.tuples(st.integers(1, 700), st.integers(0, 300)), min_size=0, max_size=60),
    seed=st.integers(0, 2**32 - 1),
)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
def test_any_descriptors_copy_exactly_their_bytes(rig: Rig, spans: list[tuple[int, int]], seed: int) -> None:
    sizes = u64([size for size, _ in spans])
    gaps = u64([gap for _, gap in spans])
    starts = u64(np.cumsum(sizes + gaps, dtype=np.uint64) - sizes)
    order = np.random.default_rng(seed).permutation(len(spans))
    data = random_bytes(1 << 17, seed)
    rig.host[: data.size] = data
    rig.set_device(np.zeros(1 << 17, np.uint8))
    copies = Copies(rig.driver)
    copies.to_device(
        (starts + u64(rig.device))[order], (starts + u64(rig.host_address))[order], sizes[order], rig.stream
    )
    expected = np.zeros(1 << 17, np.uint8)
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        expected[start : start + size] = data[start : start + size]
    assert (rig.device_bytes()[: 1 << 17] == expected).all()


@given(
    copies_wanted=st.lists(
        st.tuples(st.integers(1, 300), st.integers(1, 9), st.integers(0, 50), st.integers(0, 50)), max_size=20
    ),
    to_device=st.booleans(),
)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
def test_rows_copy_exactly_their_bytes(
    rig: Rig, copies_wanted: list[tuple[int, int, int, int]], to_device: bool
) -> None:
    room, area = 350 * 9, 1 << 17
    width, rows = u64([c[0] for c in copies_wanted]), u64([c[1] for c in copies_wanted])
    device_pitch, host_pitch = (
        u64([c[0] + c[2] for c in copies_wanted]),
        u64([c[0] + c[3] for c in copies_wanted]),
    )
    starts = u64(np.arange(len(copies_wanted)) * room)
    source, before = random_bytes(area, seed=3), random_bytes(area, seed=4)
    expected = before.copy()
    source_pitch, target_pitch = (host_pitch, device_pitch) if to_device else (device_pitch, host_pitch)
    for i, start in enumerate(starts.tolist()):
        for row in range(int(rows[i])):
            at, to, n = start + row * int(source_pitch[i]), start + row * int(target_pitch[i]), int(width[i])
            expected[to : to + n] = source[at : at + n]
    rig.host[:area] = source if to_device else before
    rig.set_device(before if to_device else source)
    copies = Copies(rig.driver)
    call = copies.rows_to_device if to_device else copies.rows_to_host
    call(
        starts + u64(rig.device),
        starts + u64(rig.host_address),
        width,
        rows,
        device_pitch,
        host_pitch,
        rig.stream,
    )
    device = rig.device_bytes()
    got = device if to_device else rig.host
    assert (got[:area] == expected).all()


def test_nothing_to_copy_is_no_call(rig: Rig, version: int) -> None:
    nothing = u64([])
    copying = [name for name in rig.gpu.fake.functions() if "Memcpy" in name]
    before = [rig.gpu.calls(name) for name in copying]
    for method in METHODS[version]:
        copies = Copies(rig.driver, method)
        copies.to_device(nothing, nothing, nothing, rig.stream)
        copies.to_host(nothing, nothing, nothing, rig.stream)
        copies.rows_to_host(nothing, nothing, nothing, nothing, nothing, nothing, rig.stream)
    assert [rig.gpu.calls(name) for name in copying] == before


def test_a_batch_takes_as_few_calls_as_the_limit_allows(rig: Rig, version: int) -> None:
    n = 3 * DESCRIPTORS_PER_CALL
    offsets, sizes = u64(np.arange(n)), u64(np.ones(n))
    symbol = {13000: "cuMemcpyBatchAsync_v2", 12080: "cuMemcpyBatchAsync", 12040: "cuMemcpyAsync"}[version]
    before = rig.gpu.calls(symbol)
    Copies(rig.driver).to_device(
        offsets + u64(rig.device), offsets + u64(rig.host_address), sizes, rig.stream
    )
    assert rig.gpu.calls(symbol) - before == (n if version == 12040 else 3)


def test_a_failed_call_names_its_descriptors(rig: Rig, version: int) -> None:
    n = DESCRIPTORS_PER_CALL + 100
    offsets, sizes = u64(np.arange(n)), u64(np.ones(n))
    host = offsets + u64(rig.host_address)
    host[DESCRIPTORS_PER_CALL + 50] = 0x1000
    for method in METHODS[version]:
        with pytest.raises(CudaError) as refused:
            Copies(rig.driver, method).to_device(offsets + u64(rig.device), host, sizes, rig.stream)
        error = refused.value
        assert (
            error.call
            == {
                CopyMethod.BATCH_V2: "cuMemcpyBatchAsync_v2",
                CopyMethod.BATCH: "cuMemcpyBatchAsync",
                CopyMethod.LOOP: "cuMemcpyAsync",
            }[method]
        )
        if method is CopyMethod.LOOP:
            assert f"descriptor {DESCRIPTORS_PER_CALL + 50} of {n}" in str(error)
        else:
            assert f"descriptors {DESCRIPTORS_PER_CALL} to {n - 1} of {n}" in str(error)
        rig.driver.stream_synchronize(rig.stream)


def test_arrays_that_cannot_be_passed_as_they_are_are_refused_by_name(rig: Rig) -> None:
    copies = Copies(rig.driver)
    good = u64([rig.device])
    bad: Any
    for bad in (good.astype(np.int64), good.reshape(1, 1), u64(np.arange(10))[::2]):
        with pytest.raises(ValueError, match=r"src is .*must be a contiguous array of uint64"):
            copies.to_device(good, bad, good, rig.stream)
    with pytest.raises(ValueError, match="sizes has 2 elements, the arrays before it have 1"):
        copies.to_host(good, good, u64([1, 2]), rig.stream)
    with pytest.raises(ValueError, match="host_pitch is int64"):
        copies.rows_to_device(good, good, good, good, good, good.astype(np.int64), rig.stream)


def test_the_null_stream_is_refused(rig: Rig) -> None:
    one = u64([1])
    copies = Copies(rig.driver)
    with pytest.raises(ValueError, match="stream is 0"):
        copies.to_device(one, one, one, 0)
    with pytest.raises(ValueError, match="stream is 0"):
        copies.rows_to_device(one, one, one, one, one, one, 0)


def test_arrays_may_be_read_only_and_go_after_the_call(rig: Rig) -> None:
    offsets, sizes = u64(np.arange(1000)), u64(np.ones(1000))
    offsets.setflags(write=False)
    sizes.setflags(write=False)
    device, host = offsets + u64(rig.device), offsets + u64(rig.host_address)
    rig.host[:1000] = 9
    Copies(rig.driver).to_device(device, host, sizes, rig.stream)
    device[:] = host[:] = 0
    del device, host
    assert (rig.device_bytes()[:1000] == 9).all()
