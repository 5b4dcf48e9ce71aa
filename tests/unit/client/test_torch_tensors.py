"""Where the blocks of torch tensors lie, in every layout that engines use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvtier import KvtierError, Reason

torch: Any = pytest.importorskip("torch")
from kvtier.torch import SharedTensors, plane_of  # noqa: E402

BLOCKS, TOKENS, HEADS, VALUES = 6, 4, 2, 8
SHAPES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "blocks first": ((BLOCKS, 2, TOKENS, HEADS, VALUES), 0, 1),
    "keys and values first": ((2, BLOCKS, TOKENS, HEADS, VALUES), 1, 2),
    "latents": ((BLOCKS, TOKENS, VALUES), 0, 1),
}
"""Shape, which dimension numbers the blocks, and how many planes a tensor becomes."""


@pytest.mark.parametrize(("shape", "block_dim", "planes"), SHAPES.values(), ids=SHAPES.keys())
def test_each_block_is_where_its_planes_say(shape: tuple[int, ...], block_dim: int, planes: int) -> None:
    names = ("first", "second")
    with SharedTensors.allocate(
        dict.fromkeys(names, shape), torch.bfloat16, block_tokens=TOKENS, block_dim=block_dim
    ) as cache:
        [group] = cache.groups
        memory: Any = cache.memory
        assert (group.num_blocks, len(group.planes), cache.num_blocks) == (BLOCKS, 2 * planes, BLOCKS)
        for number, name in enumerate(names):
            cache[name].copy_(torch.arange(cache[name].numel()).view(shape) + 1_000 * number)
        for block in range(BLOCKS):
            stored = [
                bytes(memory.array[start : start + plane.fragment_bytes])
                for plane in group.planes
                for start in [plane.base_offset + block * plane.block_stride_bytes]
            ]
            wanted = b"".join(
                cache[name].select(block_dim, block).contiguous().view(torch.uint8).numpy().tobytes()
                for name in names
            )
            assert b"".join(stored) == wanted
        assert len({plane.description for plane in group.planes}) == len(group.planes)


def test_other_shapes_dtypes_and_names_are_other_layouts() -> None:
    def described(shape: tuple[int, ...], dtype: Any, name: str = "layer") -> set[str]:
        with SharedTensors.allocate({name: shape}, dtype, block_tokens=TOKENS) as cache:
            return {plane.description for plane in cache.groups[0].planes}

    usual = described((BLOCKS, TOKENS, 2, VALUES), torch.bfloat16)
    assert usual == described((2 * BLOCKS, TOKENS, 2, VALUES), torch.bfloat16), "their number does not count"
    others = [
        described((BLOCKS, TOKENS, VALUES, 2), torch.bfloat16),
        described((BLOCKS, TOKENS, 2, VALUES), torch.float16),
        described((BLOCKS, TOKENS, 2, VALUES), torch.bfloat16, "other"),
    ]
    assert all(usual.isdisjoint(other) for other in others)


def test_a_block_in_pieces_is_refused() -> None:
    tensor = torch.zeros(TOKENS, BLOCKS, VALUES).transpose(0, 1)
    with pytest.raises(KvtierError, match=r"not contiguous") as refused:
        plane_of("layer", tensor, BLOCKS, 0)
    assert refused.value.reason is Reason.LAYOUT_INVALID


def test_tensors_of_the_host_have_to_be_made_here() -> None:
    with pytest.raises(KvtierError, match=r"SharedTensors\.allocate"):
        SharedTensors.of({"layer": torch.zeros(BLOCKS, TOKENS, VALUES)}, block_tokens=TOKENS)


def test_all_tensors_have_the_same_blocks() -> None:
    shapes = {"one": (BLOCKS, TOKENS, VALUES), "other": (BLOCKS + 1, TOKENS, VALUES)}
    with pytest.raises(KvtierError, match=r"same number of blocks"):
        SharedTensors.allocate(shapes, torch.float32, block_tokens=TOKENS)


def test_a_tensor_of_larger_blocks_than_the_kernels_have() -> None:
    """Kernels may work on smaller blocks than the engine's block table has."""
    tensor = torch.zeros(3 * BLOCKS, TOKENS, VALUES)
    plane = plane_of("layer", tensor, BLOCKS, 64)
    assert plane.fragment_bytes == plane.block_stride_bytes == 3 * TOKENS * VALUES * 4
    assert plane.base_offset == 64
    assert np.prod(tensor.shape) * 4 == plane.fragment_bytes * BLOCKS
