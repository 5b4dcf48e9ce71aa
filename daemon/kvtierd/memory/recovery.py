"""Decides which slots of a pool are kept after a restart. It works on whole columns, a million slots in about
a second."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from kvtier_kernels import PoolRecords

from kvtierd.core.ids import HASH_BYTES_MAX, NamespaceDigest, Slots
from kvtierd.core.stimuli import Recovered, RecoveredExtent

WRITING = 1
NOBODY = 0xFFFF
"""A writer id that no process has. WRITING slots with it were set aside because they failed a check."""
Columns = dict[str, npt.NDArray[Any]]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Recovery:
    """The result of a recovery: a part of the stimulus for the core, and figures for people."""

    recovered: Recovered
    blocks: int
    data_bytes: int
    discarded: int
    """Slots that were freed: incomplete, damaged, superseded, or left by a writer that is gone."""
    quarantined_writers: npt.NDArray[np.uint16]
    """The writer of each quarantined slot."""


NOTHING_FOUND = Recovery(
    Recovered(
        extents=(),
        namespaces=(),
        spaces=np.empty(0, np.uint32),
        hashes=np.empty((0, 32), np.uint8),
        slots=np.empty(0, np.uint32),
        clock=0,
        quarantined=np.empty(0, np.uint32),
        corrupt=np.empty(0, np.uint32),
    ),
    blocks=0,
    data_bytes=0,
    discarded=0,
    quarantined_writers=np.empty(0, np.uint16),
)
"""The result for a new pool."""


def recover(records: PoolRecords, gone: Callable[[int], bool]) -> Recovery:
    """Reads all records, frees the slots that hold nothing to keep, and lists the others: whole blocks,
    oldest first.

    `gone(writer)` says whether a writer is proved to be gone. WRITING slots of any other writer stay
    quarantined, as they are, and so do slots that were set aside. If this is killed at any point, it can
    simply run again.
    """
    found = records.scan()
    writing = np.flatnonzero(found["states"] == WRITING)
    set_aside = writing[found["writers"][writing] == NOBODY]
    writing = writing[found["writers"][writing] != NOBODY]
    writers = found["writers"][writing]
    alive = [writer for writer in np.unique(writers).tolist() if not gone(writer)]
    quarantined = writing[np.isin(writers, alive)]

    ready = np.flatnonzero(found["intact"])
    clock = int(found["clocks"][ready].max()) if len(ready) else 0
    rows, heads, worlds = _whole_blocks(found, ready)
    blocks = _youngest(found, rows, heads, worlds)
    spaces, namespaces, blocks = _spaces(found, rows[heads[blocks]], blocks)
    heads, worlds = heads[blocks], worlds[blocks]
    head_rows = rows[heads]
    kept = rows[_runs(heads, worlds)]  # all shards, block after block

    lost = np.ones(len(found["slots"]), bool)
    lost[quarantined] = False
    lost[set_aside] = False
    lost[kept] = False
    discarded = found["slots"][lost]
    if len(discarded):
        records.free(discarded)

    recovered = Recovered(
        extents=tuple(
            RecoveredExtent(extent, slot_bytes)
            for extent, slot_bytes in zip(
                found["extents"].tolist(), found["extent_slot_bytes"].tolist(), strict=True
            )
        ),
        namespaces=namespaces,
        spaces=spaces,
        hashes=found["hashes"][head_rows],
        slots=found["slots"][kept],
        clock=clock,
        quarantined=found["slots"][quarantined],
        corrupt=found["slots"][set_aside],
    )
    return Recovery(
        recovered,
        blocks=len(head_rows),
        data_bytes=int(found["data_bytes"][kept].sum(dtype=np.uint64)),
        discarded=len(discarded),
        quarantined_writers=found["writers"][quarantined],
    )


def writers_named(records: PoolRecords) -> set[int]:
    """The writers that WRITING slots name."""
    found = records.scan()
    return set(found["writers"][found["states"] == WRITING].tolist())


def free_proven(
    records: PoolRecords, slots: Slots, writers: npt.NDArray[np.uint16], gone: Callable[[int], bool]
) -> npt.NDArray[np.bool_]:
    """Frees the quarantined slots whose writer is now proved to be gone. Returns which of them these were."""
    proven = np.isin(writers, [writer for writer in np.unique(writers).tolist() if gone(writer)])
    if proven.any():
        records.free(np.ascontiguousarray(slots[proven]))
    return proven


def set_aside(records: PoolRecords, slots: Slots, boot_nonce: int) -> None:
    """Takes slots out of use for as long as the file exists: they become WRITING by nobody, which recovery
    leaves alone."""
    records.free(slots)
    zeros = np.zeros((len(slots), HASH_BYTES_MAX), np.uint8)
    records.open(slots, NOBODY, boot_nonce, 0, bytes(16), 0, 0, 1, zeros, 1)


def _whole_blocks(found: Columns, ready: Rows) -> tuple[Rows, Rows, Rows]:
    """Groups rows into blocks that have every shard exactly once under one store id.

    Returns (rows, heads, worlds): block i is rows[heads[i]:heads[i] + worlds[i]], in rank order.
    """
    single = found["worlds"][ready] == 1
    alone, sharded = ready[single], ready[~single]
    rows, heads, worlds = _sharded_blocks(found, sharded) if len(sharded) else (sharded,) * 3
    return (
        np.concatenate((alone, rows)),
        np.concatenate((np.arange(len(alone)), heads + len(alone))),
        np.concatenate((np.ones(len(alone), np.int64), worlds)),
    )


def _sharded_blocks(found: Columns, sharded: Rows) -> tuple[Rows, Rows, Rows]:
    rows = sharded[np.lexsort((found["shards"][sharded], found["copy_keys"][sharded]))]
    keys = found["copy_keys"][rows]
    heads = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    sizes = np.diff(heads, append=len(rows))
    position = np.arange(len(rows)) - np.repeat(heads, sizes)
    fits = found["shards"][rows] == position
    # Keys are checksums. They only suggest that fields are equal, so the fields themselves are compared.
    others = np.flatnonzero(position)
    fits[others] &= _same(
        found,
        rows[others],
        rows[others - position[others]],
        ("groups", "worlds", "nonces", "transfers"),
        ("namespaces", "hashes"),
    )
    whole = (sizes == found["worlds"][rows[heads]]) & np.logical_and.reduceat(fits, heads)
    return rows, heads[whole], sizes[whole]


def _same(
    found: Columns, left: Rows, right: Rows, scalars: tuple[str, ...], digests: tuple[str, ...]
) -> npt.NDArray[np.bool_]:
    equal = np.ones(len(left), bool)
    for name in scalars:
        equal &= found[name][left] == found[name][right]
    for name in digests:
        words = found[name].view(np.uint64)
        equal &= (words[left] == words[right]).all(axis=1)
    return equal


def _youngest(found: Columns, rows: Rows, heads: Rows, worlds: Rows) -> Rows:
    """Indexes of the blocks to keep, oldest first. If a key has several copies, the one that was stored last
    is kept."""
    if not len(heads):
        return heads
    clocks = found["clocks"][rows[heads]]
    if (worlds > 1).any():
        ends = heads + worlds
        # reduceat works on [head, end) pairs, so its odd results belong to the gaps between blocks.
        padded = np.append(found["clocks"][rows], np.uint64(0))
        clocks = np.maximum.reduceat(padded, np.column_stack((heads, ends)).ravel())[::2]
    keep = np.ones(len(heads), bool)
    keys = found["block_keys"][rows[heads]]
    ordered = np.sort(keys)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        copies = np.flatnonzero(np.isin(keys, repeated))
        copies = copies[np.lexsort((found["transfers"][rows[heads[copies]]], clocks[copies], keys[copies]))]
        keep[copies[:-1][keys[copies[:-1]] == keys[copies[1:]]]] = False
    blocks = np.flatnonzero(keep)
    return blocks[np.argsort(clocks[blocks], kind="stable")]


def _runs(starts: Rows, lengths: Rows) -> Rows:
    """The numbers start, start + 1, … of each run, one run after another."""
    before = np.cumsum(lengths) - lengths
    numbers: Rows = np.arange(int(lengths.sum()), dtype=np.int64) + np.repeat(starts - before, lengths)
    return numbers


def _spaces(
    found: Columns, head_rows: Rows, blocks: Rows
) -> tuple[npt.NDArray[np.uint32], tuple[tuple[NamespaceDigest, int, int], ...], Rows]:
    """Numbers each block's (namespace, group, world size). Returns the numbers, what they stand for, and the
    blocks that have one."""
    keys = found["space_keys"][head_rows]
    kinds = np.unique(keys)  # a few; asking it where each is would sort a million
    spaces = np.searchsorted(kinds, keys)
    first = np.empty(len(kinds), np.int64)
    first[spaces[::-1]] = np.arange(len(keys) - 1, -1, -1)  # of several, the last one stays
    meaning = head_rows[first]
    # One pair of spaces in 2^64 shares a checksum. Then the blocks of one are given up, and not mixed up.
    same = _same(found, head_rows, meaning[spaces], ("groups", "worlds"), ("namespaces",))
    namespaces = tuple(
        (
            NamespaceDigest(found["namespaces"][row].tobytes()),
            int(found["groups"][row]),
            int(found["worlds"][row]),
        )
        for row in meaning.tolist()
    )
    return spaces[same].astype(np.uint32), namespaces, blocks[same]
