"""The core alone, on one core: blocks stored and committed, and looked up, per second, at a full pool.

    python -m tests.benchmarks.metadata [--json]

Every batch goes through `Machine.handle` with the native block table: a store evicts as many blocks as it
writes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
from kvtier_kernels import BlockTable
from kvtierd.core.actions import Attached, LookupReply, PostPart, SubmitReply
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import PAGE_BYTES, Rank, RegistrationId, SessionId, Ticket, WorkerId
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import (
    AttachSession,
    BlockQuery,
    CoreLimits,
    GroupGeometry,
    LookupBlocks,
    PartFinished,
    PartOutcome,
    RegisterMemory,
    RegisterWords,
    SessionRole,
    Signals,
    SubmitStore,
    WorkerLive,
)

SLOT_BYTES = 64 << 10
EXTENT_BYTES = 64 << 20
EXTENTS = 256
CAPACITY = 1 << 18
ROUNDS = 7
BLOCKS_PER_ROUND = 1 << 16
NONE = np.empty(0, np.uint32)


class Engine:
    """One instance of one process, world size 1, at a pool of its own."""

    def __init__(self) -> None:
        geometry = PoolGeometry(EXTENTS, EXTENT_BYTES, 2 << 20)
        pages = (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES
        self.machine = Machine(BlockTable(CAPACITY, pages), time.monotonic, CoreLimits(), geometry)
        self.session = SessionId(1)
        self.ticket = 0
        self.blocks = np.arange(1 << 16, dtype=np.uint32)
        worker = WorkerId(1)
        self.machine.handle(WorkerLive(worker, "cpu"))
        groups = (GroupGeometry(1, 16, 0, ((SLOT_BYTES, "kv"),)),)
        both = SessionRole.SCHEDULER | SessionRole.RANK
        attached, _ = self.machine.handle(
            AttachSession(self.session, "bench", both, Rank(0), 1, b"bench", 32, "bench", groups)
        )
        assert isinstance(attached, Attached)
        self.epoch = attached.epoch
        self.machine.handle(RegisterWords(self.session, worker, 4, 64))
        self.machine.handle(RegisterMemory(self.session, worker, RegistrationId(1), (1 << 16,), 1 << 32))

    def store(self, hashes: np.ndarray) -> None:
        """One batch, submitted and committed."""
        self.ticket += 1
        signals = Signals(Ticket(self.ticket), 0, False)
        reply, actions = self.machine.handle(
            SubmitStore(self.session, self.epoch, signals, 0, hashes, self.blocks[: len(hashes)])
        )
        assert isinstance(reply, SubmitReply)
        part = actions[-1]
        assert isinstance(part, PostPart)
        self.machine.handle(PartFinished(part.worker, part.part, PartOutcome.DONE, NONE))

    def lookup(self, hashes: np.ndarray) -> int:
        """Hits of one batch."""
        queries = (BlockQuery(0, hashes),)
        reply, _ = self.machine.handle(LookupBlocks(self.session, self.epoch, queries, False))
        assert isinstance(reply, LookupReply)
        return reply.groups[0].hits


def rate(work: Callable[[np.ndarray], object], keys: np.ndarray, batch: int) -> float:
    """Blocks a second of one pass over the keys."""
    batches = [keys[i : i + batch] for i in range(0, len(keys), batch)]
    start = time.perf_counter()
    for each in batches:
        work(each)
    return len(keys) / (time.perf_counter() - start)


def figures() -> dict[str, float]:
    """Medians over the rounds; the order of measurements alternates so that none profits from a quiet
    machine."""
    engine = Engine()
    random = np.random.default_rng(1)
    rates: dict[str, list[float]] = {}
    slots = EXTENTS * engine.machine.core.blocks.geometry.slots_per_extent(SLOT_BYTES)
    for _ in range(-(-slots // BLOCKS_PER_ROUND)):
        rate(engine.store, random.integers(0, 256, (BLOCKS_PER_ROUND, 32), np.uint8), 1024)
    for _ in range(ROUNDS):
        for batch in (64, 1024):
            keys = random.integers(0, 256, (BLOCKS_PER_ROUND, 32), np.uint8)
            suffix = "" if batch == 64 else f"_{batch}"
            stored = rate(engine.store, keys, batch)
            rates.setdefault(f"metadata_store_commit{suffix}_blocks_per_s", []).append(stored)
            looked_up = rate(engine.lookup, keys, batch)
            rates.setdefault(f"metadata_lookup{suffix}_blocks_per_s", []).append(looked_up)
            assert engine.lookup(keys[-batch:]) == batch
    assert engine.machine.status().counters.evicted_blocks > ROUNDS * BLOCKS_PER_ROUND
    return {name: float(np.median(values)) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    arguments = parser.parse_args()
    found = figures()
    if not arguments.json:
        for name, value in found.items():
            print(f"{name:<44} {value:>14,.0f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
