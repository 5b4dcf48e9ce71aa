"""Content that is unique for each block, and can be told apart from every other at every eight bytes.

Word j of block i of prompt s is start(s, i) + j * STEP, modulo 2**64, with j counted through all fragments of
the block. So a block in another's place, a fragment in another's place, and a changed byte all show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.benchmarks.peers.driver import Prompt

STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def starts(prompt: Prompt) -> npt.NDArray[np.uint64]:
    """The first word of each block: a hash (splitmix64) of seed and number."""
    with np.errstate(over="ignore"):
        word = (np.uint64(prompt.seed) << np.uint64(32)) + np.arange(prompt.blocks, dtype=np.uint64)
        word = (word ^ (word >> np.uint64(30))) * _MIX[0]
        word = (word ^ (word >> np.uint64(27))) * _MIX[1]
        return word ^ (word >> np.uint64(31))


def fill(memory: list[npt.NDArray[np.uint8]], prompt: Prompt, block_ids: Sequence[int]) -> None:
    """Writes the prompt's blocks into blocks of the engine's cache, given plane by plane."""
    first = starts(prompt)
    for plane, blocks in enumerate(memory):
        blocks.view(np.uint64)[block_ids] = _words(first, plane, blocks.shape[1])


def wrong_blocks(memory: list[npt.NDArray[np.uint8]], prompt: Prompt, block_ids: Sequence[int]) -> int:
    """How many of the blocks are not exactly what `fill` writes there."""
    first = starts(prompt)
    wrong = np.zeros(len(first), dtype=bool)
    for plane, blocks in enumerate(memory):
        found = blocks.view(np.uint64)[block_ids]
        wrong |= (found != _words(first, plane, blocks.shape[1])).any(axis=1)
    return int(wrong.sum())


def wipe(memory: list[npt.NDArray[np.uint8]], block_ids: Sequence[int]) -> None:
    """Zeroes blocks, so that what is right afterwards was loaded."""
    for blocks in memory:
        blocks[block_ids] = 0


def first_bytes(prompt: Prompt, block: int, size: int) -> bytes:
    """What one block begins with: to find it in a peer's memory."""
    words = -(-size // 8)
    first = starts(prompt)[block : block + 1]
    return _words(first, 0, words * 8).tobytes()[:size]


def _words(first: npt.NDArray[np.uint64], plane: int, fragment_bytes: int) -> npt.NDArray[np.uint64]:
    words = fragment_bytes // 8
    with np.errstate(over="ignore"):
        offsets = (np.arange(words, dtype=np.uint64) + np.uint64(plane * words)) * STEP
        return first[:, None] + offsets[None, :]
