"""What docs/sizing.md says of a pool's room is what pools have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kvtierd.memory.pool_file import default_extent_bytes, geometry_for

PAGE = Path(__file__).resolve().parents[3] / "docs" / "sizing.md"
MIB = 1 << 20
UNITS = {"KiB": 1 << 10, "MiB": MIB, "GiB": 1 << 30}


def size(text: str) -> int:
    number, unit = text.split()
    return int(number) * UNITS[unit]


def rows() -> list[list[str]]:
    cells = re.findall(r"^  \| (\d+ GiB \|.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [row.split(" | ") for row in cells]


@pytest.mark.parametrize("row", rows(), ids=" ".join)
def test_each_row_of_the_table_holds(row: list[str]) -> None:
    pool, extent, block = map(size, row[:3])
    geometry = geometry_for(pool, default_extent_bytes(pool))
    in_extent = geometry.slots_per_extent(block)
    assert geometry.extent_bytes == extent
    assert [str(in_extent), f"{in_extent * geometry.extents:,}"] == row[3:]


def test_the_table_is_there() -> None:
    assert len(rows()) == 6


@pytest.mark.parametrize("block", [16_384, 65_536, 100_000, MIB, 2 * MIB, 9 * MIB // 4, 5 * MIB, 40 * MIB])
@pytest.mark.parametrize("blocks", [33, 256, 1_000, 50_000])
def test_a_pool_of_the_formulas_size_has_that_room(block: int, blocks: int) -> None:
    pool = 130 * block + 2 * MIB  # the page's least
    while (needed := formula(block, blocks, default_extent_bytes(pool))) > pool:
        pool = needed
    geometry = geometry_for(pool, default_extent_bytes(pool))
    assert geometry.extents * geometry.slots_per_extent(block) >= blocks


def formula(block: int, blocks: int, extent: int) -> int:
    return int(blocks * block * 1.02 * extent / (extent - block)) + extent + 2 * MIB


@pytest.mark.parametrize(("prefix_tokens", "said"), [(4_096, "708MiB"), (802_000, "101GiB")])
def test_the_examples_have_room(prefix_tokens: int, said: str) -> None:
    assert f'pool.size = "{said}"' in PAGE.read_text()
    pool = size(f"{said[:-3]} {said[-3:]}")
    geometry = geometry_for(pool, default_extent_bytes(pool))
    assert geometry.extents * geometry.slots_per_extent(2 * MIB) * 16 >= prefix_tokens


def test_the_room_of_the_default_pool_is_that_of_the_log_line() -> None:
    geometry = geometry_for(1 << 30, default_extent_bytes(1 << 30))
    room = geometry.extents * geometry.slots_per_extent(2 * MIB) * 16
    for page in (PAGE, PAGE.with_name("vllm.md")):
        assert f"pool of 1008 MiB (room for {room:,} tokens)" in page.read_text()
