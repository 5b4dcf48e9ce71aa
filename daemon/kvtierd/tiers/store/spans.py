"""Ranges of an object that are read together, because little is between them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Span:
    """Bytes that are read at once, and for which of the ranges."""

    begin: int
    end: int
    places: list[int]


def joined(ranges: Sequence[tuple[int, int]], gap_bytes: int, span_bytes_max: int) -> list[Span]:
    """The spans that have all of these ranges, each given by its offset and length. Two ranges with no more
    than `gap_bytes` between them are read together, up to `span_bytes_max`."""
    spans: list[Span] = []
    for place in sorted(range(len(ranges)), key=lambda place: ranges[place][0]):
        begin, size_bytes = ranges[place]
        end = begin + size_bytes
        last = spans[-1] if spans else None
        near = last is not None and begin - last.end <= gap_bytes and end - last.begin <= span_bytes_max
        if last is not None and near:
            last.end = max(last.end, end)
            last.places.append(place)
        else:
            spans.append(Span(begin, end, [place]))
    return spans
