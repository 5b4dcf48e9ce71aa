"""An index page's memory: written by its daemon alone; and what becomes of hashes it has no room for."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from kvtier_kernels import BlockTable, IndexPage, IndexReader
from kvtierd.memory.index_page import SharedPage

HASHES = np.random.default_rng(3).integers(0, 256, (2_000, 32), np.uint8)
KEYS = [row.tobytes() for row in HASHES]
SMALLEST = IndexPage.bytes_for(0)
WORDS = (SMALLEST - 4096) // 8


def known(reader: IndexReader, keys: list[bytes]) -> int:
    """How many of the keys are there, each by itself."""
    return sum(reader.run([key], 0, 1) for key in keys)


def test_clients_can_read_a_page_and_nothing_else() -> None:
    page = SharedPage(100, boot_nonce=7)
    fd = page.dup()
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, page.size_bytes)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 0)
        for size in (0, 2 * page.size_bytes):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        reader = IndexReader(mmap.mmap(fd, page.size_bytes, prot=mmap.PROT_READ), 32)
        assert (reader.boot_nonce, reader.complete) == (7, False)
        table = BlockTable(8, 64)
        table.publish(1, page.native)
        table.insert(1, 0, HASHES[:3].copy())
        page.native.complete()
        assert reader.complete
        assert reader.run(KEYS, 0, 8) == 0, "what the table had before is looked at first"
        assert table.publish_more(1, 8)
        assert reader.run(KEYS, 0, 8) == 3
        assert reader.run(KEYS, 1, 2) == 1
        assert reader.run(KEYS, 3, 8) == reader.run(KEYS, 5, 5) == reader.run([], 0, 8) == 0
        assert reader.any([*KEYS[5:], KEYS[2]])
        assert not reader.any(KEYS[3:])
        assert not reader.any([])
    finally:
        os.close(fd)
        page.close()


def test_a_page_takes_one_descriptor_and_its_memory_goes_with_its_last_user() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kvtierd-index")

    gc.collect()  # what tests before this one have left
    before, mapped_before = descriptors(), mapped()
    page = SharedPage(100, boot_nonce=7)
    assert (descriptors(), mapped()) == (before + 1, mapped_before + 1)
    native = page.native
    page.close()
    del page
    gc.collect()
    native.complete()  # whoever still writes has its memory
    assert (descriptors(), mapped()) == (before, mapped_before + 1)
    del native
    gc.collect()
    assert mapped() == mapped_before


def test_what_finds_no_room_is_missing_and_nothing_else_is_found() -> None:
    memory = mmap.mmap(-1, SMALLEST)
    page, table = IndexPage(memory, 1, 5), BlockTable(len(KEYS), 64)
    table.publish(0, page)
    assert table.publish_more(0, 1)
    reader = IndexReader(memory, 32)
    table.insert(0, 0, HASHES[:1_000].copy())
    assert 0 < page.left_out < 1_000
    assert WORDS * 0.9 < known(reader, KEYS[:1_000]) == 1_000 - page.left_out
    assert known(reader, KEYS[1_000:]) == 0
    entries, _ = table.lookup(0, HASHES[:1_000].copy())
    table.remove(entries)
    assert known(reader, KEYS) == 0
    assert not np.frombuffer(memory, np.uint8)[4096:].any()


@pytest.mark.parametrize("blocks", [30, 64, 500, 2_000])
def test_nothing_is_left_out_however_often_all_blocks_are_replaced(blocks: int) -> None:
    """A hash that has no place is a miss for as long as it is there, and with it all that comes after it."""
    random, left_out = np.random.default_rng(blocks), 0
    for seed in range(10):
        page = IndexPage(mmap.mmap(-1, IndexPage.bytes_for(blocks)), 1, seed)
        table = BlockTable(blocks, 64)
        table.publish(0, page)
        table.publish_more(0, 1)
        present = np.zeros(0, np.uint32)
        for _ in range(100):
            new = random.integers(0, 256, (blocks - len(present), 32), np.uint8)
            entries, _ = table.insert(0, 0, new)
            present = random.permutation(np.concatenate((present, entries)))
            table.remove(np.ascontiguousarray(present[: blocks // 2]))
            present = present[blocks // 2 :]
        left_out += page.left_out
    assert left_out == 0


def test_as_many_as_a_page_is_made_for_all_have_room() -> None:
    memory = mmap.mmap(-1, IndexPage.bytes_for(len(KEYS)))
    page, table = IndexPage(memory, 1, 5), BlockTable(len(KEYS), 64)
    table.publish(0, page)
    table.publish_more(0, 1)
    table.insert(0, 0, HASHES.copy())
    assert page.left_out == 0
    assert IndexReader(memory, 32).run(KEYS, 0, len(KEYS)) == len(KEYS)


def test_a_page_takes_memory_for_what_is_in_it_not_for_what_may_come() -> None:
    page = SharedPage(10_000_000, boot_nonce=7)
    fd = page.dup()
    try:
        table = BlockTable(len(KEYS), 64)
        table.publish(0, page.native)
        table.publish_more(0, 1)
        table.insert(0, 0, HASHES.copy())
        reader = IndexReader(mmap.mmap(fd, page.size_bytes, prot=mmap.PROT_READ), 32)
        assert reader.run(KEYS, 0, len(KEYS)) == len(KEYS)
        others = np.random.default_rng(4).integers(0, 256, (5_000, 32), np.uint8)
        assert known(reader, [row.tobytes() for row in others]) == 0
        assert page.size_bytes > 256 << 20
        assert os.fstat(fd).st_blocks * 512 <= 4_096 + 40 * len(KEYS), "readers touch nothing besides"
    finally:
        os.close(fd)
        page.close()


@pytest.mark.parametrize("seed", range(4))
def test_who_reads_while_a_page_grows_finds_everything(seed: int) -> None:
    """Words move meanwhile. The reader is another process, as it is in earnest."""
    most = 400_000
    size = IndexPage.bytes_for(most)
    memory, flags = mmap.mmap(-1, size), mmap.mmap(-1, 4096)
    page, table = IndexPage(memory, 1, seed), BlockTable(most, 64)
    table.publish(0, page)
    table.publish_more(0, 1)
    table.insert(0, 0, HASHES.copy())
    reader_pid = os.fork()
    if reader_pid == 0:
        code = 1
        try:
            reader = IndexReader(memory, 32)
            while flags[0] == 0:
                if reader.run(KEYS, 0, len(KEYS)) != len(KEYS):
                    break
                flags[1] = 1
            else:
                code = 0
        finally:
            os._exit(code)
    while flags[1] == 0 and os.waitpid(reader_pid, os.WNOHANG) == (0, 0):
        pass  # until it has begun
    random = np.random.default_rng(seed)
    for _ in range(100):
        table.insert(0, 0, random.integers(0, 256, (most // 100 - 20, 32), np.uint8))
    flags[0] = 1
    assert os.waitpid(reader_pid, 0)[1] == 0
    assert page.left_out == 0


def test_a_block_of_several_tiers_is_known_until_the_last_of_them_forgets_it() -> None:
    memory = mmap.mmap(-1, SMALLEST)
    page, reader = IndexPage(memory, 1, 5), IndexReader(memory, 32)
    tables = [BlockTable(4, 64) for _ in range(300)]
    for table in tables:
        table.publish(0, page)
        table.publish_more(0, 1)
    one = HASHES[:1].copy()
    for table in tables[:3]:
        table.insert(0, 0, one)
    for table in tables[:3]:
        assert known(reader, KEYS[:1])
        table.remove(np.zeros(1, np.uint32))
    assert not known(reader, KEYS[:1])
    for table in tables:  # more than the page can count: known for ever, and looked up in vain
        table.insert(0, 0, one)
    for table in tables:
        table.remove(np.zeros(1, np.uint32))
    assert known(reader, KEYS[:1])


def test_short_hashes_are_padded_as_the_table_has_them() -> None:
    memory = mmap.mmap(-1, SMALLEST)
    page, table = IndexPage(memory, 1, 5), BlockTable(4, 64)
    table.publish(0, page)
    table.publish_more(0, 1)
    padded = np.zeros((1, 32), np.uint8)
    padded[0, :8] = 9
    table.insert(0, 0, padded)
    assert IndexReader(memory, 8).run([b"\x09" * 8], 0, 1) == 1
    with pytest.raises(ValueError, match=r"hashes\[0\] is no bytes object of 8 bytes"):
        IndexReader(memory, 8).run([b"\x09" * 9], 0, 1)
    with pytest.raises(ValueError, match=r"hashes\[0\] is no bytes object of 8 bytes"):
        IndexReader(memory, 8).any([b"\x09" * 9])


def test_what_is_no_page_is_refused() -> None:
    with pytest.raises(ValueError, match="memory is no index page"):
        IndexReader(mmap.mmap(-1, SMALLEST), 32)
    for size in (1, 4096, SMALLEST + 1, SMALLEST + 64):
        with pytest.raises(ValueError, match=f"memory has {size} bytes; expected a header"):
            IndexReader(mmap.mmap(-1, size), 32)
    memory = mmap.mmap(-1, SMALLEST)
    IndexPage(memory, 1, 5)
    memory[24] = 1  # fewer buckets than there are
    with pytest.raises(ValueError, match="the page says"):
        IndexReader(memory, 32)
