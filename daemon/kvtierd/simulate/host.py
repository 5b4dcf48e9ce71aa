"""A host whose copies take no time: the daemon's own core with one engine, and a worker that ends whatever it
is given at once."""

import itertools

import numpy as np
import numpy.typing as npt
from kvtier_kernels import BlockTable

from kvtierd.core.actions import Attached, LookupReply, PostPart, Reply
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.ids import (
    PAGE_BYTES,
    Epoch,
    Hashes,
    PartId,
    Rank,
    RegistrationId,
    SessionId,
    Ticket,
    WorkerId,
)
from kvtierd.core.machine import Machine
from kvtierd.core.status import ShadowStatus
from kvtierd.core.stimuli import (
    AttachSession,
    BlockQuery,
    CoreIntegrity,
    CoreLimits,
    GroupGeometry,
    LookupBlocks,
    PartFinished,
    PartOutcome,
    RegisterMemory,
    RegisterWords,
    SessionRole,
    Signals,
    Stimulus,
    SubmitStore,
    SubmittedChain,
    WorkerLive,
)

SLOT_BYTES = PAGE_BYTES
"""A block's size changes nothing while all have the same."""
EXTENT_BYTES = 3 * PAGE_BYTES
"""Of one slot, with its header and its record: so any number of blocks is a size."""
HISTORY_PER_BLOCK = 64
"""Blocks that are remembered when they are gone, for each that is there."""
HASH_BYTES = 32
ENGINE_BLOCKS = 1 << 20
PART_WORDS = 16
_NOTHING_FAILED = np.empty(0, np.uint32)


class SimulatedHost:
    """Serves requests one after another, each as an engine without a cache of its own makes it: it asks for
    its prompt, and stores what was missing."""

    def __init__(
        self, capacity_blocks: int, *, ranks: bool = False, history_blocks: int | None = None
    ) -> None:
        """An empty host that keeps so many blocks. With `ranks`, it learns which, and remembers at least
        `history_blocks` of those that are gone; None: as many as it can use."""
        geometry = PoolGeometry(capacity_blocks, EXTENT_BYTES, 2 << 20)
        pages = (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES
        self.now_s = 0.0
        """The time of the trace."""
        self.inserts = 0
        """Blocks that were stored."""
        self._ranks = ranks
        self._limits = CoreLimits()
        self._machine = Machine(
            BlockTable(
                # The blocks of a store are there before there is room for them.
                capacity_blocks + self._limits.transfer_blocks_max,
                pages,
                seed=0,
                ranks=ranks,
                history_blocks=HISTORY_PER_BLOCK * capacity_blocks
                if history_blocks is None
                else history_blocks,
            ),
            lambda: self.now_s,
            self._limits,
            geometry,
            integrity=CoreIntegrity(sample_bytes_per_s=0, remembered_blocks=1),
        )
        self._tickets = itertools.count(1)
        self._worker = WorkerId(1)
        self._session = SessionId(1)
        self._do(WorkerLive(self._worker, "cpu"))
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
        found = 0
        for first in range(0, len(hashes), self._limits.lookup_hashes_max):
            part = hashes[first : first + self._limits.lookup_hashes_max]
            reply = self._do(LookupBlocks(self._session, self._epoch, (BlockQuery(0, part),), lease=False))
            assert isinstance(reply, LookupReply)
            found += reply.groups[0].hits
            if reply.groups[0].hits < len(part):
                break
        most = self._limits.transfer_blocks_max
        firsts = range(0, len(hashes), most)
        # With what is there already. Where recency decides, the beginning of a prompt is to be the most
        # recent of it; else nothing is stored whose beginning is not there.
        for first in firsts if self._ranks else reversed(firsts):
            self._store(hashes[first : first + most], hashes[first - 1 : first] if first else None)
        return found

    def _store(self, hashes: Hashes, previous: Hashes | None) -> None:
        number = next(self._tickets)
        signals = Signals(Ticket(number), number % PART_WORDS, gated=False)
        block_ids = np.arange(len(hashes), dtype=np.uint32)
        chains = (SubmittedChain(len(hashes), previous),)
        self._do(SubmitStore(self._session, self._epoch, signals, 0, hashes, block_ids, chains=chains))

    def _do(self, stimulus: Stimulus) -> Reply:
        """Handles it, and whatever the worker says to it."""
        reply, actions = self._machine.handle(stimulus)
        for part in [action for action in actions if isinstance(action, PostPart)]:
            self.inserts += len(part.block_ids)
            self._ended(part.part)
        return reply

    def _ended(self, part: PartId) -> None:
        self._machine.handle(PartFinished(self._worker, part, PartOutcome.DONE, _NOTHING_FAILED))


def hashes_of(blocks: npt.NDArray[np.int64]) -> Hashes:
    """Hashes of blocks that are known by their numbers."""
    rows = np.zeros((len(blocks), HASH_BYTES), np.uint8)
    rows[:, :8] = blocks.astype("<u8").view(np.uint8).reshape(-1, 8)
    return rows
