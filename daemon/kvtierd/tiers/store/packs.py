"""Packs: the objects that a shared store has, of some megabytes each, with many blocks of one group.

A pack never changes. It begins with its head, which says what is in it, so that another host needs one short
read to know what it may ask for. Whatever a reader is given, it believes nothing that does not fit: the head
has a checksum, names the namespace and the group that it belongs to, and has the checksum of each block's
bytes, which were computed when the block was stored on its first host.

Layout, all numbers little-endian:

    bytes 0 to 95   magic, checksum of the head with 0 in this place, length of the head, number of records,
                    length of the pack, group, format version, the namespace's digest
    then            one record of 72 bytes for each shard of a block, in the order of their prompts
    then            what the records name, from a multiple of ALIGNMENT on
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from kvtier_kernels import xxh3_64

MAGIC: Final = b"KVTIERP1"
VERSION: Final = 1
ALIGNMENT: Final = 4_096
DIGEST_BYTES: Final = 16
HASH_BYTES: Final = 32
RECORDS_MAX: Final = 1 << 16
"""In one pack: a head is at most 4.5 MiB."""
PACK_BYTES_MAX: Final = 1 << 30

HEAD: Final = np.dtype(
    [
        ("magic", "S8"),
        ("checksum", "<u8"),
        ("head_bytes", "<u8"),
        ("records", "<u8"),
        ("pack_bytes", "<u8"),
        ("group", "<u4"),
        ("version", "<u4"),
        ("namespace", "u1", DIGEST_BYTES),
        ("unused", "u1", 32),
    ]
)
RECORD: Final = np.dtype(
    [
        ("hash", "u1", HASH_BYTES),
        ("shard", "<u2"),
        ("world", "<u2"),
        ("coding", "<u4"),
        ("offset", "<u8"),
        ("stored_bytes", "<u8"),
        ("data_bytes", "<u8"),
        ("checksum", "<u8"),
    ]
)
"""`stored_bytes` are there from `offset` on, and become `data_bytes`, with that checksum, by `coding`
(`coding.py`)."""
RAW: Final = 0
"""The coding of bytes that are stored as they are."""

Records = npt.NDArray[np.void]


class PackError(Exception):
    """What was read is no pack, or not the one that was asked for. The text says what does not fit."""


@dataclass(frozen=True, slots=True)
class Pack:
    """What a head says."""

    namespace: bytes
    group: int
    pack_bytes: int
    records: Records


def head_bytes(records: int) -> int:
    """The length of a head with so many records, up to where data begins."""
    return -(-(HEAD.itemsize + records * RECORD.itemsize) // ALIGNMENT) * ALIGNMENT


def laid_out(records: Records) -> Records:
    """The same records with the offsets that their data has in a pack of them, one after the other. Raises
    ValueError if they are too many or too large."""
    if not 0 < len(records) <= RECORDS_MAX:
        raise ValueError(f"a pack of {len(records)} records; expected 1 to {RECORDS_MAX}")
    lengths = -(-records["stored_bytes"].astype(np.int64) // ALIGNMENT) * ALIGNMENT
    ends = head_bytes(len(records)) + np.cumsum(lengths)
    if ends[-1] > PACK_BYTES_MAX:
        raise ValueError(f"a pack of {ends[-1]} bytes; expected at most {PACK_BYTES_MAX}")
    placed = records.copy()
    placed["offset"] = ends - lengths
    return placed


def head_of(namespace: bytes, group: int, records: Records) -> bytes:
    """The head of a pack of these records, which `laid_out` has placed."""
    last = records[-1]
    head = np.zeros((), HEAD)
    head["magic"], head["version"] = MAGIC, VERSION
    head["head_bytes"], head["records"] = head_bytes(len(records)), len(records)
    head["pack_bytes"] = -(-(int(last["offset"]) + int(last["stored_bytes"])) // ALIGNMENT) * ALIGNMENT
    head["group"], head["namespace"] = group, np.frombuffer(namespace, np.uint8)
    whole = bytearray(head_bytes(len(records)))
    whole[: HEAD.itemsize] = head.tobytes()
    whole[HEAD.itemsize : HEAD.itemsize + records.nbytes] = records.tobytes()
    head["checksum"] = xxh3_64(whole)
    whole[: HEAD.itemsize] = head.tobytes()
    return bytes(whole)


def parts_of(
    namespace: bytes, group: int, records: Records, data: Sequence[memoryview]
) -> Iterator[memoryview]:
    """A whole pack, piece after piece: its head, and the stored bytes of each record, which `laid_out` has
    placed, each filled up with zeros."""
    yield memoryview(head_of(namespace, group, records))
    for record, stored in zip(records, data, strict=True):
        if len(stored) != int(record["stored_bytes"]):
            raise ValueError(f"{len(stored)} bytes for a record of {record['stored_bytes']}")
        yield stored
        if missing := -len(stored) % ALIGNMENT:
            yield memoryview(bytes(missing))


def needed_bytes(begin: bytes) -> int:
    """How long a head is of which these are the first bytes, HEAD.itemsize at least. Raises PackError."""
    head = _fixed(begin)
    count, length = int(head["records"]), int(head["head_bytes"])
    if not 0 < count <= RECORDS_MAX or length != head_bytes(count):
        raise PackError(f"a head of {length} bytes for {count} records")
    return length


def length_of(begin: bytes) -> int:
    """How long the pack says that it is. Raises PackError."""
    return int(_fixed(begin)["pack_bytes"])


def read_head(whole: bytes, namespace: bytes, group: int, pack_bytes: int) -> Pack:
    """What a head says, of the length that `needed_bytes` gives, in an object of `pack_bytes`. Raises
    PackError if anything in it does not fit, or if it belongs to another namespace or group."""
    if len(whole) != needed_bytes(whole):
        raise PackError(f"{len(whole)} bytes of a head of {needed_bytes(whole)}")
    head = _fixed(whole)
    bare = head.copy()
    bare["checksum"] = 0
    if xxh3_64(bare.tobytes() + whole[HEAD.itemsize :]) != int(head["checksum"]):
        raise PackError("the head's checksum does not fit")
    if head["namespace"].tobytes() != namespace or int(head["group"]) != group:
        raise PackError(f"the pack belongs to another namespace, or to group {head['group']}")
    if int(head["pack_bytes"]) != pack_bytes:
        raise PackError(f"{pack_bytes} bytes of a pack of {head['pack_bytes']}")
    records = np.frombuffer(whole, RECORD, int(head["records"]), HEAD.itemsize)
    begin, length = records["offset"], records["stored_bytes"]
    most = np.uint64(pack_bytes)
    outside = (length > most) | (begin < np.uint64(len(whole))) | (begin > most - np.minimum(length, most))
    if bool(np.any(outside)):
        raise PackError("a record lies outside of the pack")
    if bool(np.any(records["shard"] >= records["world"])):
        raise PackError("a record is of a shard that there is not")
    return Pack(namespace, group, pack_bytes, records)


def _fixed(whole: bytes) -> npt.NDArray[np.void]:
    """The part of a head that is as long in all packs."""
    if len(whole) < HEAD.itemsize:
        raise PackError(f"{len(whole)} bytes are no head")
    head = np.frombuffer(whole, HEAD, 1)[0]
    if bytes(head["magic"]) != MAGIC:
        raise PackError("no pack: it begins otherwise")
    if int(head["version"]) != VERSION:
        raise PackError(f"a pack of version {head['version']}; this daemon reads {VERSION}")
    return np.array(head)
