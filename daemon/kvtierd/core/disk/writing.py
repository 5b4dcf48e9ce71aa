"""Which blocks of the host are written to disks, and when.

BACK: those that are about to be evicted, as fast as blocks come and go now, and as many as one long prompt
may need room for at once; that is all of a small pool that is full. THROUGH: every block at once. ON_REUSE:
blocks that are found again. Blocks for which a disk's queue had no room are written later, before they are
evicted, if there is time.
"""

import numpy as np

from kvtierd.core.actions import DiskJobKind
from kvtierd.core.blocks.domains import Domain
from kvtierd.core.blocks.table import BlockFlag
from kvtierd.core.disk.disk_jobs import DiskJobs
from kvtierd.core.ids import Entries
from kvtierd.core.state.core_state import CoreState
from kvtierd.core.state.disks import Disk, Indexes, Level
from kvtierd.core.state.entities import DiskJob
from kvtierd.core.state.rates import Pace
from kvtierd.core.stimuli import WriteMode

REUSED = int(BlockFlag.REUSED)
HOST_ONLY = int(BlockFlag.HOST_ONLY)
HORIZON_MAX = 65_536
"""How many victims are looked at, at most, to find those that are not written yet."""
KEPT_READY_FRACTION = 1 / 16
"""The fraction of a full pool's blocks that is kept written, because that many can go at once, however slowly
blocks went before."""
KEPT_READY_MIN = 4_096
"""At least this many blocks are kept written, because one long prompt needs that much room at once. A pool
that has no more is written as it fills."""
PROMISED_FRACTION_MAX = 1 / 8
"""The fraction of the host that blocks may take which are only there to go to disks."""
DISK_FRACTION_MAX = 0.5
"""The fraction of the disks that blocks written ahead may take."""
WRITTEN_PER_STORED = 2
"""At most so many bytes are written to disks for each byte that comes to the host."""
WALKED_ALWAYS = 1_024
WALKED_PER_STORED = 64
"""How many victims are looked at when blocks have been stored: at most `WALKED_ALWAYS`, and so many more for
each stored block. What is beyond that is left to a tick."""
PINNED_AGAIN_S = 2.0
"""After so long, blocks are looked for again that were left, and may have been pinned the last time. Many may
have to be looked at, and on a busy host something is always pinned."""

_NO_PACES = (Pace(0.0, 0), Pace(0.0, 0))


class Writing:
    """The writes to one level."""

    def __init__(self, core: CoreState, level: Level, jobs: DiskJobs) -> None:
        self._core = core
        self._host = core.blocks
        self._level = level
        self._not_to_write = level.marks.clean | level.marks.queued | HOST_ONLY
        """Flags of host blocks that are not written."""
        self._jobs = jobs
        self._paces: dict[Domain, tuple[Pace, Pace]] = {}
        """How fast blocks of each domain come, and how fast they go."""
        self._unwalked: dict[Domain, int] = {}
        """How many blocks of each domain were stored since its victims were last looked at."""
        self._left = True
        """Whether something that should have been written found no room, or was never looked at."""
        self._pinned_s: float | None = None
        """When what was left was looked for and may have been pinned, and so not found."""
        self._hungry = False
        """Whether the queues were full when there was more to write."""
        self._promised_bytes = 0
        """How many bytes are going through the host, at most, only because disks want them."""
        self._credit_bytes = 0
        """How many bytes may be written, beside those that are under way."""
        self._opened_bytes = 0
        """`opened_bytes` of the host when the credit was last counted."""

    # --- at once ---

    def stored(self, domain: Domain, entries: Entries) -> None:
        """Blocks have been stored, of which the head of a sequence comes first."""
        mode = self._level.policy.mode
        if mode is WriteMode.THROUGH or (mode is WriteMode.BACK and self._host.ranks):
            # What goes first of a host that ranks may be what came last.
            dirty = self._dirty(entries)
            if len(dirty) and not self._is_left_for_later(domain):
                self._write_at_once(domain, dirty)
        elif mode is WriteMode.BACK:
            self._follow(domain, len(entries))

    def found(self, domain: Domain, entries: Entries) -> None:
        """Lookups have hit blocks, of which the head of a sequence comes first."""
        if self._level.policy.mode is WriteMode.ON_REUSE:
            self._host.table.set_flags(entries, REUSED)
            if self._is_left_for_later(domain):
                return
            dirty = self._dirty(entries)
            if len(dirty):
                self._write_at_once(domain, dirty[np.sort(np.unique(dirty, return_index=True)[1])])

    def _dirty(self, entries: Entries) -> Entries:
        dirty: Entries = entries[self._host.table.flags(entries) & self._not_to_write == 0]
        return dirty

    def _write_at_once(self, domain: Domain, dirty: Entries) -> None:
        if self._core.draining or not self._write(domain, dirty, head_first=True):
            self._left = True

    def _is_left_for_later(self, domain: Domain) -> bool:
        """Whether nothing of a domain can be written just now, as when a store does not answer. Lookups and
        stores then need not find out for each block: a later tick, or the end of a job, looks for them."""
        disks = self._level.all
        if any(self._is_written_enough(disk) or self._may_write(disk, domain) for disk in disks):
            return False
        self._left = True
        self._hungry |= self._level.any_live
        return True

    def policy_changed(self) -> None:
        """Other blocks are to be written than before, so all are looked at again."""
        self._left = True

    # --- through the host ---

    def wants(self, domain: Domain, entries: Entries) -> int:
        """How many of these new blocks, of which the head of a sequence comes first, disks should have though
        the host has no use for them. They are to go through the host, and count as promised to disks."""
        policy = self._level.policy
        if self._core.draining or self._hungry or policy.mode is WriteMode.ON_REUSE:
            return 0
        live = [disk for disk in self._level.all if disk.live]
        most_bytes = min(
            len(live) * policy.write_queue_bytes, int(self._host.slots.capacity_bytes * PROMISED_FRACTION_MAX)
        )
        may_bytes = max(0, min(most_bytes - self._promised_bytes, self._credit()))
        wanted = min(len(entries), may_bytes // domain.block_bytes)
        host_only = self._host.table.flags(entries[:wanted]) & HOST_ONLY != 0
        if host_only.any():
            wanted = int(np.argmax(host_only))
        hashes = self._host.table.hashes(entries[:wanted])
        for disk, own in self._level.by_disk(hashes):
            worth = 0
            if self._takes(disk, domain) and (may := self._may_write(disk, domain)):
                worth = min(may, self._jobs.worth(disk, domain, entries[own]))
            if worth < len(own):
                wanted = min(wanted, int(own[worth]))
        return wanted

    def promise(self, domain: Domain, blocks: int) -> None:
        """So many blocks are going through the host, as `wants` said."""
        self._promised_bytes += blocks * domain.block_bytes

    # --- ahead of evictions ---

    def tick(self) -> None:
        now_s = self._core.now_s
        domains = [domain for domain in self._host.domains.by_id.values() if domain.blocks]
        paces = {}
        for domain in domains:
            come, go = self._paces.get(domain) or (Pace(now_s, domain.opened), Pace(now_s, domain.evicted))
            come.look(now_s, domain.opened)
            go.look(now_s, domain.evicted)
            paces[domain] = (come, go)
        self._paces = paces
        self._write_ahead()
        if not self._hungry and not any(disk.counts[DiskJobKind.WRITE] for disk in self._level.all):
            self._promised_bytes = 0  # stores of what is left have failed

    def job_ended(self, disk: Disk, job: DiskJob) -> None:
        """A job is over, so there may be room for more. Blocks that failed are left to the next tick, because
        writing them now would fail again, as fast as a worker can."""
        self.give_back(disk, job)
        if (
            self._hungry
            and job.good
            and 2 * disk.bytes[DiskJobKind.WRITE] <= self._level.policy.write_queue_bytes
        ):
            self._write_ahead()

    def give_back(self, disk: Disk, job: DiskJob) -> None:
        """A job is over: blocks of it that were not written cost no credit, and are looked at again."""
        if job.kind is DiskJobKind.WRITE:
            self._left |= job.good < len(job.entries)
            self._promised_bytes = max(0, self._promised_bytes - job.bytes)
            not_written = (len(job.entries) - job.good) * job.domain.block_bytes
            self._credit_bytes += not_written
            disk.budget.spend(-not_written)

    def _follow(self, domain: Domain, stored: int) -> None:
        """Writes ahead without waiting for a tick. Until the next tick, as many blocks may come as a small
        pool has room for, and the blocks that were stored last may be the first to be evicted."""
        self._unwalked[domain] = stored = stored + self._unwalked.get(domain, 0)
        if self._core.draining or not self._level.any_live:
            return
        if self._horizon(domain) <= WALKED_ALWAYS + WALKED_PER_STORED * stored:
            self._ahead_of(domain)

    def _write_ahead(self) -> None:
        self._hungry = False
        if self._core.draining or not self._level.any_live:
            return
        if self._pinned_s is not None and self._core.now_s - self._pinned_s >= PINNED_AGAIN_S:
            self._left = True
        left = pinned = False
        for domain in list(self._host.domains.by_id.values()):
            if domain.blocks:
                left |= self._ahead_of(domain)
                pinned |= self._host.table.evictable(domain.domain) < domain.blocks
        if self._left:
            self._pinned_s = self._core.now_s if pinned else None
        self._left = left

    def _ahead_of(self, domain: Domain) -> bool:
        """Writes the coldest blocks of a domain. Returns whether some that should be written by now are
        left."""
        horizon = self._horizon(domain)
        self._unwalked.pop(domain, None)
        if horizon <= 0 or not any(self._takes(disk, domain) for disk in self._level.all):
            return False
        most = sum(self._jobs.may_write(disk) for disk in self._level.all) // domain.block_bytes
        all_live = all(disk.live for disk in self._level.all)
        alone = len(self._level.all) == 1 and self._level.policy.mode is not WriteMode.ON_REUSE
        wanted = most + 1 if alone else min(horizon, 4 * most + 1_024) if all_live else horizon
        coldest = self._host.table.coldest(domain.domain, wanted, self._not_to_write, horizon)
        if self._level.policy.mode is WriteMode.ON_REUSE:
            coldest = coldest[self._host.table.flags(coldest) & REUSED != 0]
        return len(coldest) > 0 and not self._write(domain, coldest, head_first=False)

    def _horizon(self, domain: Domain) -> int:
        """How many victims of a domain, from the next one on, should be written by now."""
        slots, ahead_s = self._host.slots, self._level.policy.clean_ahead_s
        come_per_s, go_per_s = (pace.per_s for pace in self._paces.get(domain, _NO_PACES))
        kept_ready = max(domain.blocks * KEPT_READY_FRACTION, min(domain.blocks, KEPT_READY_MIN))
        free = min(
            (slots.free(size) + slots.extents_free * slots.geometry.slots_per_extent(size)) // per_block
            for size, per_block in domain.per_size
        )
        horizon = max(max(come_per_s * ahead_s, kept_ready) - free, go_per_s * ahead_s)
        if self._left and self._level.policy.mode is WriteMode.THROUGH:
            horizon = HORIZON_MAX
        disk_bytes = sum(disk.blocks.geometry.capacity_bytes for disk in self._level.all if disk.live)
        most = max(1, int(disk_bytes * DISK_FRACTION_MAX) // domain.block_bytes)
        return min(int(np.ceil(horizon)), HORIZON_MAX, domain.blocks, most)

    # --- both ---

    def _takes(self, disk: Disk, domain: Domain) -> bool:
        """Whether blocks of a domain can be stored on a disk, and may be."""
        return disk.fits(domain) and self._level.policy.may_write(domain.tenant)

    def _write(self, domain: Domain, entries: Entries, *, head_first: bool) -> bool:
        """Has READY blocks that no disk has written, each once and from the first on, as far as the queues
        have room. `head_first`: their sequence begins with the first one; else with the last one. Returns
        False if some are left."""
        everything = True
        hashes = self._host.table.hashes(entries)
        for disk, own in self._level.by_disk(hashes):
            if not self._takes(disk, domain):
                continue
            own = self._worth(disk, domain, entries, own, head_first=head_first)
            may = self._may_write(disk, domain)
            if not may and disk.live and self._is_written_enough(disk):
                self._host.table.set_flags(entries[own], self._level.marks.spared)
            if may < len(own):
                everything = False
                self._hungry |= disk.live
            per_job = self._jobs.blocks_per_job(disk, domain)
            end = min(may, len(own), self._credit() // domain.block_bytes)
            for first in range(0, end, per_job):
                some = entries[own[first : min(first + per_job, end)]]
                written = self._jobs.write(
                    disk, domain, some if head_first else np.ascontiguousarray(some[::-1])
                )
                self._credit_bytes -= written * domain.block_bytes
                disk.budget.spend(written * domain.block_bytes)
        return everything

    def _may_write(self, disk: Disk, domain: Domain) -> int:
        """How many more blocks of a domain may be on their way to a disk. A block that is larger than the
        queue, or than what is left to be written, goes by itself; a store on trial gets one job."""
        if self._is_written_enough(disk):
            return 0
        if disk.refuses:
            rests = self._core.now_s - disk.refused_s < self._level.policy.probe_after_s
            return 0 if rests or not disk.live or disk.counts[DiskJobKind.WRITE] else 1
        left = disk.budget.bytes_left(self._level.policy, self._core.now_s)
        most = self._jobs.may_write(disk)
        may = (most if left is None else min(most, left)) // domain.block_bytes
        alone = disk.live and not disk.counts[DiskJobKind.WRITE]
        if disk.on_trial:
            may = min(may, self._jobs.blocks_per_job(disk, domain)) if alone else 0
        return max(may, 1) if alone else may

    def _is_written_enough(self, disk: Disk) -> bool:
        """Whether nothing more may be written to a disk for now, because it is to be spared."""
        return disk.budget.bytes_left(self._level.policy, self._core.now_s) == 0

    def _worth(
        self, disk: Disk, domain: Domain, entries: Entries, own: Indexes, *, head_first: bool
    ) -> Indexes:
        """Those of a disk's `own` blocks that it should have, rather than what would have to go for them."""
        if not (disk.live and disk.blocks.ranks):
            return own
        # What goes last is worth most, and comes before what follows it.
        best_first = own if head_first else own[::-1]
        worth = self._jobs.worth(disk, domain, entries[best_first])
        self._host.table.set_flags(entries[best_first[worth:]], self._level.marks.spared)
        return own[:worth] if head_first else own[len(own) - worth :]

    def _credit(self) -> int:
        """How many bytes may be written now. A disk that is too small for what the host holds would be
        written over and over, with each block replacing another. So no more is written than a multiple of
        what comes to the host."""
        new_bytes = self._host.opened_bytes - self._opened_bytes
        self._opened_bytes += new_bytes
        most = self._host.slots.capacity_bytes
        self._credit_bytes = min(self._credit_bytes + WRITTEN_PER_STORED * new_bytes, most)
        return max(0, self._credit_bytes)
