"""Memory that the daemon copies to and from, through which every page goes on its way to the engine.

SGLang frees the slots of a load as soon as the linker says that it has failed, and ends requests with an
error if it says so too late. A copy that somebody else makes into those slots can be neither waited for
without bound nor taken back. So the daemon only ever writes here, and the engine's own process copies from
here into its slots. A page that a copy may still write is out of use until that copy is fenced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvtier import Group, Plane, SharedBuffer

from kvtier_sglang.pools import PagePool

if TYPE_CHECKING:
    import torch
    from kvtier.memory import Memory

ALIGN_BYTES = 256
"""Pages begin at multiples of it, because copies of aligned memory are faster."""
PAGES_MIN = 2
"""Of each pool: while one page is copied on, another one lands."""


class StagingPool:
    """The part of the staging memory that is for pages of one pool of the engine's."""

    def __init__(self, pool: PagePool, rows: torch.Tensor, group: Group) -> None:
        self.pool = pool
        self.rows = rows
        """The pages as bytes, shape (pages, page_bytes)."""
        self.group = group
        self._free = deque(range(group.num_blocks))

    @property
    def pages(self) -> int:
        """How many pages there are."""
        return self.group.num_blocks

    @property
    def free(self) -> int:
        """How many of them are not in use."""
        return len(self._free)

    def take(self, pages: int) -> list[int]:
        """Takes so many pages into use, or as many as are free. Returns their numbers."""
        return [self._free.popleft() for _ in range(min(pages, len(self._free)))]

    def give_back(self, numbers: Iterable[int]) -> None:
        """Ends the use of pages that nobody will read or write any more."""
        self._free.extend(numbers)


class Staging:
    """The staging memory of one rank: host memory that the daemon maps."""

    def __init__(self, pools: Sequence[PagePool], size_bytes: int) -> None:
        """Allocates about `size_bytes`, in equal parts for the pools. Raises OSError without memory."""
        import torch

        strides = [-(-pool.page_bytes // ALIGN_BYTES) * ALIGN_BYTES for pool in pools]
        counts = [max(PAGES_MIN, size_bytes // len(pools) // stride) for stride in strides]
        total = sum(stride * count for stride, count in zip(strides, counts, strict=True))
        self._buffer = SharedBuffer.create(total, "kvtier-staging")
        whole = torch.from_numpy(self._buffer.array)
        self.pools: list[StagingPool] = []
        """In the order in which they were given, which numbers the groups."""
        start = 0
        for pool, stride, count in zip(pools, strides, counts, strict=True):
            rows = whole[start : start + stride * count].view(count, stride)[:, : pool.page_bytes]
            plane = Plane(
                fragment_bytes=pool.page_bytes,
                base_offset=start,
                block_stride_bytes=stride,
                description=pool.description,
            )
            group = Group(
                block_tokens=pool.block_tokens,
                num_blocks=count,
                planes=(plane,),
                kind=pool.kind,
                window_tokens=pool.window_tokens,
            )
            self.pools.append(StagingPool(pool, rows, group))
            start += stride * count

    @property
    def memory(self) -> Memory:
        """What the client registers."""
        return self._buffer

    @property
    def groups(self) -> list[Group]:
        """What the client registers it as."""
        return [each.group for each in self.pools]

    def close(self) -> None:
        """Closes the descriptor; the memory stays as long as somebody has it mapped."""
        self.pools.clear()
        self._buffer.close()
