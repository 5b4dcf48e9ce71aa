"""A host whose copies take no time: the daemon's own core with one engine, and a worker that ends whatever it
is given at once."""

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from kvtier_kernels import BlockTable

from kvtierd.core.actions import Attached, DiskJobKind, LookupReply, PostDiskJob, PostPart, Reply
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import (
    PAGE_BYTES,
    DiskId,
    Epoch,
    Hashes,
    Rank,
    RegistrationId,
    SessionId,
    Ticket,
    WorkerId,
)
from kvtierd.core.machine import Machine
from kvtierd.core.state.entities import DISK_DEVICE_PREFIX
from kvtierd.core.status import ShadowStatus
from kvtierd.core.stimuli import (
    AttachSession,
    BlockQuery,
    CoreIntegrity,
    CoreLimits,
    DiskJobFinished,
    DiskRecovered,
    GroupGeometry,
    LookupBlocks,
    PartFinished,
    PartOutcome,
    PoolPolicy,
    Recovered,
    RegisterMemory,
    RegisterWords,
    SessionRole,
    Signals,
    Stimulus,
    SubmitStore,
    SubmittedChain,
    Tick,
    WorkerLive,
)

SLOT_BYTES = PAGE_BYTES
"""A block's size changes nothing while all have the same."""
EXTENT_BYTES = 3 * PAGE_BYTES
"""Of one slot, with its header and its record: so any number of blocks is a size."""
HISTORY_PER_BLOCK = 64
"""Blocks that are remembered when they are gone, for each that is there."""
WRITTEN_AT_ONCE = 1 << 16
"""Blocks of a disk that have no room yet, or none any more."""
STEPS_PER_POOL = 16
"""Above a disk, a prompt comes in steps of at most this part of the pool."""
HASH_BYTES = 32
ENGINE_BLOCKS = 1 << 20
PART_WORDS = 16
DISK_WORKER = WorkerId(2)
_NONE = np.empty(0, np.uint32)
_NOTHING_FOUND = Recovered((), (), _NONE, np.empty((0, HASH_BYTES), np.uint8), _NONE, 0, _NONE)


class SimulatedHost:
    """Serves requests one after another, each as an engine without a cache of its own makes it: it asks for
    its prompt, waits for what a disk has of it, and stores what was missing."""

    def __init__(
        self,
        capacity_blocks: int,
        *,
        disk_blocks: int = 0,
        ranks: bool = False,
        history_blocks: int | None = None,
    ) -> None:
        """An empty host that keeps so many blocks, above an empty disk that keeps `disk_blocks`; 0: without a
        disk. With `ranks`, it learns which, and remembers at least `history_blocks` of those that are gone;
        None: as many as it can use."""
        geometry = PoolGeometry(capacity_blocks, EXTENT_BYTES, 2 << 20)
        below = PoolGeometry(disk_blocks, EXTENT_BYTES, 2 << 20)
        if history_blocks is None:
            history_blocks = HISTORY_PER_BLOCK * max(capacity_blocks, disk_blocks // HISTORY_PER_BLOCK)
        self._capacity_blocks = capacity_blocks
        self.now_s = 0.0
        """The time of the trace."""
        self.inserts = 0
        """Blocks that were stored."""
        self.disk_writes = 0
        """Blocks that were written to the disk."""
        self._ranks = ranks
        self._has_disk = disk_blocks > 0
        self._limits = CoreLimits()
        self._machine = Machine(
            BlockTable(
                # The blocks of a store are there before there is room for them.
                capacity_blocks + self._limits.transfer_blocks_max,
                _pages(geometry),
                seed=0,
                ranks=ranks,
                history_blocks=history_blocks,
            ),
            lambda: self.now_s,
            self._limits,
            geometry,
            integrity=CoreIntegrity(sample_bytes_per_s=0, remembered_blocks=1),
            disks=[(BlockTable(disk_blocks + WRITTEN_AT_ONCE, _pages(below), seed=0), below)]
            if disk_blocks
            else (),
            policy=PoolPolicy.REUSE if ranks else PoolPolicy.LRU,
        )
        self._tickets = itertools.count(1)
        self._worker = WorkerId(1)
        self._session = SessionId(1)
        self._do(WorkerLive(self._worker, "cpu"))
        if disk_blocks:
            self._do(WorkerLive(DISK_WORKER, f"{DISK_DEVICE_PREFIX}0"))
            self._do(DiskRecovered(DiskId(0), _NOTHING_FOUND))
        attached = self._do(
            AttachSession(
                session=self._session,
                instance="simulated",
                role=SessionRole.SCHEDULER | SessionRole.RANK,
                rank=Rank(0),
                world_size=1,
                namespace_fields=b"simulated",
                hash_bytes=HASH_BYTES,
                model="simulated",
                groups=(GroupGeometry(1, 1, 0, ((SLOT_BYTES, "block"),)),),
            )
        )
        assert isinstance(attached, Attached)
        self._epoch: Epoch = attached.epoch
        self._do(RegisterWords(self._session, self._worker, 1, PART_WORDS))
        self._do(RegisterMemory(self._session, self._worker, RegistrationId(1), (ENGINE_BLOCKS,), 1))

    @property
    def shadow(self) -> ShadowStatus:
        """What it says that hosts of other sizes would hit."""
        return self._machine.core.shadow.status()

    def request(self, hashes: Hashes) -> int:
        """One prompt, of these blocks. Returns how many of its first blocks were there."""
        found = self.lookup(hashes)
        # With what is there already. Where recency decides, the beginning of a prompt is to be the most
        # recent of it; else nothing is stored whose beginning is not there.
        self.store(hashes)
        return found

    def lookup(self, hashes: Hashes) -> int:
        """Asks for a prompt, of these blocks. Returns how many of its first blocks were there."""
        found = 0
        for first in range(0, len(hashes), self._limits.lookup_hashes_max):
            part = hashes[first : first + self._limits.lookup_hashes_max]
            hits = self._hits(part)
            found += hits
            if hits < len(part):
                break
        if self._has_disk:
            self._do(Tick())
        return found

    def _hits(self, hashes: Hashes) -> int:
        """How many of these blocks of one lookup can be loaded, once the disk has brought what it has."""
        again, hits = False, -1
        while True:
            query = (BlockQuery(0, hashes),)
            reply = self._do(LookupBlocks(self._session, self._epoch, query, lease=False, again=again))
            assert isinstance(reply, LookupReply)
            group = reply.groups[0]
            if len(group.states) == group.hits or group.hits == hits:
                return group.hits
            again, hits = True, group.hits

    def store(self, hashes: Hashes, previous: Hashes | None = None) -> None:
        """Stores blocks that follow each other, and the block `previous` if there is one."""
        most = self.store_blocks_max
        firsts = range(0, len(hashes), most)
        for first in firsts if self._ranks else reversed(firsts):
            before = hashes[first - 1 : first] if first else previous
            self.store_together([(hashes[first : first + most], before)])

    def store_together(self, chains: Sequence[tuple[Hashes, Hashes | None]]) -> None:
        """Stores several such chains at once, each with the block before it; together, they have no more
        blocks than a store may have."""
        number = next(self._tickets)
        signals = Signals(Ticket(number), number % PART_WORDS, gated=False)
        hashes = np.concatenate([blocks for blocks, _ in chains]) if len(chains) > 1 else chains[0][0]
        block_ids = np.arange(len(hashes), dtype=np.uint32)
        told = tuple(SubmittedChain(len(blocks), previous) for blocks, previous in chains)
        self._do(SubmitStore(self._session, self._epoch, signals, 0, hashes, block_ids, chains=told))

    @property
    def store_blocks_max(self) -> int:
        """As many blocks as one store may have. Above a disk, a prompt comes step by step, as an engine
        computes it, because the disk takes no more at once."""
        most = self._limits.transfer_blocks_max
        return max(1, min(most, self._capacity_blocks // STEPS_PER_POOL)) if self._has_disk else most

    def _do(self, stimulus: Stimulus) -> Reply:
        """Handles it, and whatever the worker says to it."""
        reply, actions = self._machine.handle(stimulus)
        waiting = deque(actions)
        while waiting:
            action = waiting.popleft()
            if isinstance(action, PostPart):
                self.inserts += len(action.block_ids)
                ended: Stimulus = PartFinished(self._worker, action.part, PartOutcome.DONE, _NONE)
            elif isinstance(action, PostDiskJob):
                if action.kind is DiskJobKind.WRITE:
                    self.disk_writes += len(action.disk_slots)
                ended = DiskJobFinished(action.worker, action.job, _NONE, _NONE)
            else:
                continue
            waiting.extend(self._machine.handle(ended)[1])
        return reply


def _pages(geometry: PoolGeometry) -> int:
    return (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES


def hashes_of(blocks: npt.NDArray[np.int64]) -> Hashes:
    """Hashes of blocks that are known by their numbers."""
    rows = np.zeros((len(blocks), HASH_BYTES), np.uint8)
    rows[:, :8] = blocks.astype("<u8").view(np.uint8).reshape(-1, 8)
    return rows
