"""A second reader of a pool file's bytes, made from the tables in docs/design/pool.md and nothing else, with
`struct`; and pools to read."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords, format_pool, xxh3_64

MIB = 1 << 20
HEADER_AREA = 2 * MIB
PAGE = 4096
FREE, WRITING, READY = 0, 1, 2
DIGEST = bytes(range(16))
SPACE = b"a namespace of 16"[:16]


@dataclass(frozen=True)
class PlainExtent:
    index: int
    slot_bytes: int
    stride: int
    count: int
    data_offset: int
    """From the start of the extent."""


@dataclass(frozen=True)
class PlainRecord:
    slot: int
    state: int
    writer: int
    generation: int
    boot_nonce: int
    transfer: int
    namespace: bytes
    block_hash: bytes
    data_bytes: int
    group: int
    shard: int
    world: int
    clock: int
    data_checksum: int
    checksum: int
    zeros: bytes
    checksum_fits: bool
    data: bytes

    @property
    def data_fits(self) -> bool:
        return xxh3_64(self.data[: self.data_bytes]) == self.data_checksum


@dataclass(frozen=True)
class PlainHeader:
    magic: bytes
    version: int
    first_extent: int
    extent_bytes: int
    extents: int
    digest: bytes
    checksum_fits: bool
    boots: int
    boot_nonce: int


def read_header(pool: npt.NDArray[np.uint8]) -> PlainHeader:
    page = pool[:PAGE].tobytes()
    magic, version, first, extent_bytes, extents, digest, checksum, boots, nonce = struct.unpack_from(
        "<8s4Q16s3Q", page
    )
    fits = checksum == xxh3_64(page[:56])
    return PlainHeader(magic, version, first, extent_bytes, extents, digest, fits, boots, nonce)


def read_extent(pool: npt.NDArray[np.uint8], index: int) -> PlainExtent | None:
    base = HEADER_AREA + index * read_header(pool).extent_bytes
    page = pool[base : base + PAGE].tobytes()
    magic, own_index, slot_bytes, stride, count, data_offset, checksum = struct.unpack_from("<8s6Q", page)
    if magic != b"KVTIERX1":
        return None
    assert checksum == xxh3_64(page[:48])
    assert page[56:] == bytes(PAGE - 56)
    return PlainExtent(own_index, slot_bytes, stride, count, data_offset)


def read_records(pool: npt.NDArray[np.uint8]) -> Iterator[PlainRecord]:
    """Every slot of every extent in use, FREE ones too."""
    header = read_header(pool)
    for index in range(header.extents):
        extent = read_extent(pool, index)
        if extent is None:
            continue
        base = HEADER_AREA + index * header.extent_bytes
        for i in range(extent.count):
            raw = pool[base + PAGE + 128 * i : base + PAGE + 128 * (i + 1)].tobytes()
            yield _record(pool, base + extent.data_offset + i * extent.stride, extent.slot_bytes, raw)


def _record(pool: npt.NDArray[np.uint8], offset: int, slot_bytes: int, raw: bytes) -> PlainRecord:
    assert offset % PAGE == 0
    word, nonce, transfer, namespace, block_hash, data_bytes, group, shard, world, pad = struct.unpack_from(
        "<3Q16s32sI3H6s", raw
    )
    clock, data_checksum, checksum, tail = struct.unpack_from("<3Q16s", raw, 88)
    generation = word >> 24
    return PlainRecord(
        slot=offset // PAGE,
        state=word & 0xFF,
        writer=word >> 8 & 0xFFFF,
        generation=generation,
        boot_nonce=nonce,
        transfer=transfer,
        namespace=namespace,
        block_hash=block_hash,
        data_bytes=data_bytes,
        group=group,
        shard=shard,
        world=world,
        clock=clock,
        data_checksum=data_checksum,
        checksum=checksum,
        zeros=pad + tail,
        checksum_fits=checksum == xxh3_64(raw[8:104] + struct.pack("<Q", generation)),
        data=pool[offset : offset + slot_bytes].tobytes(),
    )


def new_pool(extents: int = 2, extent_bytes: int = MIB) -> npt.NDArray[np.uint8]:
    """The bytes of a new, empty pool, in private memory."""
    pool = np.zeros(HEADER_AREA + extents * extent_bytes, np.uint8)
    format_pool(pool, extent_bytes, extents, DIGEST)
    return pool


def hashes(*names: int) -> npt.NDArray[np.uint8]:
    """One block hash per number, shape (n, 32)."""
    return np.stack([np.frombuffer(struct.pack("<QQ16x", name, ~name & 0xFFFF), np.uint8) for name in names])


def slots_of(records: PoolRecords, extent: int) -> npt.NDArray[np.uint32]:
    info = records.extent_info(extent)
    assert info is not None
    _, stride, count, first = info
    return ((first + np.arange(count) * stride) // PAGE).astype(np.uint32)


def u64(*values: int) -> npt.NDArray[np.uint64]:
    return np.array(values, np.uint64)


def sum_data(
    pool: npt.NDArray[np.uint8], slots: npt.NDArray[np.uint32], data_bytes: int
) -> npt.NDArray[np.uint64]:
    """The checksum of each slot's data."""
    return u64(
        *(xxh3_64(pool[slot * PAGE : slot * PAGE + data_bytes]) for slot in slots.astype(int).tolist())
    )
