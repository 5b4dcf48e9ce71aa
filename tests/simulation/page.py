"""Index pages of the simulated daemon, in the kind that its tables write, and whether they are right."""

from __future__ import annotations

from collections import Counter
from mmap import mmap
from typing import Any

import numpy as np
from kvtier_kernels import IndexPage, IndexReader

from tests.oracles import block_table as oracle

HEADER_BYTES = 4_096


class FakePage:
    """One page, and what a client sees of it. `blocks`: room for so many."""

    def __init__(self, blocks: int, *, plain: bool) -> None:
        self.page: Any
        if plain:
            self.page = oracle.IndexPage()
            return
        self._memory = mmap(-1, IndexPage.bytes_for(blocks))
        self.page = IndexPage(self._memory, 1, blocks)
        self._reader = IndexReader(self._memory, 32)

    @property
    def is_relied_on(self) -> bool:
        """Whether clients take what is missing in it for a miss."""
        return bool(
            self.page.is_complete if isinstance(self.page, oracle.IndexPage) else self._reader.complete
        )

    def check(self, space: int, tables: list[Any]) -> None:
        """Once complete it has every block of its space that some table has, as often as tables have it, and
        nothing else; before that, nothing else either."""
        wanted: Counter[bytes] = Counter()
        for table in tables:
            dump = table.dump()
            wanted.update(row.tobytes() for row in dump["hashes"][dump["spaces"] == space])
        if isinstance(self.page, oracle.IndexPage):
            there = +self.page.hashes
            assert there <= wanted, "the page has what no table has"
            assert not self.page.is_complete or there == wanted, "a block is missing in the page"
            return
        words = np.frombuffer(self._memory, np.uint64, offset=HEADER_BYTES)
        counts = np.sort(words[words != 0] & np.uint64(0xFF)).tolist()
        known = [key for key in wanted if self._reader.run([key], 0, 1)]
        assert len(known) == len(counts), "the page has what no table has"
        assert self.page.left_out == 0
        if self._reader.complete:
            assert counts == sorted(wanted.values()), "a block is missing in the page"
