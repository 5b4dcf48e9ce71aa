"""When the chunks of a GPU's lanes are small."""

import pytest
from kvtierd.workers.copy.gpu.pacing import STEPPING_S, ChunkPace
from kvtierd.workers.lane_chunks import LaneChunks, Pacing

MIB = 1 << 20


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_chunks_are_small_while_an_engine_computes_and_large_again_afterwards() -> None:
    clock = Clock()
    pace = ChunkPace(LaneChunks(), clock)
    large = (32 * MIB, 16 * MIB, 2)
    assert (pace.bytes_of(load=True), pace.bytes_of(load=False), pace.flights) == large
    pace.stepped()
    assert (pace.bytes_of(load=True), pace.bytes_of(load=False), pace.flights) == (4 * MIB, 4 * MIB, 1)
    clock.now_s += STEPPING_S / 2
    pace.stepped()
    clock.now_s += STEPPING_S * 0.9
    assert pace.paced
    clock.now_s += STEPPING_S * 0.2
    assert (pace.bytes_of(load=True), pace.bytes_of(load=False), pace.flights) == large


@pytest.mark.parametrize(("pacing", "paced"), [(Pacing.ALWAYS, True), (Pacing.NEVER, False)])
def test_pacing_can_be_chosen(pacing: Pacing, paced: bool) -> None:
    pace = ChunkPace(LaneChunks(pacing=pacing), Clock())
    assert pace.paced is paced
    pace.stepped()
    assert pace.paced is paced


def test_a_paced_chunk_is_never_larger_than_the_usual_one() -> None:
    pace = ChunkPace(LaneChunks(store_bytes=MIB, flights=5, pacing=Pacing.ALWAYS))
    assert (pace.bytes_of(load=True), pace.bytes_of(load=False), pace.flights) == (4 * MIB, MIB, 1)
