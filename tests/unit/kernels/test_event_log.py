"""The log of a recording: everything comes out as it went in, within its bounds, and each hash as the eight
bytes that arithmetic in Python makes of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_kernels import EventLog

Bytes = npt.NDArray[np.uint8]
WORD = (1 << 64) - 1


class Given(NamedTuple):
    numbers: tuple[int, int, int, int, int]
    """Kind, time, place, hits, part."""
    behind: Bytes | None
    hashes: Bytes


def mixed(hashes: Bytes, secret: bytes) -> list[int]:
    factors = [word | 1 for word in np.frombuffer(secret, "<u8").tolist()]
    rows = np.ascontiguousarray(hashes).view("<u8").tolist()
    return [
        sum((word ^ word >> 32) * factor for word, factor in zip(row, factors, strict=True)) & WORD
        for row in rows
    ]


def rows(count: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


@st.composite
def events(draw: st.DrawFn) -> Given:
    words = st.integers(0, (1 << 32) - 1)
    numbers = (draw(words), draw(st.integers(0, WORD)), draw(words), draw(words), draw(words))
    behind = draw(st.none() | st.integers(0, 2))
    seed = draw(words)
    return Given(
        numbers, None if behind is None else rows(behind, seed), rows(draw(st.integers(0, 5)), ~seed & WORD)
    )


def add(log: EventLog, event: Given) -> bool:
    return log.add(*event.numbers, event.hashes, event.behind)


@given(
    st.lists(events(), max_size=12),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 600),
    st.integers(0, 600),
)
def test_what_had_room_comes_out_as_it_went_in(
    given_events: list[Given], secret: bytes, bytes_max: int, part_bytes_max: int
) -> None:
    log = EventLog(bytes_max, secret)
    for _ in range(2):
        taken: list[tuple[int, ...]] = []
        words: list[int] = []
        for event in given_events:
            before = log.size_bytes
            both = event.hashes if event.behind is None else np.concatenate((event.behind, event.hashes))
            size_bytes = EventLog.bytes_of(len(both))
            fits = before + size_bytes <= bytes_max
            assert add(log, event) == fits
            assert log.size_bytes == before + size_bytes * fits
            if fits:
                kind, time_us, place, hits, part = event.numbers
                taken.append((kind, time_us, place, len(both), hits, part))
                words += mixed(both, secret)
        while True:
            had_bytes = log.size_bytes
            first, found = log.take(part_bytes_max)
            size_bytes = len(first) + len(found)
            assert log.size_bytes == had_bytes - size_bytes
            rows_taken = [tuple(row) for row in np.frombuffer(first, "<u8").reshape(-1, 6).tolist()]
            count = len(rows_taken)
            assert size_bytes <= part_bytes_max or count == 1
            assert rows_taken == taken[:count]
            if len(taken) > count:
                assert size_bytes + EventLog.bytes_of(taken[count][3]) > part_bytes_max
            hashes = sum(row[3] for row in rows_taken)
            assert np.frombuffer(found, "<u8").tolist() == words[:hashes]
            del taken[:count], words[:hashes]
            if not count:
                break
        assert (taken, words) == ([], [])
        assert log.size_bytes == 0


def test_what_is_no_hash_is_refused_by_name() -> None:
    log = EventLog(1_000, bytes(32))
    short = np.zeros((2, 31), np.uint8)
    with pytest.raises(ValueError, match="hashes has rows of 31 elements"):
        log.add(1, 2, 3, 4, 5, short)
    with pytest.raises(ValueError, match="behind has rows of 31 elements"):
        log.add(1, 2, 3, 4, 5, rows(1, 1), short)
    with pytest.raises(ValueError, match="secret has 31 bytes"):
        EventLog(1_000, bytes(31))
    assert log.size_bytes == 0
