"""In which shape a GPU's worker hands blocks to the driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from kvtier_kernels import DevicePlan
from kvtierd.workers.copy.gpu.copying import Descriptors
from kvtierd.workers.copy.gpu.device import descriptors_of

from tests.support.fake_cuda import FakeCuda

KIB = 1 << 10
POOL_BYTES = 64 << 20
BATCH, LOOP, ROWS = "cuMemcpyBatchAsync_v2", "cuMemcpyAsync", "cuMemcpy2DAsync_v2"
LAYER_BYTES = 1 << 20
SLOT_PAGES = 512


class Place:
    """Device memory, a registered pool, and a stream of the double."""

    def __init__(self, fake: FakeCuda) -> None:
        self.fake = fake
        self.driver = fake.driver()
        self.context = self.driver.retain_primary(0)
        self.context.push()
        self.memory = self.driver.alloc(POOL_BYTES)
        self.host = np.zeros(POOL_BYTES, np.uint8)
        self.driver.host_register(self.host.ctypes.data, POOL_BYTES)
        self.stream = self.driver.stream_create()

    def descriptors(self, method: str, *, to_device: bool) -> Descriptors:
        pool = SimpleNamespace(address=self.host.ctypes.data, pool_bytes=POOL_BYTES, borders=None)
        return descriptors_of(self.driver, method, cast(Any, pool), self.stream, to_device=to_device)

    def plan(self, planes: int, fragment_bytes: int, distances: list[int] | None = None) -> DevicePlan:
        """Layers one after another, or at these distances."""
        steps = distances or [LAYER_BYTES] * planes
        bases = np.uint64(self.memory) + np.cumsum([0, *steps[: planes - 1]]).astype(np.uint64)
        same = np.full(planes, fragment_bytes, np.uint64)
        return DevicePlan(bases, same, same, LAYER_BYTES // fragment_bytes)

    def copied(
        self, plan: DevicePlan, blocks: list[int], *, to_device: bool, method: str = "auto"
    ) -> set[str]:
        """Copies the blocks; returns which of the driver's functions did it."""
        names = (BATCH, LOOP, ROWS)
        before = {name: self.fake.calls(name) for name in names}
        slots = np.arange(1, 1 + SLOT_PAGES * len(blocks), SLOT_PAGES, dtype=np.uint32)
        ids = np.array(blocks, np.uint32)
        self.descriptors(method, to_device=to_device).planned(plan, ids, cast(Any, slots))()
        self.driver.stream_synchronize(self.stream)
        return {name for name in names if self.fake.calls(name) > before[name]}

    def close(self) -> None:
        self.driver.host_unregister(self.host.ctypes.data)
        self.driver.stream_destroy(self.stream)
        self.context.pop()
        self.context.release()


@pytest.fixture
def version() -> int:
    """Of the driver."""
    return 13_000


@pytest.fixture
def place(make_fake_cuda: Callable[..., FakeCuda], version: int) -> Iterator[Place]:
    place = Place(make_fake_cuda(version=version))
    yield place
    place.close()


pytestmark = pytest.mark.fake_gpu
SCATTERED = [7, 2, 11, 5]


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("fragment_bytes", [8 * KIB, 64 * KIB])
def test_layers_at_equal_distances_are_rows_of_one_copy(
    place: Place, to_device: bool, fragment_bytes: int
) -> None:
    assert place.copied(place.plan(16, fragment_bytes), SCATTERED, to_device=to_device) == {ROWS}


@pytest.mark.parametrize("to_device", [True, False])
def test_blocks_of_one_fragment_go_in_batches(place: Place, to_device: bool) -> None:
    assert place.copied(place.plan(1, 64 * KIB), SCATTERED, to_device=to_device) == {BATCH}


def test_a_few_large_layers_go_in_batches(place: Place) -> None:
    """Two-dimensional copies would cost more than they save."""
    assert place.copied(place.plan(4, 64 * KIB), SCATTERED, to_device=True) == {BATCH}


def test_layers_at_other_distances_go_in_batches_if_they_are_large(place: Place) -> None:
    apart = [LAYER_BYTES * (1 + number % 3) for number in range(16)]
    assert place.copied(place.plan(16, 32 * KIB, apart), SCATTERED, to_device=True) == {BATCH}
    assert place.copied(place.plan(16, 8 * KIB, apart), SCATTERED, to_device=False) == {BATCH}


@pytest.mark.parametrize("planes", [1, 2, 16])
def test_small_fragments_to_the_device_never_go_in_batches(place: Place, planes: int) -> None:
    """A driver would put them into its commands, which take a slice of the multiprocessors."""
    apart = [LAYER_BYTES * (1 + number % 3) for number in range(16)]
    assert place.copied(place.plan(planes, 8 * KIB, apart), SCATTERED, to_device=True) == {ROWS}


@pytest.mark.parametrize("version", [12_040])
def test_without_batches_two_fragments_are_worth_a_copy_of_rows(place: Place) -> None:
    assert place.copied(place.plan(2, 64 * KIB), SCATTERED, to_device=False) == {ROWS}
    assert place.copied(place.plan(1, 64 * KIB), SCATTERED, to_device=False) == {LOOP}


def test_a_method_that_was_asked_for_is_kept(place: Place) -> None:
    plan = place.plan(16, 8 * KIB)
    for method, name in (("batch", BATCH), ("loop", LOOP), ("rows", ROWS)):
        assert place.copied(plan, SCATTERED, to_device=True, method=method) == {name}
    large = place.plan(1, 64 * KIB)
    assert place.copied(large, SCATTERED, to_device=True, method="rows") == {ROWS}
