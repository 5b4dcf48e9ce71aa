"""What blocks hold in the campaigns: bytes that follow from the block hash, so that any wrong byte shows."""

import hashlib
from collections import Counter

import numpy as np
import numpy.typing as npt

BLOCK_BYTES = 16 * 1024
PLANES = 4
FRAGMENT_BYTES = BLOCK_BYTES // PLANES
MODEL = "campaign"


def hashes_of(family: str, count: int, first: int = 0) -> list[bytes]:
    """`count` block hashes of a family, each 32 bytes."""
    return [hashlib.sha256(f"{family}/{first + i}".encode()).digest() for i in range(count)]


def block_of(block_hash: bytes) -> npt.NDArray[np.uint8]:
    """The only right content of a block."""
    seed = np.frombuffer(block_hash, np.uint64)
    return np.random.Generator(np.random.SFC64(seed)).integers(0, 256, BLOCK_BYTES, np.uint8)


def compare(found: npt.NDArray[np.uint8], hashes: list[bytes], count: Counter[str]) -> None:
    """Counts blocks_compared and wrong_bytes of `found` (n, BLOCK_BYTES); fails if there is a wrong one."""
    pairs = zip(found, hashes, strict=True)
    wrong = [int(np.count_nonzero(block != block_of(block_hash))) for block, block_hash in pairs]
    count["blocks_compared"] += len(hashes)
    count["wrong_bytes"] += sum(wrong)
    assert not any(wrong), f"wrong bytes in blocks {[i for i, bytes_ in enumerate(wrong) if bytes_]}: {wrong}"


def wrong_blocks(found: npt.NDArray[np.uint8], hashes: list[bytes]) -> list[int]:
    """Positions at which `found` (n, BLOCK_BYTES) is not what the hashes say."""
    return [i for i, block_hash in enumerate(hashes) if not np.array_equal(found[i], block_of(block_hash))]
