"""What the block table promises beyond its oracle: refusals in words, limits, threads, memory."""

import os
import re
import threading
from pathlib import Path
from typing import Any

import kvtier_kernels
import numpy as np
import numpy.typing as npt
import pytest
from kvtier_kernels import NO_ENTRY, PINS_MAX, BlockTable

WRITING, READY, EVICTING = 1, 2, 3


def hashes_of(count: int, start: int = 0) -> npt.NDArray[np.uint8]:
    out = np.zeros((count, 32), np.uint8)
    out[:, :8] = np.arange(start, start + count, dtype="<u8").view(np.uint8).reshape(-1, 8)
    return out


def u32(*values: int) -> npt.NDArray[np.uint32]:
    return np.array(values, np.uint32)


@pytest.fixture
def table() -> BlockTable:
    """READY: 0, 1, and 2 with a pin; WRITING: 3, and 4 without slots; EVICTING: 5, without slots."""
    table = BlockTable(capacity=8, pool_pages=100, seed=1)
    entries, created = table.insert(space=1, domain=0, hashes=hashes_of(6))
    assert created.all()
    table.attach_slots(entries[:4], np.arange(1, 9, dtype=np.uint32).reshape(4, 2))
    table.commit(u32(0, 1, 2, 5))
    table.pin(u32(2))
    table.begin_evict(u32(5))
    return table


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("commit", (u32(3, 0),), "entries[1] is 0, which is READY; expected WRITING"),
        ("commit", (u32(3, 4, 3),), "entries[2] is 3, which the batch names twice"),
        ("commit", (u32(3, 6),), "entries[1] is 6, which is not an entry of the table"),
        ("commit", (u32(3, NO_ENTRY),), f"entries[1] is {NO_ENTRY}, which is not an entry of the table"),
        ("begin_evict", (u32(0, 2),), "entries[1] is 2, which has 1 pins"),
        ("begin_evict", (u32(0, 3),), "entries[1] is 3, which is WRITING; expected READY"),
        ("begin_evict", (u32(0, 0),), "entries[1] is 0, which the batch names twice"),
        ("condemn", (u32(2, 5),), "entries[1] is 5, which is EVICTING; expected READY"),
        ("remove", (u32(3, 1),), "entries[1] is 1, which is READY; expected WRITING or EVICTING"),
        ("remove", (u32(3, 3),), "entries[1] is 3, which the batch names twice"),
        ("unpin", (u32(2, 0),), "entries[1] is 0, which has 0 pins; the batch takes away more than that"),
        ("unpin", (u32(2, 2),), "entries[1] is 2, which has 1 pins; the batch takes away more than that"),
        ("touch", (u32(1, 7),), "entries[1] is 7, which is not an entry of the table"),
        ("cool", (u32(1, 7),), "entries[1] is 7, which is not an entry of the table"),
        ("set_flags", (u32(1, 7), 1), "entries[1] is 7, which is not an entry of the table"),
        ("clear_flags", (u32(1, 7), 1), "entries[1] is 7, which is not an entry of the table"),
        (
            "attach_slots",
            (u32(4, 3), u32(20, 21).reshape(2, 1)),
            "entries[1] is 3, which has its slots already",
        ),
        ("attach_slots", (u32(4), u32(20, 3).reshape(1, 2)), "slots[0, 1] is 3, which belongs to entry 1"),
        ("attach_slots", (u32(4), u32(20, 20).reshape(1, 2)), "slots[0, 1] is 20, which belongs to entry 4"),
        ("attach_slots", (u32(4), u32(20, 100).reshape(1, 2)), "slots[0, 1] is 100; expected 1 to 99"),
        ("attach_slots", (u32(4), u32(20, 0).reshape(1, 2)), "slots[0, 1] is 0; expected 1 to 99"),
        (
            "attach_slots",
            (u32(4), u32(20, 21).reshape(2, 1)),
            "slots has 2 rows; expected 1, one for each of entries",
        ),
        ("slots", (u32(0, 1), 3), "entries[0] is 0, which has 2 slots; world is 3"),
        ("owners", (u32(1, 100),), "slots[1] is 100; expected 1 to 99"),
        ("lookup", (1, np.zeros((2, 31), np.uint8)), "hashes has rows of 31 elements; expected 32"),
        ("lookup", (1, np.zeros(32, np.uint8)), "hashes has 1 dimensions; expected 2"),
        ("lookup", (1, np.zeros((2, 64), np.uint8)[:, ::2]), "is not a C-contiguous buffer or array"),
        (
            "commit",
            (np.array([3], np.int32),),
            "entries has elements of format 'i' and 4 bytes; expected uint32",
        ),
        ("commit", (np.array([3], np.uint64),), "and 8 bytes; expected uint32"),
        (
            "commit",
            (np.array([3], ">u4"),),
            "entries has elements of format '>I' and 4 bytes; expected uint32",
        ),
        ("commit", (np.frombuffer(bytes(9), "<u4", 2, offset=1),), "entries is not aligned"),
        ("commit", ([3],), "entries of type list is not a C-contiguous buffer or array"),
    ],
)
def test_a_refusal_names_argument_index_and_value_and_changes_nothing(
    table: BlockTable, method: str, arguments: tuple[Any, ...], message: str
) -> None:
    before, victims = table.dump(), table.victims(0, 9)
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(table, method)(*arguments)
    after = table.dump()
    assert all((after[name] == before[name]).all() for name in before)
    assert (table.victims(0, 9) == victims).all()
    table.check()


def test_pins_have_an_upper_bound_that_a_batch_cannot_slip_past(table: BlockTable) -> None:
    table.pin(np.zeros(PINS_MAX - 1, np.uint32))
    with pytest.raises(ValueError, match=rf"entries\[1\] is 0, which would have more than {PINS_MAX} pins"):
        table.pin(u32(0, 0))
    assert table.pins(u32(0)).tolist() == [PINS_MAX - 1]
    table.pin(u32(0))
    with pytest.raises(ValueError, match="pins"):
        table.pin(u32(1, 0))
    assert table.pins(u32(0, 1)).tolist() == [PINS_MAX, 0]
    table.unpin(np.zeros(PINS_MAX, np.uint32))
    assert table.victims(0, 9).tolist() == [1, 0]


def test_a_condemned_block_is_not_found_ready_and_goes_with_its_last_pin(table: BlockTable) -> None:
    table.condemn(u32(2))
    assert table.lookup(1, hashes_of(1, start=2))[1].tolist() == [EVICTING]
    assert table.victims(0, 9).tolist() == [0, 1]
    table.check()
    with pytest.raises(ValueError, match="which has 1 pins"):
        table.remove(u32(2))
    table.unpin(u32(2))
    assert 2 not in table.victims(0, 9)
    table.remove(u32(2))
    assert table.lookup(1, hashes_of(1, start=2))[0].tolist() == [NO_ENTRY]
    assert table.owners(u32(5, 6)).tolist() == [NO_ENTRY, NO_ENTRY]


def test_a_block_pinned_while_it_is_written_becomes_a_victim_only_when_unpinned(table: BlockTable) -> None:
    table.pin(u32(3))
    table.commit(u32(3))
    assert table.victims(0, 9).tolist() == [0, 1]
    table.check()
    table.unpin(u32(3))
    assert table.victims(0, 9).tolist() == [0, 1, 3]


def test_the_coldest_are_looked_for_as_far_as_the_horizon_and_no_farther() -> None:
    table = BlockTable(capacity=8, pool_pages=100)
    entries, _ = table.insert(1, 9, hashes_of(6, start=10), 1)
    table.commit(entries)
    table.set_flags(entries[[0, 2, 3]].copy(), 4 | 8)
    assert table.coldest(9, 9, 4, 9).tolist() == entries[[1, 4, 5]].tolist()
    assert table.coldest(9, 9, 4 | 16, 5).tolist() == entries[[1, 4]].tolist()
    assert table.coldest(9, 1, 8, 9).tolist() == entries[[1]].tolist()
    assert table.coldest(9, 9, 8, 1).tolist() == table.coldest(9, 0, 8, 9).tolist() == []
    assert table.coldest(9, 9, 1, 9).tolist() == table.coldest(8, 9, 0, 9).tolist() == []
    assert table.coldest(9, 9, 0, 9).tolist() == table.victims(9, 9).tolist() == entries.tolist()


def test_a_removed_entry_returns_under_a_new_generation(table: BlockTable) -> None:
    before = int(table.generations(u32(5))[0])
    table.remove(u32(5))
    entries, _ = table.insert(2, 0, hashes_of(1))
    assert entries.tolist() == [5]
    assert table.generations(entries).tolist() == [before + 1]
    assert table.slots(entries, 2).tolist() == [[0, 0]]
    assert table.flags(entries).tolist() == [0]


def test_a_full_table_says_so_per_key_and_still_finds_what_it_has() -> None:
    table = BlockTable(4, 10)
    batch = np.concatenate([hashes_of(5), hashes_of(2)])
    entries, created = table.insert(1, 0, batch)
    assert created.tolist() == [1, 1, 1, 1, 2, 0, 0]
    assert entries.tolist() == [0, 1, 2, 3, NO_ENTRY, 0, 1]
    table.check()


def test_the_least_recent_comes_first_and_pins_and_touches_move_blocks() -> None:
    table = BlockTable(8, 10)
    entries, _ = table.insert(1, 3, hashes_of(5))
    table.commit(entries[[4, 3, 2, 1, 0]])
    assert table.victims(3, 9).tolist() == [4, 3, 2, 1, 0]
    table.touch(u32(3, 4))
    assert table.victims(3, 9).tolist() == [2, 1, 0, 3, 4]
    table.pin(u32(1, 0, 1))
    assert table.victims(3, 9).tolist() == [2, 3, 4]
    table.unpin(u32(1, 0))
    assert table.victims(3, 9).tolist() == [2, 3, 4, 0]
    table.unpin(u32(1))
    assert table.victims(3, 2).tolist() == [2, 3]
    table.cool(u32(0, 1))
    assert table.victims(3, 9).tolist() == [1, 0, 2, 3, 4]
    table.pin(u32(2))
    table.cool(u32(2, 4, 4))
    assert table.victims(3, 9).tolist() == [4, 1, 0, 3]
    assert table.victims(0, 9).tolist() == []


@pytest.mark.parametrize(
    ("capacity", "pool_pages", "message"),
    [
        (0, 10, "capacity is 0; expected 1 to 1073741824"),
        ((1 << 30) + 1, 10, "capacity is 1073741825; expected 1 to 1073741824"),
        (1, 1, "pool_pages is 1; expected 2 to 4294967296"),
        (1, (1 << 32) + 1, "pool_pages is 4294967297; expected 2 to 4294967296"),
    ],
)
def test_impossible_sizes_are_refused(capacity: int, pool_pages: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BlockTable(capacity, pool_pages)


def test_the_smallest_table_works_and_empty_batches_do_nothing() -> None:
    table = BlockTable(1, 2)
    entries, _ = table.insert(0, 65535, hashes_of(1))
    table.attach_slots(entries, u32(1).reshape(1, 1))
    table.commit(entries)
    nothing = u32()
    for method in ("commit", "begin_evict", "condemn", "remove", "pin", "unpin", "touch", "cool"):
        getattr(table, method)(nothing)
    table.attach_slots(nothing, np.zeros((0, 1), np.uint32))
    assert table.lookup(0, hashes_of(0))[0].size == 0
    assert table.lookup_prefix(0, hashes_of(0))[1] == 0
    assert table.slots(nothing, 4).shape == (0, 4)
    table.check()


def test_a_second_thread_inside_the_table_is_refused_and_harms_nothing() -> None:
    """Large batches run without the GIL, so two threads do meet; the table must never be changed by both."""
    table = BlockTable(1 << 16, 10)
    batch = hashes_of(1 << 15)
    messages: set[str] = set()
    start = threading.Barrier(2, timeout=30)

    def work(number: int) -> None:
        start.wait()
        for _ in range(40):
            try:
                table.insert(number, 0, batch)
                table.commit(table.lookup(number, batch)[0])
            except RuntimeError as error:
                messages.add(str(error))
            except ValueError:
                pass  # the inserts or commits of an earlier round were complete

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert messages <= {"BlockTable is in use by another thread; it has one writer"}
    table.check()
    assert table.count(0) in (0, len(batch))
    assert table.count(1) in (0, len(batch))
    assert table.count(0) + table.count(1) > 0


def test_the_memory_of_four_million_blocks_is_bounded_and_only_provided_as_used() -> None:
    table = BlockTable(4 << 20, (4 << 20) + 1, seed=3)
    slot_records = 16
    assert table.stats()["bytes"] / (4 << 20) + slot_records <= 100
    table.insert(1, 0, hashes_of(1000))
    table.check()


def test_a_table_with_room_for_a_quarter_of_a_billion_blocks_takes_memory_for_those_that_it_has() -> None:
    """Hashes are spread evenly: an index of the full size would get a page for each of the first blocks."""

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    table = BlockTable(1 << 28, 1 << 28, seed=3)
    before = resident()
    for start in range(0, 20_000, 1_000):
        entries, _ = table.insert(1, 0, hashes_of(1_000, start))
        table.attach_slots(entries, np.arange(start + 1, start + 1_001, dtype=np.uint32).reshape(-1, 1) * 16)
    assert resident() - before < 64 << 20
    table.check()


def test_the_seed_has_no_visible_effect() -> None:
    dumps = []
    for seed in (0, 1, (1 << 64) - 1, None):
        table = BlockTable(100, 10, seed=seed)
        entries, _ = table.insert(1, 0, hashes_of(80))
        table.remove(entries[10:40])
        table.insert(2, 0, hashes_of(40))
        table.check()
        dumps.append(table.dump())
    for dump in dumps[1:]:
        assert all((dump[name] == dumps[0][name]).all() for name in dump)


def test_states_have_the_numbers_of_the_contract(table: BlockTable) -> None:
    assert table.states(u32(0, 3, 5)).tolist() == [READY, WRITING, EVICTING]
    assert kvtier_kernels.NO_SLOT == 0
