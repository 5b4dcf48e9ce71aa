"""Checks whether a descriptor is safe to map, whether ranges are memory of a GPU, and whether all blocks lie
inside them.

This is decided before anything is mapped. The functions are pure, except `inspect`, which asks the kernel.
The worker checks the arithmetic again in native code, and also what only the GPU's driver knows.
"""

import bisect
import fcntl
import itertools
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvtier.v1 import side_pb2

from kvtierd.cache import CPU, DeviceRange
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.stimuli import GroupGeometry

F_GET_SEALS = 1034
F_SEAL_SHRINK = 0x0002
F_SEAL_WRITE = 0x0008
F_SEAL_FUTURE_WRITE = 0x0010
BLOCK_BYTES = 512
"""The unit of st_blocks, on every file system."""
OFFSET_MAX = 2**63 - 1
"""The largest file offset. Python's integers are unbounded, so results are computed first and then compared
with it."""
BLOCKS_MAX = 2**32 - 1
WORD_BYTES = 8
DOORBELLS_MAX = 65_536
PARTS_MAX = 65_536
RANGES_MAX = 4_096
IPC_HANDLE_BYTES = 64
"""CU_IPC_HANDLE_SIZE."""

Groups = Sequence[side_pb2.GroupMemory]
"""Where the planes of each group lie in the mapping."""

_GPU = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the kernel says about a descriptor."""

    regular: bool
    size_bytes: int
    allocated_bytes: int
    """Memory that it has, swapped out or not. It may have some behind its end."""
    seals: int | None
    """None if the file has no seals."""
    writable: bool


def ranges_of(request: side_pb2.RegisterMemory) -> tuple[DeviceRange, ...]:
    """Raises Refusal for a range that belongs neither to an allocation nor to chunks."""
    return tuple(_range_of(f"ranges[{index}]", part) for index, part in enumerate(request.ranges))


def _range_of(field: str, part: side_pb2.DeviceRange) -> DeviceRange:
    if part.HasField("ipc"):
        return DeviceRange(
            bytes=part.bytes,
            offset=part.ipc.offset,
            ipc_handle=part.ipc.handle,
            buffer_id=part.ipc.buffer_id,
        )
    if part.HasField("chunks") and part.chunks.count:
        return DeviceRange(bytes=part.bytes, offset=part.chunks.offset, chunks=part.chunks.count)
    raise Refusal(
        Reason.DEVICE_MEMORY_INVALID,
        "a range has an IPC handle, or takes one chunk at least",
        field=f"{field}.source",
        value=part.WhichOneof("source") or "none",
    )


def device_name(text: str) -> str:
    """The device that a client means. Raises Refusal if no device can have this name."""
    refusal = partial(Refusal, field="device", value=text)
    if text in ("", CPU):
        return CPU
    if _GPU.fullmatch(text):
        return text
    if text.startswith("MIG-"):
        raise refusal(
            Reason.DEVICE_UNAVAILABLE,
            "memory of a MIG instance cannot be shared between processes, CUDA has no IPC there: turn MIG "
            "off for this GPU, or let the client copy through host memory",
        )
    raise refusal(
        Reason.DEVICE_UNKNOWN, 'write "cpu", or "GPU-" and a UUID in lower case, as `nvidia-smi -L` prints it'
    )


def inspect(fd: int) -> Descriptor:
    """Asks the kernel about `fd`; changes nothing."""
    status = os.fstat(fd)
    try:
        seals: int | None = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError:
        seals = None
    writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
    allocated_bytes = status.st_blocks * BLOCK_BYTES
    return Descriptor(stat.S_ISREG(status.st_mode), status.st_size, allocated_bytes, seals, writable)


def check_descriptor(found: Descriptor) -> None:
    """Raises Refusal unless this is a memfd that can be mapped for writing and can never shrink."""
    refusal = partial(Refusal, field="seals", value=found.seals)
    if not found.regular or found.seals is None:
        raise Refusal(
            Reason.MAPPING_INVALID, "send a memfd (memfd_create with MFD_ALLOW_SEALING)", field="descriptor"
        )
    if not found.seals & F_SEAL_SHRINK:
        raise refusal(
            Reason.MAPPING_NOT_SEALED,
            "the descriptor could shrink under its readers: seal it with F_SEAL_SHRINK",
        )
    if found.seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE) or not found.writable:
        raise refusal(
            Reason.MAPPING_INVALID,
            "the descriptor cannot be mapped for writing: open it read-write, without a write seal",
        )


def check_allocated(found: Descriptor) -> None:
    """Raises Refusal if the memfd has holes, which a worker that copies would have to fill with memory of the
    daemon's."""
    if found.allocated_bytes < found.size_bytes:
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"only so many bytes of the memfd's {found.size_bytes} are allocated, and the daemon takes no "
            "memory for others: allocate all of it before it is registered (posix_fallocate, or madvise with "
            "MADV_POPULATE_WRITE)",
            field="descriptor.allocated_bytes",
            value=found.allocated_bytes,
        )


def check_words(found: Descriptor, doorbells: int, parts: int) -> None:
    """Raises Refusal unless `found` is a sound descriptor with room for so many doorbells and part words."""
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
    check_allocated(found)


def check_memory(
    found: Descriptor, mapping_bytes: int, groups: Groups, geometry: Sequence[GroupGeometry], *, sparse: bool
) -> None:
    """Raises Refusal unless every byte of every block of every group of Hello lies inside the mapping, and is
    allocated unless it is said to be `sparse`.

    `geometry` is what the session's Hello said. Both must have the same groups in the same order.
    """
    check_descriptor(found)
    if not 0 < mapping_bytes <= found.size_bytes:
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"must be more than 0 and at most the descriptor's {found.size_bytes} bytes",
            field="mapping_bytes",
            value=mapping_bytes,
        )
    _check_groups([mapping_bytes], groups, geometry)
    if not sparse:
        check_allocated(found)


def check_chunks(count: int, sizes: Sequence[int]) -> None:
    """Raises Refusal unless there is one sound size for each of `count` descriptors of chunks."""
    if not 0 < len(sizes) == count:
        raise Refusal(
            Reason.COUNT_MISMATCH,
            f"one size for each of the {count} descriptors, and one descriptor at least",
            field="bytes",
            value=len(sizes),
        )
    for index, size_bytes in enumerate(sizes):
        if not 0 < size_bytes <= OFFSET_MAX:
            raise Refusal(
                Reason.DEVICE_MEMORY_INVALID,
                "a chunk has more than 0 bytes",
                field=f"bytes[{index}]",
                value=size_bytes,
            )


def check_ranges(
    ranges: Sequence[DeviceRange],
    chunks: Sequence[int],
    mapping_bytes: int,
    groups: Groups,
    geometry: Sequence[GroupGeometry],
) -> None:
    """Raises Refusal unless the ranges make up the mapping, use up all chunks, and hold every byte of every
    block of every group of Hello, with each plane in one range.

    `chunks` are the sizes in bytes of the chunks that the session has added, in order.
    """
    if not 0 < len(ranges) <= RANGES_MAX:
        raise Refusal(
            Reason.DEVICE_MEMORY_INVALID,
            f"memory of a GPU is 1 to {RANGES_MAX} ranges",
            field="ranges",
            value=len(ranges),
        )
    first = 0
    for index, part in enumerate(ranges):
        _check_range(f"ranges[{index}]", part, chunks[first : first + part.chunks])
        first += part.chunks
    if first != len(chunks):
        raise Refusal(
            Reason.DEVICE_MEMORY_INVALID,
            f"the ranges take {first} chunks, and this session has added {len(chunks)}: use up each of them",
            field="ranges",
            value=first,
        )
    ends = list(itertools.accumulate(part.bytes for part in ranges))
    if mapping_bytes != ends[-1] or mapping_bytes > OFFSET_MAX:
        raise Refusal(
            Reason.MAPPING_INVALID,
            f"must be the sum of the ranges, {ends[-1]}, and at most {OFFSET_MAX}",
            field="mapping_bytes",
            value=mapping_bytes,
        )
    _check_groups(ends, groups, geometry)


def _check_range(field: str, part: DeviceRange, chunks: Sequence[int]) -> None:
    """`chunks`: the sizes of the chunks that the range takes, as far as there are any left."""

    def refuse(name: str, value: object, message: str) -> Refusal:
        return Refusal(Reason.DEVICE_MEMORY_INVALID, message, field=f"{field}.{name}", value=value)

    if not 0 < part.bytes <= OFFSET_MAX or part.offset + part.bytes > OFFSET_MAX:
        raise refuse("bytes", part.bytes, "a range has more than 0 bytes, and ends below 2^63")
    if not part.chunks:
        if len(part.ipc_handle) != IPC_HANDLE_BYTES:
            raise refuse(
                "ipc.handle", f"{len(part.ipc_handle)} bytes", f"an IPC handle has {IPC_HANDLE_BYTES} bytes"
            )
        return
    if len(chunks) != part.chunks:
        raise refuse("chunks.count", part.chunks, f"only {len(chunks)} chunks are left: add them first")
    if part.offset >= chunks[0]:
        raise refuse(
            "chunks.offset", part.offset, f"must lie in the first chunk, which has {chunks[0]} bytes"
        )
    end, room = part.offset + part.bytes, sum(chunks)
    if not room - chunks[-1] < end <= room:
        raise refuse(
            "bytes",
            part.bytes,
            f"with its offset it ends at byte {end} of {len(chunks)} chunks that have {room}: "
            "it must end in the last of them",
        )


def _check_groups(ends: Sequence[int], groups: Groups, geometry: Sequence[GroupGeometry]) -> None:
    """`ends`: where each piece of the mapping ends, which no plane may cross; the last one is the mapping's
    size."""
    if [place.group for place in groups] != list(range(len(geometry))):
        raise Refusal(
            Reason.UNKNOWN_GROUP,
            f"name each group of Hello once, in order: 0 to {len(geometry) - 1}",
            field="groups",
            value=[place.group for place in groups[:16]],
        )
    for index, (place, shape) in enumerate(zip(groups, geometry, strict=True)):
        _check_group(f"groups[{index}]", ends, place, shape)


def _check_group(field: str, ends: Sequence[int], place: side_pb2.GroupMemory, shape: GroupGeometry) -> None:
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
        _check_plane(f"{field}.planes[{index}]", ends, place.num_blocks, plane, fragment_bytes)


def _check_plane(
    field: str, ends: Sequence[int], num_blocks: int, plane: side_pb2.Plane, fragment_bytes: int
) -> None:
    stride = plane.block_stride_bytes
    of_stride = partial(Refusal, field=f"{field}.block_stride_bytes", value=stride)
    of_offset = partial(Refusal, field=f"{field}.base_offset", value=plane.base_offset)
    if num_blocks > 1 and stride < fragment_bytes:
        raise of_stride(
            Reason.LAYOUT_INVALID, f"blocks would overlap: a block has {fragment_bytes} bytes in this plane"
        )
    end = plane.base_offset + (num_blocks - 1) * stride + fragment_bytes
    if end > OFFSET_MAX:
        raise of_stride(
            Reason.STRIDE_OVERFLOW,
            f"offset and stride of {num_blocks} blocks pass the largest offset there is",
        )
    if end > ends[-1]:
        raise of_offset(
            Reason.PLANE_BEYOND_MAPPING, f"its last block ends at byte {end}, the mapping at {ends[-1]}"
        )
    piece = bisect.bisect_right(ends, plane.base_offset)
    if end > ends[piece]:
        raise of_offset(
            Reason.PLANE_BEYOND_MAPPING,
            f"its last block ends at byte {end}, ranges[{piece}], where it begins, at {ends[piece]}: "
            "a plane lies in one range",
        )
