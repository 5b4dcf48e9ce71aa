"""When the chunks of a GPU's lanes are small, and how its copies are handed over."""

from collections.abc import Callable
from typing import Any, cast

import pytest
from kvtierd.workers.copy.gpu.device import descriptors_of
from kvtierd.workers.copy.gpu.pacing import STEPPING_S, ChunkPace
from kvtierd.workers.lane_chunks import LaneChunks, Pacing

from tests.support.fake_cuda import FakeCuda

MIB = 1 << 20


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_chunks_are_small_while_an_engine_computes_and_large_again_afterwards() -> None:
    clock = Clock()
    pace = ChunkPace(LaneChunks(), clock)
    large, small = (32 * MIB, 16 * MIB), (8 * MIB, 8 * MIB)
    assert (pace.bytes_of(load=True), pace.bytes_of(load=False)) == large
    pace.stepped()
    assert (pace.bytes_of(load=True), pace.bytes_of(load=False)) == small
    clock.now_s += STEPPING_S / 2
    pace.stepped()
    clock.now_s += STEPPING_S * 0.9
    assert pace.paced
    clock.now_s += STEPPING_S * 0.2
    assert (pace.bytes_of(load=True), pace.bytes_of(load=False)) == large


def test_chunks_that_other_tenants_wait_for_are_smaller_but_no_smaller_than_paced_ones() -> None:
    clock = Clock()
    pace = ChunkPace(LaneChunks(), clock)
    assert LaneChunks().paced_bytes <= pace.bytes_of(load=True, shared=True) < pace.bytes_of(load=True)
    assert pace.bytes_of(load=False, shared=True) == pace.bytes_of(load=False)
    pace.stepped()
    assert pace.bytes_of(load=True, shared=True) == LaneChunks().paced_bytes
    small = ChunkPace(LaneChunks(load_bytes=MIB), clock)
    assert small.bytes_of(load=True, shared=True) == MIB


@pytest.mark.parametrize(("pacing", "paced"), [(Pacing.ALWAYS, True), (Pacing.NEVER, False)])
def test_pacing_can_be_chosen(pacing: Pacing, paced: bool) -> None:
    pace = ChunkPace(LaneChunks(pacing=pacing), Clock())
    assert pace.paced is paced
    pace.stepped()
    assert pace.paced is paced


def test_a_paced_chunk_is_never_larger_than_the_usual_one() -> None:
    pace = ChunkPace(LaneChunks(store_bytes=MIB, pacing=Pacing.ALWAYS))
    assert (pace.bytes_of(load=True), pace.bytes_of(load=False)) == (8 * MIB, MIB)


@pytest.mark.fake_gpu
@pytest.mark.parametrize(
    ("version", "hinted"), [(12_080, False), (13_000, False), (13_010, True), (14_000, True)]
)
def test_batches_carry_the_overlap_flag_where_the_driver_heeds_it(
    make_fake_cuda: Callable[..., FakeCuda], version: int, hinted: bool
) -> None:
    driver = make_fake_cuda(version=version).driver()
    for method in ("auto", "batch"):
        how = descriptors_of(driver, method, cast(Any, None), 1, to_device=True).how
        assert ("to overlap with kernels" in how) is hinted
    assert "overlap" not in descriptors_of(driver, "loop", cast(Any, None), 1, to_device=True).how
