"""Blocks whose bytes follow from their key, version and shard, so that whoever finds one can tell whether it
is right.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords, xxh3_64
from kvtierd.core.stimuli import Recovered
from kvtierd.memory.host_pool import HostPool

from tests.unit.memory.plain_pool import FREE, PAGE, READY, hashes, read_records

GROUP = 1
SPACE = hashlib.sha256(b"crash tests").digest()[:16]


@dataclass(frozen=True)
class Block:
    """One stored copy; a key stored again has a higher version."""

    key: int
    version: int
    world: int
    data_bytes: int

    def data(self, shard: int) -> bytes:
        seed = hashlib.sha256(f"{self.key}.{self.version}.{shard}.{self.world}".encode()).digest()
        return (seed * (self.data_bytes // len(seed) + 1))[: self.data_bytes]


def open_block(
    pool: HostPool, writer: int, block: Block, slots: list[int], transfer: int
) -> list[npt.NDArray[np.uint64]]:
    """What the front does first: each shard's slot to WRITING. Returns the generations by rank."""
    return [
        pool.records.open(
            u32(slot),
            writer,
            pool.boot_nonce,
            transfer,
            SPACE,
            GROUP,
            shard,
            block.world,
            hashes(block.key),
            block.data_bytes,
        )
        for shard, slot in enumerate(slots)
    ]


def write_shard(
    array: npt.NDArray[np.uint8],
    records: PoolRecords,
    block: Block,
    shard: int,
    slot: int,
    generation: npt.NDArray[np.uint64],
) -> None:
    """What the copy worker does: the data, then its checksum."""
    data = np.frombuffer(block.data(shard), np.uint8)
    half = len(data) // 2
    array[slot * PAGE : slot * PAGE + half] = data[:half]
    array[slot * PAGE + half : slot * PAGE + len(data)] = data[half:]
    records.set_data_checksums(u32(slot), generation, np.array([xxh3_64(data)], np.uint64))


def commit_block(pool: HostPool, slots: list[int], clock: int) -> None:
    """What the front does last: READY, shard after shard."""
    for slot in slots:
        pool.records.commit(u32(slot), np.array([clock], np.uint64))


def u32(*slots: int) -> npt.NDArray[np.uint32]:
    return np.array(slots, np.uint32)


def found_blocks(pool: HostPool) -> dict[int, Block]:
    """What the pool recovered, by key. AssertionError if a byte of it is wrong, or if any slot is not
    accounted for.
    """
    recovered = pool.recovered
    shards = {record.slot: record for record in read_records(pool.array) if record.state == READY}
    assert_accounted(pool, recovered)
    found: dict[int, Block] = {}
    at = 0
    for space, block_hash in zip(recovered.spaces.tolist(), recovered.hashes, strict=True):
        digest, group, world = recovered.namespaces[space]
        assert (digest, group) == (SPACE, GROUP)
        slots = recovered.slots[at : at + world].tolist()
        at += world
        key = int(block_hash[:8].view(np.uint64)[0])
        assert np.array_equal(block_hash, hashes(key)[0])
        assert key not in found, f"block {key} twice"
        records = [shards[slot] for slot in slots]
        assert [record.shard for record in records] == list(range(world))
        assert len({(record.boot_nonce, record.transfer) for record in records}) == 1, "shards of two stores"
        data = [record.data[: record.data_bytes] for record in records]
        candidates = [Block(key, version, world, len(data[0])) for version in range(10)]
        block = next((c for c in candidates if c.data(0) == data[0]), None)
        assert block is not None, f"block {key} has bytes that nobody stored under it"
        assert data == [block.data(shard) for shard in range(world)], f"block {key} mixes shards"
        generations = pool.records.generations(u32(*slots))
        assert pool.records.verify_data(u32(*slots), generations).all()
        found[key] = block
    return found


def assert_accounted(pool: HostPool, recovered: Recovered) -> None:
    """Nothing leaks: every slot of every extent is free, or ready and recovered, or in quarantine."""
    kept, quarantined = set(recovered.slots.tolist()), set(recovered.quarantined.tolist())
    assert len(kept) == len(recovered.slots)
    expected = sum(len(pool.geometry.slots_of(e.extent, e.slot_bytes)) for e in recovered.extents)
    records = list(read_records(pool.array))
    assert len(records) == expected
    for record in records:
        if record.slot in quarantined:
            continue
        assert record.state == (READY if record.slot in kept else FREE), record
