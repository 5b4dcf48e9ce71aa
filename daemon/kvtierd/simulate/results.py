"""What a trace would have hit with a cache of a size under a policy."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtierd.core.ids import Hashes
from kvtierd.simulate import classic, optimum
from kvtierd.simulate.host import SimulatedHost, hashes_of
from kvtierd.simulate.traces import I64, NO_PARENT, Trace

LRU, REUSE, OPTIMUM = "lru", "reuse", "optimum"
CLASSIC: dict[str, Callable[[int], classic.Policy]] = {
    "fifo": classic.Fifo,
    "round-robin": classic.RoundRobin,
    "arc": classic.Arc,
    "s3fifo": classic.S3Fifo,
}
POLICIES = {
    LRU: "what has not been used for longest goes first, ends of prompts before their beginnings",
    REUSE: "what is least likely to come back soon goes first, by what is learnt of blocks like it",
    "fifo": "what was stored first goes first, ends of prompts before their beginnings",
    "round-robin": "the same, but beginnings before ends",
    "arc": "ARC, of blocks by themselves",
    "s3fifo": "S3-FIFO, of blocks by themselves",
    OPTIMUM: "the most that any policy could hit, which knows the future",
}
WITH_DISK = (LRU, REUSE, OPTIMUM)
"""The others know one tier only."""
TELL_EVERY = 64
"""Requests between two calls of `progress`."""


@dataclass(frozen=True, slots=True)
class HitRates:
    """One policy with one size."""

    capacity_blocks: int
    prefix_token_hit_rate: float
    """Of all tokens of all prompts, those in blocks that were there, from the beginning of the prompt on."""
    block_hit_rate: float
    """The same for blocks."""
    hit_tokens: int
    inserts: int
    """Blocks that were stored in memory."""
    disk_blocks: int | None = None
    """How many the disk keeps; None without one. Hits are those of memory and disk together."""
    disk_writes: int | None = None
    """Blocks that were written to the disk."""


Progress = Callable[[int], None]
"""Is told how many more requests are done."""


def hit_rates(
    trace: Trace,
    paths: Sequence[I64],
    policy: str,
    capacity_blocks: int,
    progress: Progress,
    *,
    disk_blocks: int | None = None,
) -> HitRates:
    """Replays a trace, whose paths these are, on an empty cache that keeps at least one block, above an empty
    disk that keeps `disk_blocks`, if not None: then the policy is one of WITH_DISK."""
    assert disk_blocks is None or policy in WITH_DISK
    writes = None
    if policy == OPTIMUM:
        # With a disk: the most that so many different blocks could hit, in whatever tier.
        found, inserts = optimum.hits(
            paths, trace.blocks, capacity_blocks + (disk_blocks or 0), trace.generated()
        )
        progress(trace.requests)
    elif policy in CLASSIC:
        classical = CLASSIC[policy](capacity_blocks)
        found, inserts = classic.hits(paths, classical, trace.generated()), classical.inserts
        progress(trace.requests)
    else:
        host = SimulatedHost(capacity_blocks, disk_blocks=disk_blocks or 0, ranks=policy == REUSE)
        found = list(replayed(host, trace, paths, progress))
        inserts = host.inserts
        writes = None if disk_blocks is None else host.disk_writes
    hit_tokens = sum(
        trace.hit_tokens(number, blocks, len(path))
        for number, (blocks, path) in enumerate(zip(found, paths, strict=True))
    )
    return HitRates(
        capacity_blocks,
        hit_tokens / int(trace.tokens.sum()),
        sum(found) / sum(map(len, paths)),
        hit_tokens,
        inserts,
        disk_blocks,
        writes,
    )


def replayed(host: SimulatedHost, trace: Trace, paths: Sequence[I64], progress: Progress) -> Iterator[int]:
    """For each request how many of its first blocks were there."""
    _store_after(host, trace, -1)
    for number, (path, arrival_s) in enumerate(zip(paths, trace.arrival_s.tolist(), strict=True)):
        host.now_s = arrival_s
        hashes = hashes_of(path)
        if trace.live is None:
            yield host.request(hashes)
        else:
            found = host.lookup(hashes)
            there = int(trace.live.hits[number])
            if found < there:  # the engine has loaded these, and would have computed and stored them
                host.store(hashes[:there])
            yield found
            _store_after(host, trace, number)
        if (number + 1) % TELL_EVERY == 0:
            progress(TELL_EVERY)
    progress(trace.requests % TELL_EVERY)


def _store_after(host: SimulatedHost, trace: Trace, request: int) -> None:
    """Stores what engines stored between this request and the next; -1: before the first."""
    live = trace.live
    if live is None:
        return
    first, end = np.searchsorted(live.after, (request, request + 1)).tolist()
    for _, chains in itertools.groupby(range(first, end), lambda chain: int(live.store[chain])):
        together: list[tuple[Hashes, Hashes | None]] = []
        for chain in chains:
            blocks, previous = trace.tail(int(live.leaf[chain]), int(live.count[chain]))
            before = hashes_of(np.array([previous])) if live.behind[chain] and previous != NO_PARENT else None
            together.append((hashes_of(blocks), before))
        if sum(len(blocks) for blocks, _ in together) <= host.store_blocks_max:
            host.store_together(together)
        else:
            for hashes, before in together:
                host.store(hashes, before)
