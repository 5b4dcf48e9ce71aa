"""How blocks are asked for: in units, which end at a block's end in every group of the engine."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier import PENDING, Client, Lookup, LookupCall

from kvtier_vllm.groups import Groups


class Question:
    """Asks the daemon about units of a request. Hashes are the request's, of the blocks that vLLM hashes."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._whole = next((shape for shape in groups.shapes if not shape.window_blocks), None)
        """A group of which a prefix needs all blocks, so that it tells how long a prefix can be."""

    def known(
        self, client: Client, hashes: Sequence[bytes], first: int, end: int, *, counted: bool
    ) -> int | None:
        """Returns how many of the units from `first` to `end` are worth a lookup, by the index page, or None
        if it cannot tell. Sends nothing. `counted`: 0 is a lookup that was spared, for the daemon's hit
        rate."""
        whole, size = self._whole, self._groups.unit_hashes
        if whole is None:
            return None
        stride = whole.hash_stride
        own = hashes if stride == 1 else hashes[stride - 1 : end * size : stride]
        blocks = client.known_run(
            own, first * size // stride, end * size // stride, group=whole.group, counted=counted
        )
        return None if blocks is None else blocks * whole.block_tokens // self._groups.unit_tokens

    def head(self, hashes: Sequence[bytes], first: int) -> bytes:
        """Returns the hash of the block without which no unit from `first` on is known. Only for engines for
        which `known` can tell."""
        assert self._whole is not None
        stride = self._whole.hash_stride
        return hashes[first * self._groups.unit_hashes // stride * stride + stride - 1]

    def none_known(self, client: Client, heads: Sequence[bytes]) -> bool:
        """Returns whether the index page can tell, and has none of these heads. Sends nothing."""
        assert self._whole is not None
        return client.knows_any(heads, group=self._whole.group) is False

    def ask(
        self,
        client: Client,
        hashes: Sequence[bytes],
        first: int,
        end: int,
        *,
        host_only: bool,
        again: bool = False,
    ) -> LookupCall:
        """Begins a lookup of the units from `first` to `end`, with leases. `host_only`: not on disks.
        `again`: the request has asked before."""
        size, queries = self._groups.unit_hashes, self._groups.queries
        return client.start_lookup(
            hashes[first * size : end * size], queries, lease=True, host_only=host_only, again=again
        )

    def prefetch(self, client: Client, hashes: Sequence[bytes], end: int) -> None:
        """Has the units up to `end` promoted. The answer does not matter."""
        client.start_prefetch(hashes[: end * self._groups.unit_hashes], self._groups.queries)

    def hits(self, answer: Lookup) -> int:
        """Returns how many units can be loaded, from the first on."""
        return answer.hits * self._groups.shapes[0].block_tokens // self._groups.unit_tokens

    def pending_hash(self, answer: Lookup, hashes: Sequence[bytes], first: int) -> bytes:
        """Returns the hash of the block at which a PENDING answer ends, to a question from unit `first` on.
        If there are several such blocks, it is the first."""
        ends = [
            (found.states.index(PENDING) + 1) * shape.hash_stride
            for found, shape in zip(answer.groups, self._groups.shapes, strict=True)
            if PENDING in found.states
        ]
        return hashes[first * self._groups.unit_hashes + min(ends) - 1]
