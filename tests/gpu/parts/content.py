"""Fresh random content, as fast as memory goes: gigabytes of it must not cost the time that is there for
measuring.

Zeros would hide what was not written, and are faster to copy than data. Words are those of one random piece,
combined with another random word for each piece: equal at two places only by accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
PIECE_BYTES = 16 << 20
THREADS = 8


def random_bytes(n: int) -> U8:
    """`n` random bytes, writable."""
    return np.frombuffer(np.random.default_rng().bytes(n), np.uint8).copy()


def random_pieces(n: int) -> Iterator[tuple[int, U8]]:
    """Offsets and contents of pieces that make up `n` bytes. A piece is to be used before the next one is
    asked for."""
    rng = np.random.default_rng()
    first = random_bytes(-(-min(n, PIECE_BYTES) // 8) * 8).view(np.uint64)
    piece = np.empty_like(first)
    for offset in range(0, n, PIECE_BYTES):
        np.bitwise_xor(first, rng.integers(0, 1 << 63, dtype=np.uint64), out=piece)
        yield offset, piece.view(np.uint8)[: n - offset]


def fill_random(array: U8) -> None:
    """Gives a contiguous array new content, in parallel."""
    n = array.nbytes
    if n % 8:
        array[-(n % 8) :] = random_bytes(n % 8)
    words = array[: n // 8 * 8].view(np.uint64)
    rng = np.random.default_rng()
    first = random_bytes(min(words.nbytes, PIECE_BYTES)).view(np.uint64)
    step = PIECE_BYTES // 8
    starts = range(0, len(words), step)
    masks = rng.integers(0, 1 << 63, len(starts), dtype=np.uint64)

    def piece(index: int) -> None:
        target = words[starts[index] : starts[index] + step]
        np.bitwise_xor(first[: len(target)], masks[index], out=target)

    with ThreadPoolExecutor(THREADS) as threads:
        for _ in threads.map(piece, range(len(starts))):
            pass
