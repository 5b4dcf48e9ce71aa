"""Ranges of an object that lie near each other are read together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvtierd.tiers.store.obstore_store import COALESCED_BYTES, SPAN_BYTES_MAX
from kvtierd.tiers.store.spans import joined

MIB = 1 << 20
RANGES = st.lists(st.tuples(st.integers(0, 40 * MIB), st.integers(1, 3 * MIB)), max_size=20)


@given(RANGES)
def test_each_range_lies_in_one_span_and_spans_are_bounded(ranges: list[tuple[int, int]]) -> None:
    spans = joined(ranges, COALESCED_BYTES, SPAN_BYTES_MAX)
    assert sorted(place for span in spans for place in span.places) == list(range(len(ranges)))
    for span in spans:
        parts = [ranges[place] for place in span.places]
        assert span.begin == min(begin for begin, _ in parts)
        assert span.end == max(begin + size for begin, size in parts)
        assert span.end - span.begin <= SPAN_BYTES_MAX or len(parts) == 1
    begins = [span.begin for span in spans]
    assert begins == sorted(begins)


def test_neighbours_are_one_read_and_others_are_not() -> None:
    def spans(*ranges: tuple[int, int]) -> list[tuple[int, int]]:
        return [(span.begin, span.end) for span in joined(ranges, COALESCED_BYTES, SPAN_BYTES_MAX)]

    assert spans((4_096, 100), (0, 4_096)) == [(0, 4_196)]
    assert spans((0, 10), (10 + COALESCED_BYTES, 5)) == [(0, 15 + COALESCED_BYTES)]
    assert spans((0, 10), (11 + COALESCED_BYTES, 5)) == [
        (0, 10),
        (11 + COALESCED_BYTES, 16 + COALESCED_BYTES),
    ]
    assert spans() == []
