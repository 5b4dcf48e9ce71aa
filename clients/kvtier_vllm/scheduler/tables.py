"""What vLLM's block tables say: where a load goes, and which blocks were given to a request in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_vllm.groups import Groups, GroupShape


@dataclass(frozen=True, slots=True)
class Target:
    """Where blocks of one group are to be loaded."""

    group: int
    block_tokens: int
    hash_stride: int
    first: int
    """The first of the request's blocks that is loaded."""
    block_ids: tuple[int, ...]

    def hashes_of(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Returns those of the request's hashes that belong to the blocks."""
        stride, end = self.hash_stride, self.first + len(self.block_ids)
        return hashes[(self.first + 1) * stride - 1 : end * stride : stride]


def targets_of(
    groups: Groups, tables: Sequence[Sequence[int]], begin_tokens: int, end_tokens: int
) -> tuple[Target, ...]:
    """Returns where a prefix from token `begin_tokens` to `end_tokens` goes, in each group that has blocks
    for it.

    vLLM gives a group no blocks for what its window has passed, and writes 0 there. Raises RuntimeError if
    the tables are not as they must be; then nothing may be loaded.
    """
    found = []
    for shape, table in zip(groups.shapes, tables, strict=True):
        first, rest = divmod(begin_tokens, shape.block_tokens)
        end, more = divmod(end_tokens, shape.block_tokens)
        blocks = tuple(table[first:end])
        if shape.window_blocks:
            passed = next((index for index, block in enumerate(blocks) if block), len(blocks))
            first, blocks = first + passed, blocks[passed:]
        if (
            rest
            or more
            or len(table) < end
            or 0 in blocks
            or (shape.window_blocks and len(blocks) > shape.window_blocks)
        ):
            raise RuntimeError(
                f"tokens {begin_tokens} to {end_tokens} are to be loaded, and group {shape.group} has the "
                f"blocks {table[first:end]} of {len(table)} for them"
            )
        if blocks:
            found.append(Target(shape.group, shape.block_tokens, shape.hash_stride, first, blocks))
    return tuple(found)


def newly_allocated(groups: Groups, output: Any) -> Iterator[int]:
    """Yields the blocks that a SchedulerOutput gives to requests to write to: whatever they held before is
    lost in this step. Blocks that a request shares with others, because they hit, are not among them."""
    for new in output.scheduled_new_reqs:
        yield from beyond(groups, new.block_ids, new.num_computed_tokens)
    cached = output.scheduled_cached_reqs
    for name, tables, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if tables is None:
            continue
        if name in cached.resumed_req_ids:
            yield from beyond(groups, tables, computed)
        else:
            for table in tables:
                yield from table


def beyond(groups: Groups, tables: Sequence[Sequence[int]], computed_tokens: int) -> Iterator[int]:
    """Yields the blocks of a request's tables that lie behind its first `computed_tokens`."""
    for shape, table in zip(groups.shapes, tables, strict=True):
        yield from table[computed_tokens // shape.block_tokens :]


def hashes_of(shape: GroupShape, hashes: Sequence[bytes]) -> Sequence[bytes]:
    """Returns the hashes of a group's blocks, in order. The request's hashes may be of smaller blocks."""
    stride = shape.hash_stride
    return hashes if stride == 1 else hashes[stride - 1 :: stride]
