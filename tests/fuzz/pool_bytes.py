"""Pools with known blocks in them, changes to their bytes, and what may be recovered from the result."""

from __future__ import annotations

import functools
import itertools
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier_kernels import BlockTable, PoolRecords, format_pool, xxh3_64
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import CoreLimits, Recovered
from kvtierd.memory.pool_file import config_digest
from kvtierd.memory.processes import kernel_boot, pid_namespace
from kvtierd.memory.recovery import NOBODY

from tests.fuzz.source import BORDERS, Source

MIB = 1 << 20
GEOMETRY = PoolGeometry(extents=3, extent_bytes=MIB, first_extent_offset=2 * MIB)
POOL_BYTES = 5 * MIB
SLOT_BYTES = (8192, 200_000)
"""Of the slots in the first extents; the last one is not in use."""
SLOTS = (125, 5)
"""How many slots these extents have."""
RECORD_BYTES = 128
LAST = 32
"""So many of an extent's last records are changed."""
CHANGES_MAX = 16
WRITER = 3

Bytes = npt.NDArray[np.uint8]
Key = tuple[bytes, int, int, int, bytes]
"""Namespace, group, shard, world size and hash."""


@dataclass(frozen=True)
class Sample:
    """A pool that was written by the daemon's own code."""

    data: Bytes
    """The whole file. Never changed."""
    stored: dict[Key, bytes]
    """The data of every block that was stored, by its key."""


def _fill(pool: Bytes, slot: int, data: bytes) -> None:
    pool[slot * PAGE_BYTES : slot * PAGE_BYTES + len(data)] = np.frombuffer(data, np.uint8)


@functools.cache
def sample() -> Sample:
    """Blocks of one and of two shards, of two namespaces, some twice; and slots that are being written."""
    pool = np.zeros(POOL_BYTES, np.uint8)
    format_pool(pool, MIB, GEOMETRY.extents, config_digest(GEOMETRY))
    records = PoolRecords(pool)
    stored: dict[Key, bytes] = {}
    random = np.random.default_rng(1)
    for extent, slot_bytes in enumerate(SLOT_BYTES):
        records.format_extent(extent, slot_bytes)
    free = [_slots(records, 0), _slots(records, 1)]
    assert tuple(map(len, free)) == SLOTS
    store = itertools.count(1)
    for number, (extent, world, again) in enumerate(
        [(0, 1, 1), (0, 1, 2), (0, 2, 1), (1, 1, 1), (0, 2, 2)] * 2
    ):
        space, block = bytes([1 + world + number % 2]) * 16, bytes([number]) * 32
        hashes = np.frombuffer(block, np.uint8).reshape(1, 32)
        data = [random.bytes(1000 + 100 * shard + number) for shard in range(world)]
        for _ in range(again):
            transfer = next(store)
            for shard in range(world):
                slot = np.array([free[extent].pop()], np.uint32)
                size = len(data[shard])
                generations = records.open(slot, WRITER, 9, transfer, space, 1, shard, world, hashes, size)
                _fill(pool, int(slot[0]), data[shard])
                records.set_data_checksums(slot, generations, np.array([xxh3_64(data[shard])], np.uint64))
                records.commit(slot, np.array([transfer], np.uint64))
                stored[space, 1, shard, world, block] = data[shard]
    for writer in (WRITER, WRITER + 1, NOBODY):
        slot = np.array([free[0].pop()], np.uint32)
        records.open(slot, writer, 9, 99, bytes(16), 0, 0, 1, np.zeros((1, 32), np.uint8), 10)
    pool.flags.writeable = False
    return Sample(pool, stored)


def _slots(records: PoolRecords, extent: int) -> list[int]:
    info = records.extent_info(extent)
    assert info is not None
    _, stride, count, first = info
    return [(first + number * stride) // PAGE_BYTES for number in range(count)]


# --- changes ---


def change(pool: Bytes, source: Source) -> bool:
    """Changes the file's bytes as an input says. Returns whether a checksum was made to fit what was changed,
    so that a block may have any name and any data."""
    forged = False
    for _ in range(source.below(CHANGES_MAX)):
        kind = source.below(8)
        if kind == 0:
            _word(pool, 8 * source.below(10), source)
            if source.flag():
                _sum(pool, 0, 7)
        elif kind == 1:
            base = GEOMETRY.first_extent_offset + source.below(GEOMETRY.extents) * MIB
            _word(pool, base + 8 * source.below(8), source)
            if source.flag():
                _sum(pool, base, 6)
                # Other slots lie where this extent's were.
                forged = True
        elif kind == 2:
            _writer(pool, source)
        elif kind == 3:
            at = source.hostile() % len(pool)
            piece = source.take(source.below(64))[: len(pool) - at]
            pool[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
        else:
            forged |= _record(pool, source)
    return forged


def _word(pool: Bytes, at: int, source: Source) -> None:
    """Sets 8 bytes: to a number, to one near what is there, or to those of another place."""
    (old,) = struct.unpack_from("<Q", pool.data, at)
    kind = source.below(4)
    if kind == 0:
        value = source.hostile()
    elif kind == 1:
        value = old ^ 1 << source.below(64)
    elif kind == 2:
        value = old + source.choice((1, -1, 4096, -4096, 1 << 32, 1 << 24)) & (1 << 64) - 1
    else:
        value = source.choice(BORDERS) & (1 << 64) - 1
    struct.pack_into("<Q", pool.data, at, value)


def _sum(pool: Bytes, base: int, words: int) -> None:
    struct.pack_into("<Q", pool.data, base + 8 * words, xxh3_64(pool[base : base + 8 * words]))


def _record(pool: Bytes, source: Source) -> bool:
    """Changes one record, or copies one over another, or changes its slot's data."""
    extent = source.below(len(SLOT_BYTES))
    table = GEOMETRY.first_extent_offset + extent * MIB + PAGE_BYTES
    count = SLOTS[extent]  # those that were stored are the last ones
    at = table + RECORD_BYTES * (count - 1 - source.below(LAST) % count)
    for _ in range(source.below(4) + 1):
        kind = source.below(4)
        if kind == 0:
            other = table + RECORD_BYTES * (count - 1 - source.below(LAST) % count)
            pool[at : at + RECORD_BYTES] = pool[other : other + RECORD_BYTES].copy()
        else:
            _word(pool, at + 8 * source.below(16), source)
    if not source.flag():
        return False
    (word,) = struct.unpack_from("<Q", pool.data, at)
    covered = pool[at + 8 : at + 104].tobytes() + struct.pack("<Q", word >> 24)
    struct.pack_into("<Q", pool.data, at + 104, xxh3_64(covered))
    return True


def _writer(pool: Bytes, source: Source) -> None:
    """Changes an entry of the table of writers."""
    at = PAGE_BYTES + 32 * source.choice((0, WRITER, WRITER + 1, 1, source.below(65_408)))
    pid = source.choice((os.getpid(), 1, source.number(32)))
    boot = source.choice((kernel_boot(), source.hostile()))
    namespace = source.choice((pid_namespace(), source.hostile()))
    rest = struct.pack("<3Q", source.hostile(), boot, namespace)
    checksum = zlib.crc32(struct.pack("<I", pid) + rest) if source.below(4) else 0
    pool[at : at + 32] = np.frombuffer(struct.pack("<II", pid, checksum) + rest, np.uint8)


# --- what may be found ---


def check_found(
    pool: Bytes, records: PoolRecords, found: Recovered, *, whole: Sample, forged: bool, in_data: bool = True
) -> None:
    """Asserts that what was recovered is consistent, that the core takes it over, and, unless checksums were
    forged, that every block is one that was stored, with exactly its bytes if its checksum fits. Without
    `in_data`, the slots' own pages are not in `pool`."""
    assert len(found.spaces) == len(found.hashes)
    worlds = [found.namespaces[space][2] for space in found.spaces.tolist()]
    assert len(found.slots) == sum(worlds)
    assert all(worlds), "a block of no shards"
    everywhere = [*found.slots.tolist(), *found.quarantined.tolist(), *found.corrupt.tolist()]
    _check_apart(records, [each.extent for each in found.extents], everywhere)
    keys = [(space, row.tobytes()) for space, row in zip(found.spaces.tolist(), found.hashes, strict=True)]
    assert len(set(keys)) == len(keys), "a block was recovered twice"
    slots = np.ascontiguousarray(found.slots)
    generations = records.generations(slots)
    assert records.check(slots, generations).all(), "a record that cannot be believed was recovered"
    sizes = records.data_bytes(slots).tolist()
    if in_data:
        fits = records.verify_data(slots, generations).tolist()
    at = 0
    for (space, block), world in zip(keys, worlds, strict=True):
        name, group, _ = found.namespaces[space]
        for shard in range(world):
            data = whole.stored.get((bytes(name), group, shard, world, block))
            if not forged:
                assert data is not None, "a block was recovered that nobody stored"
                assert sizes[at] == len(data)
            if in_data and not forged and data is not None and fits[at]:
                begin = int(slots[at]) * PAGE_BYTES
                assert pool[begin : begin + len(data)].tobytes() == data, "bytes of another block"
            at += 1


def _check_apart(records: PoolRecords, extents: Iterable[int], slots: Sequence[int]) -> None:
    """Every slot is one of an extent in use, and none has a page in common with another."""
    known: set[int] = set()
    for extent in extents:
        known |= set(_slots(records, extent))
    assert known.issuperset(slots), "a slot of no extent"
    assert len(set(slots)) == len(slots), "a slot twice"


def take_over(found: Recovered, check: Callable[[Machine], None]) -> None:
    """Has the core take over what was found in a pool, as a daemon does that starts."""
    machine = Machine(BlockTable(256, POOL_BYTES // PAGE_BYTES), lambda: 0.0, CoreLimits(), GEOMETRY)
    machine.handle(found)
    check(machine)


GUIDES = (change, _word, _record, _writer)
"""What guides the fuzzer beside the code of the product, of which the part that reads pools is native."""
