"""Packs: what is in one comes out of it, and what was changed anywhere is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtier_kernels import xxh3_64
from kvtierd.tiers.store import packs
from kvtierd.tiers.store.packs import PackError

NAMESPACE, GROUP = bytes(range(16)), 3
SIZES = st.lists(st.sampled_from([1, 100, 4_095, 4_096, 4_097, 20_000]), min_size=1, max_size=8)


def made(sizes: list[int], seed: int = 1) -> tuple[packs.Records, list[bytes]]:
    """Records of random blocks, and their bytes."""
    random = np.random.default_rng(seed)
    data = [random.bytes(size) for size in sizes]
    records = np.zeros(len(sizes), packs.RECORD)
    for record, stored in zip(records, data, strict=True):
        record["hash"] = np.frombuffer(random.bytes(32), np.uint8)
        record["world"] = 1
        record["stored_bytes"] = record["data_bytes"] = len(stored)
        record["checksum"] = xxh3_64(stored)
    return packs.laid_out(records), data


def whole(sizes: list[int]) -> bytes:
    records, data = made(sizes)
    return b"".join(packs.parts_of(NAMESPACE, GROUP, records, [memoryview(each) for each in data]))


@given(SIZES)
def test_what_was_put_in_comes_out(sizes: list[int]) -> None:
    records, data = made(sizes)
    pack = whole(sizes)
    length = packs.needed_bytes(pack[: packs.HEAD.itemsize])
    found = packs.read_head(pack[:length], NAMESPACE, GROUP, len(pack))
    assert found.records.tobytes() == records.tobytes()
    assert len(pack) == found.pack_bytes
    for record, stored in zip(found.records, data, strict=True):
        at = int(record["offset"])
        assert at % packs.ALIGNMENT == 0
        assert pack[at : at + int(record["stored_bytes"])] == stored


@settings(max_examples=300)
@given(SIZES, st.data())
def test_a_head_that_was_changed_anywhere_is_refused(sizes: list[int], data: st.DataObject) -> None:
    pack = bytearray(whole(sizes))
    length = packs.needed_bytes(bytes(pack))
    at = data.draw(st.integers(0, length - 1))
    pack[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PackError):
        packs.read_head(bytes(pack[:length]), NAMESPACE, GROUP, len(pack))


@pytest.mark.parametrize(
    ("namespace", "group", "what"),
    [(bytes(16), GROUP, "another namespace"), (NAMESPACE, GROUP + 1, "another namespace, or to group 3")],
)
def test_the_pack_of_another_is_refused(namespace: bytes, group: int, what: str) -> None:
    pack = whole([100])
    with pytest.raises(PackError, match=what):
        packs.read_head(pack[:4_096], namespace, group, len(pack))


def test_what_is_cut_is_refused() -> None:
    pack = whole([100, 5_000])
    for cut in (0, 7, packs.HEAD.itemsize - 1):
        with pytest.raises(PackError, match="no head"):
            packs.needed_bytes(pack[:cut])
    with pytest.raises(PackError, match="4095 bytes of a head of 4096"):
        packs.read_head(pack[:4_095], NAMESPACE, GROUP, len(pack))
    with pytest.raises(PackError, match="bytes of a pack of"):
        packs.read_head(pack[:4_096], NAMESPACE, GROUP, len(pack) - 1)


def test_no_record_may_point_outside_even_if_its_checksum_fits() -> None:
    """Whoever can write into the store can also compute checksums."""
    records, _ = made([100, 5_000])
    for field, value in (("offset", 0), ("offset", (1 << 64) - 1), ("stored_bytes", (1 << 64) - 1)):
        wrong = records.copy()
        wrong[field][0] = value
        head = packs.head_of(NAMESPACE, GROUP, wrong)
        pack_bytes = len(whole([100, 5_000]))
        with pytest.raises(PackError, match="outside"):
            packs.read_head(head, NAMESPACE, GROUP, pack_bytes)
    wrong = records.copy()
    wrong["shard"][1] = 1
    with pytest.raises(PackError, match="shard"):
        packs.read_head(packs.head_of(NAMESPACE, GROUP, wrong), NAMESPACE, GROUP, len(whole([100, 5_000])))


def test_too_many_records_make_no_pack() -> None:
    with pytest.raises(ValueError, match="expected 1 to 65536"):
        packs.laid_out(np.zeros(0, packs.RECORD))
    large = np.zeros(2, packs.RECORD)
    large["stored_bytes"] = packs.PACK_BYTES_MAX // 2
    with pytest.raises(ValueError, match="at most"):
        packs.laid_out(large)
