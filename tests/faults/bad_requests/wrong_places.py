"""RegisterMemory with places that lie outside the mapping, overlap or overflow: refused before anything is
mapped. What is not refused is measured by plain arithmetic: every byte of every block has to lie inside."""

from collections.abc import Sequence
from random import Random
from typing import Any

from kvtier.v1 import side_pb2
from kvtierd.core.errors import Refusal
from kvtierd.core.stimuli import GroupGeometry
from kvtierd.rpc import memory_check

from tests.faults.bad_requests.guest import RankMemory

U64 = 2**64 - 1


def places(memory: RankMemory) -> side_pb2.RegisterMemory:
    """The right ones."""
    request = side_pb2.RegisterMemory(mapping_bytes=memory.bytes)
    for mapping in memory.mappings:
        group = request.groups.add(group=mapping.group, num_blocks=mapping.num_blocks)
        for base, stride in zip(mapping.base_offsets, mapping.block_strides, strict=True):
            group.planes.add(base_offset=base, block_stride_bytes=stride)
    return request


def odd(value: int, chance: Random) -> int:
    """Another number of 64 bits, often near one that matters."""
    match chance.randrange(5):
        case 0:
            return chance.choice((0, 1, U64, 2**63, 2**63 - 1, 2**32, 2**32 - 1))
        case 1:
            return value + chance.choice((-1, 1, 4096, -4096)) & U64
        case 2:
            return (U64 + 1 - value) & U64
        case 3:
            return chance.getrandbits(64) >> chance.randrange(64)
        case _:
            return value * chance.choice((2, 3, 2**20)) & U64


def spoil(request: Any, chance: Random) -> None:
    """Changes one to three numbers or lists."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        group = chance.choice(request.groups)
        if not group.planes:
            continue
        plane = chance.choice(group.planes)
        match chance.randrange(9):
            case 0:
                request.mapping_bytes = odd(request.mapping_bytes, chance)
            case 1:
                group.num_blocks = odd(group.num_blocks, chance)
            case 2 | 3:
                plane.base_offset = odd(plane.base_offset, chance)
            case 4 | 5:
                plane.block_stride_bytes = odd(plane.block_stride_bytes, chance)
            case 6:
                group.group = odd(group.group, chance) & (2**32 - 1)
            case 7:
                group.planes.append(plane) if chance.random() < 0.5 else group.planes.pop()
            case _:
                request.groups.append(group) if chance.random() < 0.5 else request.groups.pop()
                if not request.groups:
                    return


def is_refused(data: bytes, memory: RankMemory, geometry: Sequence[GroupGeometry]) -> bool:
    """What the side server does with a RegisterMemory for host memory before it asks the copy worker. Fails
    if it lets anything pass whose bytes do not all lie in the mapping."""
    request = side_pb2.RegisterMemory.FromString(data)
    try:
        found = memory_check.inspect(memory.fd)
        memory_check.check_memory(
            found, request.mapping_bytes, request.groups, geometry, sparse=request.sparse
        )
    except Refusal:
        return True
    assert 0 < request.mapping_bytes <= memory.bytes
    assert len(request.groups) == len(geometry)
    for index, (group, shape) in enumerate(zip(request.groups, geometry, strict=True)):
        assert group.group == index
        assert group.num_blocks > 0
        for plane, (size, _) in zip(group.planes, shape.planes, strict=True):
            last = plane.base_offset + (group.num_blocks - 1) * plane.block_stride_bytes + size
            assert last <= request.mapping_bytes, f"a plane ends at byte {last} of {request.mapping_bytes}"
            assert group.num_blocks == 1 or plane.block_stride_bytes >= size, "blocks overlap"
    return False
