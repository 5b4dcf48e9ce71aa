"""Is this descriptor safe to map, and do all blocks lie inside it? Decided before anything is mapped.

Pure but for `inspect`, which asks the kernel. The worker checks the arithmetic again, natively.
"""

import fcntl
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.stimuli import GroupGeometry

F_GET_SEALS = 1034
F_SEAL_SHRINK = 0x0002
F_SEAL_WRITE = 0x0008
F_SEAL_FUTURE_WRITE = 0x0010
OFFSET_MAX = 2**63 - 1
"""Largest file offset. Everything is worked out in Python's unbounded integers and held against it."""
BLOCKS_MAX = 2**32 - 1
WORD_BYTES = 8
DOORBELLS_MAX = 65_536
PARTS_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the kernel says of a descriptor."""

    regular: bool
    size_bytes: int
    seals: int | None
    """None where the file knows no seals."""
    writable: bool


@dataclass(frozen=True, slots=True)
class PlanePlace:
    base_offset: int
    block_stride_bytes: int


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where one group's planes lie in the mapping."""

    group: int
    num_blocks: int
    planes: tuple[PlanePlace, ...]


def inspect(fd: int) -> Descriptor:
    """Asks the kernel about `fd`; changes nothing."""
    status = os.fstat(fd)
    try:
        seals: int | None = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        seals = None
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    return Descriptor(stat.S_ISREG(status.st_mode), status.st_size, seals, writable)


def check_descriptor(found: Descriptor) -> None:
    """Raises Refusal unless this is a memfd that can be mapped for writing and can never shrink."""
    if not found.regular or found.seals is None:
        raise Refusal(
            Reason.MAPPING_INVALID, "send a memfd (memfd_create with MFD_ALLOW_SEALING)", field="descriptor"
        )
    if not found.seals & F_SEAL_SHRINK:
        raise Refusal(
            Reason.MAPPING_NOT_SEALED,
            "the descriptor could shrink under its readers: seal it with F_SEAL_SHRINK",
            field="seals",
            value=found.seals,
        )
    if found.seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE) or not found.writable:
        raise Refusal(
            Reason.MAPPING_INVALID,
            "the descriptor cannot be mapped for writing: open it read-write, without a write seal",
            field="seals",
            value=found.seals,
        )


def check_words(found: Descriptor, doorbells: int, parts: int) -> None:
    """Raises Refusal unless `found` is a sound descriptor that holds so many doorbell and part words."""
    if not 0 <= doorbells <= DOORBELLS_MAX:
        raise Refusal(
            Reason.WORD_INDEX_RANGE, f"at most {DOORBELLS_MAX} doorbells", field="doorbells", value=doorbells
        )
    if not 1 <= parts <= PARTS_MAX:
        raise Refusal(Reason.WORD_INDEX_RANGE, f"between 1 and {PARTS_MAX} parts", field="parts", value=parts)
    check_descriptor(found)
    need = (doorbells + parts) * WORD_BYTES
    if found.size_bytes < need:
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"{doorbells} doorbells and {parts} parts need {need} bytes: enlarge it before sealing it",
            field="descriptor",
            value=found.size_bytes,
        )


def check_memory(
    found: Descriptor, mapping_bytes: int, groups: Sequence[GroupPlace], geometry: Sequence[GroupGeometry]
) -> None:
    """Raises Refusal unless every byte of every block of every group of Hello lies inside the mapping.

    `geometry` is what the session's Hello said; groups of both must be the same, in order.
    """
    check_descriptor(found)
    if not 0 < mapping_bytes <= found.size_bytes:
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"must be more than 0 and at most the descriptor's {found.size_bytes} bytes",
            field="mapping_bytes",
            value=mapping_bytes,
        )
    if [place.group for place in groups] != list(range(len(geometry))):
        raise Refusal(
            Reason.UNKNOWN_GROUP,
            f"name each group of Hello once, in order: 0 to {len(geometry) - 1}",
            field="groups",
            value=[place.group for place in groups[:16]],
        )
    for index, (place, shape) in enumerate(zip(groups, geometry, strict=True)):
        _check_group(f"groups[{index}]", mapping_bytes, place, shape)


def _check_group(field: str, mapping_bytes: int, place: GroupPlace, shape: GroupGeometry) -> None:
    if not 0 < place.num_blocks <= BLOCKS_MAX:
        raise Refusal(
            Reason.LAYOUT_INVALID,
            f"must be between 1 and {BLOCKS_MAX}",
            field=f"{field}.num_blocks",
            value=place.num_blocks,
        )
    if len(place.planes) != len(shape.planes):
        raise Refusal(
            Reason.COUNT_MISMATCH,
            f"Hello named {len(shape.planes)} planes for this group: place each of them, in the same order",
            field=f"{field}.planes",
            value=len(place.planes),
        )
    for index, (plane, (fragment_bytes, _)) in enumerate(zip(place.planes, shape.planes, strict=True)):
        _check_plane(f"{field}.planes[{index}]", mapping_bytes, place.num_blocks, plane, fragment_bytes)


def _check_plane(
    field: str, mapping_bytes: int, num_blocks: int, plane: PlanePlace, fragment_bytes: int
) -> None:
    stride = plane.block_stride_bytes
    if num_blocks > 1 and stride < fragment_bytes:
        raise Refusal(
            Reason.LAYOUT_INVALID,
            f"blocks would overlap: a block has {fragment_bytes} bytes in this plane",
            field=f"{field}.block_stride_bytes",
            value=stride,
        )
    end = plane.base_offset + (num_blocks - 1) * stride + fragment_bytes
    if end > OFFSET_MAX:
        raise Refusal(
            Reason.STRIDE_OVERFLOW,
            f"offset and stride of {num_blocks} blocks pass the largest offset there is",
            field=f"{field}.block_stride_bytes",
            value=stride,
        )
    if end > mapping_bytes:
        raise Refusal(
            Reason.PLANE_BEYOND_MAPPING,
            f"its last block ends at byte {end}, the mapping at {mapping_bytes}",
            field=f"{field}.base_offset",
            value=plane.base_offset,
        )
