"""A trace of requests for a whole fleet: copies of one trace, and runs of blocks instead of blocks.

Blocks that are always asked for together (a block and its only child, if no request ends between them) make
one *segment*. A cache by recency that evicts the end of a prompt first treats the blocks of a segment as a
stack, so it is enough to count how many of a segment's first blocks there are, and nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kvtierd.simulate.traces import NO_PARENT, Trace

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Segments:
    """A trace by segments."""

    trace: Trace
    of_block: I64
    """By block: its segment."""
    blocks: I64
    """By segment: how many blocks it has."""
    asked: I64
    """By segment: how many requests ask for it."""
    paths: list[list[int]]
    """By request: its segments, from the first to the last."""


def segments(trace: Trace) -> Segments:
    """Finds the segments of a trace."""
    asked = np.bincount(trace.leaf, minlength=trace.blocks)
    parents = trace.parent.tolist()
    counts = asked.tolist()
    for block in range(trace.blocks - 1, -1, -1):  # children come after their parents
        if parents[block] != NO_PARENT:
            counts[parents[block]] += counts[block]
    of_block = [0] * trace.blocks
    above: list[int] = []
    sizes: list[int] = []
    for block, parent in enumerate(parents):
        if parent != NO_PARENT and counts[parent] == counts[block]:
            of_block[block] = of_block[parent]
            sizes[of_block[block]] += 1
        else:
            of_block[block] = len(sizes)
            above.append(NO_PARENT if parent == NO_PARENT else of_block[parent])
            sizes.append(1)
    first_asked = np.zeros(len(sizes), np.int64)
    for block, segment in enumerate(of_block):
        first_asked[segment] = counts[block]
    paths = []
    for leaf in trace.leaf.tolist():
        path, segment = [], of_block[leaf]
        while segment != NO_PARENT:
            path.append(segment)
            segment = above[segment]
        paths.append(path[::-1])
    return Segments(trace, np.array(of_block), np.array(sizes), first_asked, paths)


@dataclass(frozen=True, slots=True)
class Requests:
    """What a fleet is asked for, in the order of time. Arrays are parallel."""

    parts: Segments
    copies: int
    seconds: float
    arrival_s: F64
    copy: I64
    """By request: of which copy it is."""
    request: I64
    """By request: which one of the trace it is."""
    common: npt.NDArray[np.bool_]
    """By segment: whether all copies have it in common."""
    common_fraction: float
    """The part of all blocks that are asked for that are common to all copies."""
    first: I64
    """By request of the trace: the segment that decides who serves it, if hosts are chosen by prefixes."""


def fleet_requests(
    parts: Segments,
    copies: int,
    *,
    common_fraction: float,
    kept: float = 1.0,
    seed: int = 0,
    seconds: float | None = None,
    router_blocks: int = 4,
) -> Requests:
    """Copies of a trace, each with a part of its sessions and begun at another time.

    Of the trace's blocks, those that most requests ask for are common to all copies, until they are
    `common_fraction` of all that is asked for: system prompts, tools, documents that everybody uses. The
    others are each copy's own. A session is what requests have in common behind that; each copy has each
    session with probability `kept`. A copy's times are shifted by a random time, and what then lies behind
    the end of the trace comes at its beginning. With `seconds`, only the requests of so long are used.
    `router_blocks`: by so many of a request's first blocks behind what is common a router may choose."""
    random = np.random.default_rng(seed)
    trace = parts.trace
    common = _common(parts, common_fraction)
    accesses = parts.blocks * parts.asked
    session = np.array(
        [next((s for s in path if not common[s]), -1 - n) for n, path in enumerate(parts.paths)]
    )
    length_s = float(trace.arrival_s[-1]) + 1e-3
    times, owners, numbers = [], [], []
    for copy in range(copies):
        # Who has a session has all of it: chosen by a hash of copy and session.
        chosen = (
            np.flatnonzero(_uniform(session, copy, seed) < kept) if kept < 1 else np.arange(trace.requests)
        )
        shift_s = random.uniform(0, length_s) if copies > 1 else 0.0
        at_s = (trace.arrival_s[chosen] + shift_s) % length_s
        if seconds is not None:
            chosen, at_s = chosen[at_s < seconds], at_s[at_s < seconds]
        times.append(at_s)
        numbers.append(chosen)
        owners.append(np.full(len(chosen), copy))
    arrival_s = np.concatenate(times)
    order = np.argsort(arrival_s, kind="stable")
    return Requests(
        parts,
        copies,
        min(length_s, seconds or length_s),
        arrival_s[order],
        np.concatenate(owners)[order],
        np.concatenate(numbers)[order],
        common,
        float(accesses[common].sum() / accesses.sum()),
        np.array([_deciding(parts, common, path, router_blocks) for path in parts.paths]),
    )


def _common(parts: Segments, fraction: float) -> npt.NDArray[np.bool_]:
    """Segments that most requests ask for. Whatever comes before one of them is asked for at least as often,
    so what is common is the beginning of prompts."""
    accesses = parts.blocks * parts.asked
    order = np.argsort(-parts.asked, kind="stable")
    before = np.cumsum(accesses[order]) - accesses[order]
    common = np.zeros(len(parts.blocks), np.bool_)
    common[order[before + accesses[order] / 2 < fraction * accesses.sum()]] = True
    # Of segments that are asked for equally often, a later one may have come first.
    least = parts.asked[common].min(initial=np.iinfo(np.int64).max)
    common &= parts.asked > least
    return common


def _deciding(parts: Segments, common: npt.NDArray[np.bool_], path: list[int], blocks: int) -> int:
    """The segment in which the router's last block lies."""
    left = blocks
    for segment in path:
        if not common[segment]:
            left -= int(parts.blocks[segment])
            if left <= 0:
                return segment
    return path[-1]


def _uniform(values: I64, copy: int, seed: int) -> F64:
    """Numbers from 0 to 1 that are the same for the same value, copy and seed."""
    return mixed(values.astype(np.uint64), np.uint64(copy), np.uint64(seed)) / 2.0**64


def mixed(values: npt.NDArray[np.uint64], *more: np.uint64) -> npt.NDArray[np.uint64]:
    """Hashes of these values, with the same others (the finalizer of splitmix64)."""
    with np.errstate(over="ignore"):
        for each in (np.uint64(0), *more):
            values = values + each * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
            values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            values = values ^ (values >> np.uint64(31))
    return values
