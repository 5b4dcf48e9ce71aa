"""Checksums are the published XXH3: other tools and later releases must read what this one wrote."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtier_kernels import xxh3_64, xxh3_64_rows


@pytest.mark.parametrize(
    ("length", "expected"),
    # Computed with xxHash's own library: one for each of the algorithm's ranges of length.
    [
        (0, 0x2D06800538D394C2),
        (3, 0x5F4299FC161C9CBB),
        (10, 0xAB69A08EF83D8F77),
        (100, 0x004E4F921A64BD1C),
        (200, 0xF42A8864FEAF0703),
        (1000, 0x33EF703FB2B20ED1),
        (100000, 0x42C23AEEAD96750D),
    ],
)
def test_known_values(length: int, expected: int) -> None:
    assert xxh3_64(bytes(i % 251 for i in range(length))) == expected


@given(st.binary(max_size=3000))
def test_every_kind_of_buffer_gives_the_same_number(data: bytes) -> None:
    expected = xxh3_64(data)
    array = np.frombuffer(b"x" + data, np.uint8)[1:]
    assert xxh3_64(bytearray(data)) == xxh3_64(memoryview(data)) == xxh3_64(array) == expected
    assert xxh3_64_rows(np.stack([array, array])).tolist() == [expected, expected]


def test_rows_are_summed_one_by_one() -> None:
    rows = np.random.default_rng(1).integers(0, 256, (7, 1000), dtype=np.uint8)
    assert xxh3_64_rows(rows).tolist() == [xxh3_64(row.tobytes()) for row in rows]
    assert xxh3_64_rows(rows[:0]).tolist() == []


@pytest.mark.parametrize("bad", [np.zeros((4, 4), np.uint8)[:, ::2], "text", None, 5])
def test_what_is_no_contiguous_buffer_is_refused(bad: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        xxh3_64(bad)  # type: ignore[arg-type]


def test_rows_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="rows has elements of format 'I' and 4 bytes; expected uint8"):
        xxh3_64_rows(np.zeros((2, 2), np.uint32))
