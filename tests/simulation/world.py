"""The world: one daemon after another over one pool, engines that come and go, and everything that can go
wrong.

After every stimulus the core is validated, its table is compared with the pool's records, and answers are
compared with what the records say. No load may ever put bytes of another key in place, no store that is told
DONE may be lost.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from kvtier_kernels import BlockTable as NativeTable
from kvtierd.core.actions import (
    Action,
    AssignExtent,
    CheckSlots,
    CommitSlots,
    Direction,
    FreeSlots,
    InstanceView,
    Notify,
    OpenSlots,
    PostDiskJob,
    PostPart,
    QuarantineSlots,
    ReleaseSession,
    Reply,
    RevokePart,
    SessionEnded,
    TransferEnd,
    TransferEnded,
    UnwatchSpace,
    WatchSpace,
    WithdrawPage,
)
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.blocks.table import BlockFlag, BlockState
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import NO_ENTRY, PAGE_BYTES, DiskId, SessionId, SpaceId, WorkerId
from kvtierd.core.machine import Machine
from kvtierd.core.state.disks import Disk
from kvtierd.core.state.transitions import Event, State
from kvtierd.core.stimuli import (
    CoreDisks,
    CoreIntegrity,
    CoreLimits,
    DiskJobFinished,
    EndSession,
    PartFinished,
    PoolPolicy,
    PublishPage,
    SlotsChecked,
    Stimulus,
    Verify,
    WorkerExited,
    WorkerLive,
    WriteMode,
)

from tests.oracles.block_table import BlockTable as OracleTable
from tests.oracles.free_slots import free_slots
from tests.oracles.invariants import validate
from tests.simulation.disk import FakeDiskWorker, FakeSlab
from tests.simulation.engine import (
    Engine,
    Pending,
    as_hashes,
)
from tests.simulation.page import FakePage
from tests.simulation.pool import READY, WRITING, FakePool, Key, generation_of
from tests.simulation.store import FakeStore, FakeStoreWorker
from tests.simulation.worker import FakeWorker, Told

GEOMETRY = PoolGeometry(extents=6, extent_bytes=1 << 15, first_extent_offset=2 << 20)
LIMITS = CoreLimits(
    lookup_hashes_max=16,
    transfer_blocks_max=8,
    transfers_max=3,
    leases_max=4,
    held_fraction_max=0.5,
    lease_ttl_s=10.0,
    lease_lifetime_s=40.0,
    transfer_deadline_s=20.0,
    terminal_kept=4,
)
SAMPLED_BYTES_PER_S = 40_000
"""About a block between two ticks."""
REMEMBERED = 24
CORRUPT_MAX = 6
"""Of the pool's slots; then it is made anew."""
DISK_POLICY = CoreDisks(
    write_queue_bytes=40_960,
    read_queue_bytes=12_288,  # often less than one lookup wants
    job_bytes=16_384,
    clean_ahead_s=2.0,
    slow_deadline_s=4.0,
    errors_max=3,
    probe_after_s=6.0,
)
SHARED_FRACTION = 0.25
"""How many of the worlds have a store."""
DEVICES = 2
ENGINES = 3
MISS, PENDING, HIT = 0, 1, 2
ACCEPTED, EXISTS, STILL_PENDING, THROTTLED, UNWANTED = range(5)


class Crash(Exception):
    """The daemon is killed while it performs actions."""


class World:
    """Everything, driven by one seed. `oracle`: with the plain-Python table instead of the native one.
    `ranks`: whether the native one chooses by what it learns; None: in two of five worlds."""

    def __init__(self, seed: int, *, oracle: bool = False, ranks: bool | None = None) -> None:
        self.random = Random(seed)
        self.oracle = oracle
        chosen = self.random.random() < 0.4
        self.ranks = not oracle and (chosen if ranks is None else ranks)
        self.now_s = 1_000.0
        self.stimuli = 0
        self.faults: Counter[tuple[str, str]] = Counter()
        self.transitions: Counter[tuple[State, Event]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.leased_fraction = self.random.choice((0.2, 0.6, 0.95))
        """Of the pool, which holds a few prefixes."""
        self.pool = self._new_pool()
        self.sessions = itertools.count(1)
        self.worker_ids = itertools.count(1)
        self.registrations = itertools.count(1)
        self.zombies: list[FakeWorker | FakeDiskWorker] = []
        """Writers of slots that a new daemon could not prove gone."""
        self.machine: Machine
        geometry = PoolGeometry(self.random.choice((3, 8)), 1 << 15, 2 << 20)
        self.slabs = [FakeSlab(DiskId(disk), geometry) for disk in range(self.random.choice((0, 1, 1, 2)))]
        self.shared = Random(-seed - 1).random() < SHARED_FRACTION
        """Whether there is a store, below the disks if there are some."""
        if self.shared:
            self.slabs.append(FakeStore(DiskId(len(self.slabs)), geometry))
        self._start()

    def _new_pool(self) -> FakePool:
        """It gets its memory little by little, unless it has all of it at once."""
        pool = FakePool(GEOMETRY)
        pool.populated = self.random.choice((1, 3, GEOMETRY.extents))
        return pool

    def all_can_go(self) -> None:
        """Nothing holds a block of any tier for ever, whatever was said of who follows whom. Where some are
        held for a time, those before them stay as well."""
        core = self.machine.core
        for blocks in (core.blocks, *(disk.blocks for disk in core.below.all)):
            dump = blocks.table.dump()
            free = (dump["states"] == BlockState.READY) & (dump["pins"] == 0)
            for domain in blocks.domains.by_id:
                own = dump["domains"] == domain
                if (dump["pins"][own] != 0).any():
                    continue
                there = int(np.count_nonzero(free & own))
                found = len(blocks.table.victims(domain, there + 1))
                assert found == there, "blocks that are free can never go"

    def _table(self, capacity: int, geometry: PoolGeometry, *, ranks: bool = False) -> Any:
        pages = (geometry.first_extent_offset + geometry.capacity_bytes) // PAGE_BYTES
        if self.oracle:
            return OracleTable(capacity, pages)
        return NativeTable(capacity, pages, 1, ranks=ranks, history_blocks=4 * capacity)

    def _start(self) -> None:
        """A daemon starts on the pool as it is."""
        capacity = self.random.choice((64, 20, 14) if self.slabs else (64, 64, 14))
        table = self._table(capacity, GEOMETRY, ranks=self.ranks)
        self.verify = self.random.choice(list(Verify))
        shelves = [
            (self._table(self.random.choice((64, 20)), slab.geometry), slab.geometry) for slab in self.slabs
        ]
        self.machine = Machine(
            table,
            lambda: self.now_s,
            replace(LIMITS, leased_fraction_max=self.leased_fraction),
            GEOMETRY,
            populated=self.pool.populated,
            integrity=CoreIntegrity(self.verify, SAMPLED_BYTES_PER_S, REMEMBERED),
            disks=shelves[:-1] if self.shared else shelves,
            disk_policy=replace(DISK_POLICY, mode=self.random.choice(list(WriteMode))),
            store=shelves[-1] if self.shared else None,
            store_policy=replace(DISK_POLICY, mode=self.random.choice(list(WriteMode))),
            randomness=np.random.default_rng(self.random.getrandbits(32)),
            policy=PoolPolicy.REUSE if self.ranks else PoolPolicy.LRU,
        )
        self.machine.core.pages.entries_per_tick = self.random.choice((1, 5, 1 << 17))
        self.pages: dict[SpaceId, FakePage] = {}
        self.fault_rate = self.random.choice((0.0, 0.02, 0.1))
        self.draining = False
        self.engines: list[Engine] = []
        self.of_session: dict[SessionId, Engine] = {}
        self.dying: list[SessionId] = []
        self.current: list[FakeWorker | None] = [None] * DEVICES
        self.lost: list[FakeWorker] = []
        self.disk_workers: list[FakeDiskWorker | None] = [None] * len(self.slabs)
        self.lost_disk_workers: list[FakeDiskWorker] = []
        self.recovered_disks: set[DiskId] = set()
        self.condemned: set[Key] = set()
        self.writing: dict[int, Engine] = {}
        """Who last had a slot written."""
        self.told: list[Told | DiskJobFinished] = []
        """What workers have said lately; some of it is said again."""
        self.crash_after: int | None = None
        self.scanned = False
        for slab in self.slabs:
            slab.broken = False
            if self.random.random() < 0.3:
                self.start_disk(slab.disk)
                self.faults["disk recovered", "before the pool"] += 1
        self.scanned = True
        if self.pool.boot or self.pool.extents:
            found = self.pool.recover(self.random)
            self.quarantined = set(found.quarantined.tolist())
            self.corrupt = set(found.corrupt.tolist())
            self.do(found)
            assert self.machine.core.blocks.live == min(capacity, len(found.hashes))
        else:
            self.quarantined = set()
            self.corrupt = set()

    def restart(self, *, crash: bool = False) -> None:
        """kill -9. `crash`: while the actions of the last stimulus were being performed."""
        self.faults["daemon restart", "in the middle of actions" if crash else "between stimuli"] += 1
        self.count_up()
        workers = [worker for worker in self.current if worker is not None] + self.lost
        of_disks = [worker for worker in self.disk_workers if worker is not None] + self.lost_disk_workers
        if self.slabs and self.random.random() < 0.3:
            self.faults["power is lost", "disk"] += 1
            for slab in self.slabs:
                slab.power_is_lost(self.random)
        for _ in range(self.random.choice((0, 1, 5))):
            self.faults["data rots", "while the daemon is down"] += self.pool.rot(self.random, "data")
        self.zombies = []
        if len(self.corrupt) > CORRUPT_MAX:
            self.faults["cold start", "too many corrupt slots"] += 1
            self.pool = self._new_pool()
        self._start()
        for worker in workers:
            worker.become_zombie(self.quarantined)
        for reader in of_disks:
            reader.become_zombie(self.quarantined)
        self.zombies = [worker for worker in workers if worker.queued or worker.started]
        self.zombies += [worker for worker in of_disks if worker.started]

    def count_up(self) -> None:
        """What this daemon has met."""
        core = self.machine.core
        self.transitions.update(core.transitions.counts)
        self.outcomes["blocks promoted"] += core.tally.promoted_blocks
        self.outcomes["blocks whose time was over"] += core.tally.expired_blocks
        self.outcomes["blocks not held as was asked"] += core.tally.unheld_blocks
        self.outcomes["blocks evicted before a disk had them"] += core.tally.evicted_unwritten_blocks
        self.outcomes["blocks corrupt on a disk"] += core.tally.corrupt_on_disk
        for disk in core.below.all:
            self.outcomes["blocks written to a disk"] += disk.tally.written_blocks
            self.outcomes["blocks evicted from a disk"] += disk.tally.evicted_blocks
            self.outcomes["extents of a disk reclaimed"] += disk.tally.reclaimed_extents

    def do(self, stimulus: Stimulus) -> Reply:
        """Hands a stimulus in, performs, checks. Raises Refusal as the core does."""
        self.stimuli += 1
        try:
            reply, actions = self.machine.handle(stimulus)
        except Refusal as refusal:
            self.refusals[refusal.reason.name] += 1
            raise
        if self.crash_after is not None and self.crash_after < len(actions):
            for action in actions[: self.crash_after]:
                self._perform(action)
            last = actions[self.crash_after]
            if isinstance(last, CommitSlots):
                self.pool.commit(last, only=self.random.randrange(last.slots.size))
            raise Crash
        for action in actions:
            self._perform(action)
        self._check()
        return reply

    def open_page(self, session: SessionId, group: int) -> Refusal | None:
        """A scheduler wants to read an index page."""
        try:
            space, blocks = self.machine.page_wanted(session, group)
        except Refusal as refusal:
            return refusal
        assert (blocks is None) == (space in self.pages)
        if blocks is not None:
            page = self.pages[space] = FakePage(blocks, plain=self.oracle)
            self.do(PublishPage(session, group, page.page))
        return None

    def try_(self, stimulus: Stimulus) -> Reply | Refusal:
        try:
            return self.do(stimulus)
        except Refusal as refusal:
            return refusal

    def refused(self, stimulus: Stimulus, *reasons: Reason) -> None:
        """A stimulus that has to be refused, and must not leave a trace."""
        before = snapshot(self.machine)
        refusal = self.try_(stimulus)
        assert isinstance(refusal, Refusal), f"accepted: {stimulus}"
        assert refusal.reason in reasons, f"{refusal}; expected {reasons}"
        assert snapshot(self.machine) == before, f"{refusal} changed something"

    # --- disks ---

    def start_disk(self, disk: DiskId) -> None:
        """A worker of a disk comes up; the first of a boot has what it holds scanned."""
        slab = self.slabs[disk]
        name = WorkerId(next(self.worker_ids))
        if isinstance(slab, FakeStore):
            worker: FakeDiskWorker = FakeStoreWorker(name, slab, self.pool)
        else:
            worker = FakeDiskWorker(name, slab, self.pool)
        self.disk_workers[disk] = worker
        first = disk not in self.recovered_disks
        found = slab.recover(self.random) if first else None
        self.do(WorkerLive(worker.worker, f"disk-{disk}"))
        if found is not None:
            self.recovered_disks.add(disk)
            self.do(found)

    def _image(self, disk: DiskId | None) -> FakePool:
        return self.pool if disk is None else self.slabs[disk].image

    def disk_worker(self, name: WorkerId) -> FakeDiskWorker | None:
        found = [worker for worker in self.disk_workers if worker is not None and worker.worker == name]
        return found[0] if found else None

    def _post_disk_job(self, action: PostDiskJob) -> None:
        for number in action.host_slots.tolist():
            if self.pool.slots[number].state == WRITING:
                self.writing.pop(number, None)
        worker = self.disk_worker(action.worker)
        assert worker is not None, "a job is posted to a worker that is not there"
        image = self.slabs[action.disk].image
        worker.take(
            action, generation_of(image, action.disk_slots), generation_of(self.pool, action.host_slots)
        )

    def deliver_disk(self, worker: FakeDiskWorker) -> None:
        """The front reads what a disk's worker has said; of a lost one, nothing counts any more."""
        if isinstance(worker, FakeStoreWorker) and worker.found:
            found = worker.found.pop(0)
            if not worker.lost:
                self.faults["a pack is found", "and told of"] += 1
                self.do(found)
        if not worker.outbox:
            return
        message = worker.outbox.popleft()
        if worker.lost:
            if self.random.random() < 0.4:
                self.late(message, "from a lost worker")
            return
        self.told.append(message)
        del self.told[:-20]
        late = self.machine.core.tally.late_messages
        self.do(message)
        assert self.machine.core.tally.late_messages == late, "a message in time was taken for a late one"

    def is_on_disk(self, engine: Engine, group: int, key: bytes) -> bool:
        """Whether a LIVE disk has a block and can read it; `_check` has compared its table with the
        records."""
        core = self.machine.core
        space = core.blocks.spaces.ids.get((engine.digest, group))  # type: ignore[arg-type]
        if space is None or (engine.digest, group, key) in self.condemned:
            return False
        return bool(core.below.find(space, as_hashes([key]))[0] != NO_ENTRY)

    def is_late(self, engine: Engine, group: int, key: bytes) -> bool:
        """Whether a block is WRITING, and told to be a miss all the same."""
        core = self.machine.core
        space = core.blocks.spaces.ids.get((engine.digest, group))  # type: ignore[arg-type]
        if space is None:
            return False
        entries, states = core.blocks.table.lookup(space, as_hashes([key]))
        return bool(states[0] == WRITING and core.blocks.table.flags(entries)[0] & BlockFlag.LATE)

    def _check_disks(self) -> None:
        """A disk's table and the image of its records say the same, but for what its worker has not told
        yet."""
        for disk, slab in zip(self.machine.core.below.all, self.slabs, strict=True):
            if slab.disk not in self.recovered_disks:
                continue
            dump = disk.blocks.table.dump()
            told = np.zeros_like(slab.image.states)
            as_record = np.array([0, WRITING, READY, READY], np.uint8)[dump["states"]]
            told[dump["slots"]] = np.repeat(as_record, dump["slot_counts"])
            told[sorted(disk.blocks.slots.corrupt)] = WRITING
            there = slab.image.states
            same = (told == there) | ((told == WRITING) & (there == READY))
            wrong = np.flatnonzero(~same)
            assert len(wrong) == 0, (
                f"disk {slab.disk}, slot {wrong[0]}: told {told[wrong[0]]}, its record says {there[wrong[0]]}"
            )

    # --- actions ---

    def _perform(self, action: Action) -> None:
        match action:
            case AssignExtent():
                self._image(action.disk).assign(action)
            case OpenSlots():
                self._image(action.disk).open(action)
            case CommitSlots():
                numbers = action.slots.reshape(-1).tolist()
                writers = [self.writing[number] for number in numbers if number in self.writing]
                assert not any(engine.ended for engine in writers), "a store outlived its epoch"
                for number in numbers:
                    assert self.pool.slots[number].content == self.pool.slots[number].sum
                self.pool.commit(action)
            case PostDiskJob():
                self._post_disk_job(action)
            case WatchSpace() | UnwatchSpace():
                store_worker = self.disk_worker(action.worker)
                assert isinstance(store_worker, FakeStoreWorker)
                store_worker.watch(action)
            case FreeSlots(disk=disk) | QuarantineSlots(disk=disk) if disk is not None:
                slab = self.slabs[disk]
                if isinstance(action, FreeSlots):
                    slab.image.free(action)
                else:
                    slab.image.set_aside(action)
                    if self.disk_workers[disk] is not None:
                        slab.persist(action.slots.tolist())
            case FreeSlots():
                for number in action.slots.tolist():
                    if (key := self.pool.slots[number].key) is not None:
                        self.condemned.discard(key)
                self.pool.free(action)
            case QuarantineSlots():
                numbers = action.slots.tolist()
                for number in numbers:
                    if (key := self.pool.slots[number].key) is not None:
                        self.condemned.discard(key)
                self.corrupt.update(numbers)
                self.pool.set_aside(action)
            case CheckSlots():
                worker = self._worker(action.worker)
                if worker is not None:
                    worker.inbox.append((action, generation_of(self.pool, action.slots)))
            case PostPart():
                if action.direction is Direction.STORE:
                    self.writing.update(dict.fromkeys(action.slots.tolist(), self.of_session[action.session]))
                worker = self._worker(action.worker)
                if worker is not None:
                    worker.inbox.append((action, generation_of(self.pool, action.slots)))
            case RevokePart() | ReleaseSession():
                worker = self._worker(action.worker)
                if worker is not None:
                    worker.inbox.append(action)
            case WithdrawPage():
                del self.pages[action.space]
            case Notify():
                self._notify(action)

    def _worker(self, name: WorkerId) -> FakeWorker | None:
        found = [worker for worker in self.current if worker is not None and worker.worker == name]
        return found[0] if found else None

    def _notify(self, action: Notify) -> None:
        engine = self.of_session.get(action.session)
        if engine is None:
            return
        event = action.event
        if isinstance(event, InstanceView):
            engine.view = event
        elif isinstance(event, SessionEnded):
            engine.ended = True
            self.dying.append(action.session)
        else:
            self._transfer_ended(engine, event)

    def _transfer_ended(self, engine: Engine, event: TransferEnded) -> None:
        pending = engine.pending.pop(event.ticket)
        self.outcomes[f"{'store' if pending.store else 'load'} {event.end.name}"] += 1
        assert len(event.succeeded) == pending.keys
        assert (event.error is None) == (event.end is TransferEnd.DONE)
        if pending.store:
            self._store_ended(engine, pending, event)
        else:
            self._load_ended(engine, pending, event)

    def _store_ended(self, engine: Engine, pending: Pending, event: TransferEnded) -> None:
        accepted = 0
        for i, (result, good) in enumerate(zip(pending.results, event.succeeded.tolist(), strict=True)):
            if result == ACCEPTED:
                state = self.pool.state_of((engine.digest, pending.group, pending.hashes[accepted]))
                accepted += 1
                assert (state == READY) == bool(good), f"key {i}: told {good}, its records say {state}"
                assert good or event.end is not TransferEnd.DONE, "DONE, but a block is not committed"
            elif result != EXISTS:
                assert not good, f"key {i} was not accepted, and is told to be committed"
        for rank in range(engine.kind.world):  # the source is free to be used again, and is
            for block in pending.block_ids:
                if block not in engine.blocks_in_use(pending.group, loads_only=False):
                    engine.memory[rank][pending.group][block] = "used again"

    def _load_ended(self, engine: Engine, pending: Pending, event: TransferEnded) -> None:
        for key, block, good in zip(pending.hashes, pending.block_ids, event.succeeded.tolist(), strict=True):
            for rank in range(engine.kind.world):
                there = engine.memory[rank][pending.group][block]
                wanted = engine.content(rank, pending.group, key)
                assert not good or there == wanted, (
                    f"wrong bytes in rank {rank}, block {block}: {there}, not {wanted}"
                )
            assert good or event.end is not TransferEnd.DONE, "DONE, but a block is not in place"

    def _check(self) -> None:
        validate(self.machine)
        if not self.scanned:
            return  # the pool holds what nobody knows yet
        tables = self.machine.core.blocks.spaces.tables
        for space, page in self.pages.items():
            page.check(space, tables)
        dump = self.machine.core.blocks.table.dump()
        told = np.zeros_like(self.pool.states)
        as_record = np.array([0, WRITING, READY, READY], np.uint8)[dump["states"]]
        told[dump["slots"]] = np.repeat(as_record, dump["slot_counts"])
        quarantined = self.machine.core.blocks.slots.quarantined
        assert quarantined == self.quarantined
        corrupt = self.machine.core.blocks.slots.corrupt
        assert corrupt == self.corrupt
        told[[*quarantined, *corrupt]] = WRITING
        self._check_disks()
        wrong = np.flatnonzero(told != self.pool.states)
        assert len(wrong) == 0, (
            f"slot {wrong[0]}: the table says {told[wrong[0]]}, its record {self.pool.states[wrong[0]]}"
        )

    def idle(self) -> None:
        """Nothing is left of what has ended."""
        status = self.machine.status()
        assert (status.leases, status.transfers_active, status.instances) == (0, 0, ())
        assert (status.blocks.writing, status.blocks.evicting) == (0, 0)
        assert not self.machine.core.sessions
        assert not self.pages
        assert not self.machine.core.parts
        assert not any(disk.jobs for disk in self.machine.core.below.all)

    def expected(self, engine: Engine, group: int, key: bytes) -> int:
        name = (engine.digest, group, key)
        if name in self.condemned:
            return MISS
        return {WRITING: PENDING, READY: HIT}.get(self.pool.state_of(name), MISS)

    def late(self, message: Told | DiskJobFinished, state: str) -> None:
        self.faults["late message", f"{type(message).__name__} {state}"] += 1
        before = snapshot(self.machine, counters=False)
        self.do(message)
        assert snapshot(self.machine, counters=False) == before, "a late message changed something"

    def exit_worker(self, worker: FakeWorker) -> None:
        """The process is gone: it copies no more."""
        self.lost.remove(worker)
        self.do(WorkerExited(worker.worker))

    def end_engine(self, engine: Engine) -> None:
        self.engines.remove(engine)
        if engine.ended or not engine.sessions:
            return
        instance = self.machine.core.sessions[next(iter(engine.sessions.values()))].instance
        self.faults["engine dies", instance.state.name] += 1
        for transfer in instance.transfers.values():
            self.note("engine dies", transfer)
        victim = self.random.choice(list(engine.sessions.values()))
        self.do(EndSession(victim, "killed"))
        engine.ended = True

    def deliver(self, worker: FakeWorker) -> None:
        """The front reads what a worker has said; of a lost one, nothing counts any more."""
        if not worker.outbox:
            return
        message = worker.outbox.popleft()
        if worker.lost:
            if self.random.random() < 0.4:
                self.late(message, "from a lost worker")
            return
        self.told.append(message)
        del self.told[:-20]
        late = self.machine.core.tally.late_messages
        if isinstance(message, PartFinished) and message.corrupt:
            part = self.machine.core.parts[message.part]
            entries = part.transfer.entries
            bad = entries[message.failed] if len(message.failed) else entries
            group, digest = part.transfer.group, part.transfer.instance.digest
            assert digest is not None
            hashes = self.machine.core.blocks.table.hashes(np.ascontiguousarray(bad))
            self.condemned |= {(digest, group, row.tobytes()) for row in hashes}
        if isinstance(message, SlotsChecked):
            self._found(message)
        self.do(message)
        assert self.machine.core.tally.late_messages == late, "a message in time was taken for a late one"

    def _found(self, message: SlotsChecked) -> None:
        """A sample has found slots rotten: those that are still read are condemned from now on."""
        check = self.machine.core.check
        assert check is not None
        table = self.machine.core.blocks.table
        for position in message.corrupt.tolist():
            number = int(check.slots[position])
            entry = check.entries[position : position + 1]
            same = table.owners(check.slots[position : position + 1]) == entry
            if not same or table.generations(entry) != check.generations[position]:
                self.faults["sample finds", "block that has gone"] += 1
                continue
            slot = self.pool.slots[number]
            assert slot.rot, f"slot {number} is told to be corrupt, and nothing is wrong with it"
            assert slot.key is not None
            known = slot.key in self.condemned
            self.faults["sample finds", "condemned block" if known else "corrupt block"] += 1
            self.condemned.add(slot.key)

    def note(self, fault: str, transfer: Any) -> None:
        """Counts a fault by what transfer it struck."""
        self.faults[fault, f"{transfer.direction.name.lower()} {transfer.state.name}"] += 1

    def some_engine(self, wanted: Callable[[Engine], bool]) -> Engine | None:
        found = [engine for engine in self.engines if not engine.ended and wanted(engine)]
        return self.random.choice(found) if found else None


def snapshot(machine: Machine, *, counters: bool = True) -> tuple[Any, ...]:
    """Everything that a refusal must not change."""
    core = machine.core
    slots = core.blocks.slots
    return (
        {name: array.tobytes() for name, array in core.blocks.table.dump().items()},
        [free_slots(slots, size).tobytes() for size, *_ in slots.sizes()],
        slots.extent_size.tobytes(),
        {
            name: (i.state, i.last_ticket, i.alive_at_s, list(i.leases), list(i.transfers),
            sorted(i.words_in_use), list(i.sessions), list(i.ended), i.leased_bytes, len(i.mappings)) for
            name, i in core.instances.items() }, {n: (t.state, t.open_parts, t.revoked) for n, t in
            core.transfers.items()}, list(core.parts), list(core.names), list(core.workers),
            core.draining, core.blocks.history.total, core.check,
            repr(core.tally) if counters else None, [_disk_snapshot(disk) for disk in
            core.below.all], )  # fmt: skip


def _disk_snapshot(disk: Disk) -> tuple[Any, ...]:
    slots = disk.blocks.slots
    return (
        {name: array.tobytes() for name, array in disk.blocks.table.dump().items()},
        [free_slots(slots, size).tobytes() for size, *_ in slots.sizes()],
        slots.extent_size.tobytes(),
        (disk.state, list(disk.jobs), disk.errors_in_row, disk.probe, repr(disk.tally)),
    )
