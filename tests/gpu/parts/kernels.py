"""The copy kernel that DMA is compared with, in Triton: a fixed number of programs moves fragments between
registered host memory and device memory, reading and writing the host over the link.

No part of the daemon: it exists so that the choice of DMA is shown and not asserted. Importing it needs
Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

BLOCK_WORDS = 4_096
WARPS = 16
WORD_BYTES = 8


@triton.jit
def _copy_fragments(
    source,
    target,
    source_index,
    target_index,
    count,
    words,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Fragment i of `words` 8-byte words goes from place source_index[i] to place target_index[i]."""
    first = tl.program_id(0)
    programs = tl.num_programs(0)
    for fragment in range(first, count, programs):
        # An index times the words of a fragment: so the compiler knows the alignment and moves 16 bytes at
        # once.
        read = source + tl.load(source_index + fragment) * words
        write = target + tl.load(target_index + fragment) * words
        for start in range(0, words, BLOCK):
            lanes = start + tl.arange(0, BLOCK)
            inside = lanes < words
            tl.store(write + lanes, tl.load(read + lanes, mask=inside), mask=inside)


def copy_fragments(
    source: Any, target: Any, source_index: Any, target_index: Any, fragment_bytes: int, programs: int
) -> None:
    """Enqueues the copy on torch's current stream.

    `source` and `target` are int64 tensors of shape (n,), one on the GPU and one in registered host memory;
    the indexes are int64 tensors of shape (count,) on the GPU, in fragments. `fragment_bytes` is a multiple
    of 128.
    """
    words = fragment_bytes // WORD_BYTES
    block = min(BLOCK_WORDS, triton.next_power_of_2(words))
    _copy_fragments[(programs,)](
        source, target, source_index, target_index, source_index.numel(), words, BLOCK=block, num_warps=WARPS
    )
