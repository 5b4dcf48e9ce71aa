"""Coded blocks: they come out as they went in, and what was damaged never does so unnoticed."""

from __future__ import annotations

import asyncio
import sys
import threading
import tomllib
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_kernels import xxh3_64
from kvtierd.tiers.store import coding, packs
from kvtierd.tiers.store.coder import Coder, Stored
from kvtierd.tiers.store.coding import CODINGS, INSTALL, SAVED_SHARE, Codec, CodingError, Compression
from kvtierd.tiers.store.packs import RAW

REPO = Path(__file__).resolve().parents[3]
ZSTD_1, ZSTD_2, ZSTD_4 = CODINGS
SIZES = st.one_of(st.integers(1, 70), st.integers(1_000, 40_000))
CODEC = Codec()


def floats(size: int, seed: int, width: int) -> bytes:
    """Numbers of 2 bytes (bfloat16) or 4, as caches have them: each of some channels has a scale of its
    own."""
    random = np.random.default_rng(seed)
    count = -(-size // width)
    scales = np.resize(np.exp(random.normal(0, 1, 64)), count)
    numbers = (random.normal(size=count) * scales).astype("<f4").view("<u4")
    data: npt.NDArray[Any] = (numbers >> np.uint32(16)).astype("<u2") if width == 2 else numbers
    return data.tobytes()[:size]


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    size, seed = draw(SIZES), draw(st.integers(0, 1 << 32))
    match draw(st.sampled_from(["random", "constant", "bf16", "fp32"])):
        case "random":
            return np.random.default_rng(seed).bytes(size)
        case "constant":
            return bytes([seed % 256]) * size
        case "bf16":
            return floats(size, seed, 2)
        case _:
            return floats(size, seed, 4)


def decoded(code: int, stored: bytes, size: int) -> bytes:
    """What comes out. Nothing beside it is written to."""
    whole = bytearray(b"\xa5" * (size + 128))
    try:
        CODEC.decode(code, stored, memoryview(whole)[64 : 64 + size])
    finally:
        assert whole[:64] == whole[64 + size :] == b"\xa5" * 64
    return bytes(whole[64 : 64 + size])


@given(contents(), st.sampled_from((RAW, *CODINGS)))
def test_what_was_coded_comes_out_again(data: bytes, wanted: int) -> None:
    code, stored = CODEC.encode(wanted, data)
    assert decoded(code, bytes(stored), len(data)) == data
    assert code in (RAW, wanted)
    if code == RAW:
        assert stored == data
    else:
        assert len(data) - len(stored) >= len(data) / SAVED_SHARE


@given(contents(), st.sampled_from(CODINGS))
def test_every_width_takes_data_of_every_length(data: bytes, wanted: int) -> None:
    """Also where so little is gained that it would be stored as it is."""
    assert decoded(wanted, CODEC._coded(wanted, data), len(data)) == data


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (floats(300_000, 1, 2), ZSTD_2),
        (floats(300_000, 1, 4), ZSTD_4),
        (np.random.default_rng(1).normal(0, 8, 300_000).astype(np.int8).tobytes(), ZSTD_1),
        (bytes(300_000), ZSTD_1),
        (np.random.default_rng(1).bytes(300_000), RAW),
        (b"", RAW),
        (b"\0", RAW),
    ],
    ids=["bf16", "fp32", "int8", "zeros", "random", "nothing", "one byte"],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_the_width_is_chosen_by_what_is_there(data: bytes, expected: int, pieces: int) -> None:
    size = max(4, len(data) // pieces // 4 * 4)
    shards = [data[at : at + size] for at in range(0, len(data), size)] or [data]
    assert CODEC.choose(shards) == expected


def test_planes_apart_are_what_saves_something() -> None:
    data = floats(1 << 20, 1, 2)
    sizes = [len(CODEC.encode(code, data)[1]) for code in (ZSTD_1, ZSTD_2)]
    assert sizes[1] < 0.75 * len(data)
    assert sizes[1] < 0.93 * sizes[0]


@settings(max_examples=500)
@given(contents(), st.sampled_from(CODINGS), st.data())
def test_damaged_bytes_are_an_error_or_other_bytes(data: bytes, wanted: int, draw: st.DataObject) -> None:
    """Their reader compares a checksum of the block's own bytes, so other bytes are noticed."""
    stored = bytearray(CODEC._coded(wanted, data))
    at = draw.draw(st.integers(0, len(stored) - 1))
    match draw.draw(st.sampled_from(["flip", "cut", "insert", "replace"])):
        case "flip":
            stored[at] ^= draw.draw(st.integers(1, 255))
        case "cut":
            del stored[at:]
        case "insert":
            stored[at:at] = draw.draw(st.binary(min_size=1, max_size=40))
        case _:
            stored[at:] = draw.draw(st.binary(max_size=len(stored)))
    for code in CODINGS:
        try:
            found = decoded(code, bytes(stored), len(data))
        except CodingError:
            continue
        assert (xxh3_64(found) == xxh3_64(data)) == (found == data)


@given(st.integers(0, (1 << 32) - 1), st.binary(max_size=200), st.integers(0, 300))
def test_arbitrary_bytes_in_any_coding_are_an_error_or_bytes(code: int, stored: bytes, size: int) -> None:
    try:
        decoded(code, stored, size)
    except CodingError:
        return
    assert code in (RAW, *CODINGS)


class TestBomb:
    """A few bytes that would become very many."""

    SIZE = 100_000
    PARAMETERS: tuple[dict[str, int], ...] = (
        {},
        {"write_content_size": False},
        {"write_content_size": False, "window_log": 27},
    )

    def made(self, data: bytes, parameters: dict[str, int]) -> bytes:
        """Compressed piece by piece, so that the head of the frame is what the parameters say."""
        chosen = zstandard.ZstdCompressionParameters(**parameters)
        maker = zstandard.ZstdCompressor(compression_params=chosen).compressobj(
            len(data) if not parameters else -1
        )
        return maker.compress(data) + maker.flush()

    @pytest.mark.parametrize("code", CODINGS)
    @pytest.mark.parametrize("parameters", PARAMETERS, ids=["length", "no length", "window"])
    def test_no_more_is_made_than_was_promised(self, code: int, parameters: dict[str, int]) -> None:
        stored = self.made(bytes(32 << 20), parameters)
        assert len(stored) < 10_000
        tracemalloc.start()
        try:
            with pytest.raises(CodingError):
                decoded(code, stored, self.SIZE)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    def test_many_frames_are_no_way_round_it(self) -> None:
        frame = zstandard.ZstdCompressor().compress(bytes(self.SIZE))
        assert decoded(ZSTD_1, frame, self.SIZE) == bytes(self.SIZE)
        with pytest.raises(CodingError, match="more than 100000 bytes"):
            decoded(ZSTD_1, frame * 100, self.SIZE)

    def test_no_frame_is_given_the_memory_that_it_asks_for(self) -> None:
        """A window of 128 MiB, for 100,000 bytes."""
        data = np.random.default_rng(1).bytes(self.SIZE)
        with pytest.raises(CodingError, match="memory"):
            decoded(ZSTD_1, self.made(data, self.PARAMETERS[2]), self.SIZE)

    def test_a_record_that_promises_too_much_is_not_read(self) -> None:
        records = np.zeros(4, packs.RECORD)
        records["coding"] = ZSTD_1
        records["stored_bytes"] = 100
        records["data_bytes"] = [100, 101, coding.DATA_BYTES_MAX + 1, (1 << 64) - 1]
        assert coding.readable(records).tolist() == [False, True, False, False]


def test_what_records_can_be_read() -> None:
    records = np.zeros(6, packs.RECORD)
    records["coding"] = [RAW, RAW, ZSTD_2, ZSTD_2, ZSTD_2 + 1, 1]
    records["stored_bytes"] = [100, 99, 99, 100, 50, 50]
    records["data_bytes"] = 100
    assert coding.readable(records).tolist() == [True, False, True, False, False, False]


def test_without_the_library_only_bytes_as_they_are_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert not coding.has_library()
    records = np.zeros(2, packs.RECORD)
    records["coding"], records["stored_bytes"], records["data_bytes"] = [RAW, ZSTD_2], [100, 50], 100
    assert coding.readable(records).tolist() == [True, False]
    codec = Codec()
    with pytest.raises(CodingError, match="zstandard"):
        codec.decode(ZSTD_2, b"x", memoryview(bytearray(100)))
    codec.decode(RAW, b"x", memoryview(bytearray(1)))


def test_what_is_to_be_installed_is_what_the_package_says() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    [wanted] = [each for each in project["optional-dependencies"]["store"] if each.startswith("zstandard")]
    assert f"'{wanted}'" in INSTALL


class TestCoder:
    def test_what_is_put_comes_back_with_its_checksum(self) -> None:
        async def task() -> None:
            coder = Coder(Compression.ZSTD)
            shards = [floats(50_001, 1, 2), np.random.default_rng(1).bytes(50_000), bytes(50_000)]
            stored = await coder.encode(shards)
            assert [one.coding for one in stored] == [ZSTD_2, RAW, ZSTD_2]
            assert stored[1].data is shards[1], "it is not copied"
            buffers = [memoryview(bytearray(len(shard))) for shard in shards]
            sums = [xxh3_64(shard) for shard in shards]
            other = Coder()
            assert await other.decode(stored, buffers) == sums
            assert buffers == shards
            assert await other.sums(stored, [len(shard) for shard in shards]) == sums
            assert await other.encode(shards) == [Stored(RAW, shard) for shard in shards], "it is off"

        asyncio.run(task())

    def test_what_the_buffer_had_before_does_not_pass_for_what_cannot_be_decoded(self) -> None:
        async def task() -> None:
            data = floats(50_000, 1, 2)
            [stored] = await Coder(Compression.ZSTD).encode([data])
            buffer = memoryview(bytearray(data))
            cut = Stored(stored.coding, stored.data[:-1])
            assert await Coder().decode([cut], [buffer]) == [xxh3_64(bytes(50_000))]
            assert buffer == bytes(50_000)
            assert await Coder().sums([cut], [50_000]) == [xxh3_64(bytes(50_000))]

        asyncio.run(task())

    def test_who_is_cancelled_waits_until_nothing_is_written_any_more(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        began, may_end = threading.Event(), threading.Event()

        def slow(codec: Codec, code: int, stored: bytes, into: memoryview) -> None:
            began.set()
            assert may_end.wait(30)
            into[:] = b"x" * len(into)

        monkeypatch.setattr(Codec, "decode", slow)

        async def task() -> None:
            buffer = memoryview(bytearray(10))
            waiting = asyncio.create_task(Coder().decode([Stored(ZSTD_1, b"")], [buffer]))
            await asyncio.to_thread(began.wait, 30)
            waiting.cancel()
            assert not (await asyncio.wait([waiting], timeout=0.2))[0], "its thread is not done"
            may_end.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert bytes(buffer) == b"x" * 10

        asyncio.run(task())
