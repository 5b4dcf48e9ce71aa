"""The façade, which alone performs what the core decides. Everything here runs on the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, assert_never

import numpy as np
from kvtier_kernels import PoolRecords

from kvtierd.cache import snapshot
from kvtierd.cache.clearing import Cleared, Clearing
from kvtierd.cache.disks import DiskFile, DiskFiles
from kvtierd.cache.mappings import Mappings
from kvtierd.cache.pages import SharedPages
from kvtierd.cache.waiters import Waiters
from kvtierd.core import actions, stimuli
from kvtierd.core.blocks.namespaces import NamespaceAbout
from kvtierd.core.blocks.table import U8
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import DiskId, Epoch, Hashes, SessionId, SpaceId, Ticket, WorkerId
from kvtierd.core.machine import Machine
from kvtierd.core.maintenance.explain import Explained, PlaceStatus
from kvtierd.core.state.entities import GroupPlan
from kvtierd.logs import logger
from kvtierd.memory.host_pool import HostPool
from kvtierd.tiers.disk.image import WRITER
from kvtierd.workers.supervisor.supervisor import Supervisor, WorkerStimulus

Event = actions.TransferEnded | actions.InstanceView | actions.SessionEnded
Listener = Callable[[Event], None]
"""Gets a session's events, in order and inside `handle`. It queues them, and calls nothing here except
`post`."""

log = logger(__name__)


class Teller(Protocol):
    """Who passes news of blocks on to routers. It never waits."""

    def tell(self, news: Sequence[actions.BlockNews]) -> None: ...

    def status(self) -> snapshot.EventsSnapshot: ...


@dataclass(frozen=True, slots=True)
class _Session:
    listener: Listener
    about: snapshot.SessionAbout
    epoch: Epoch


class Cache:
    """One host's cache: decides in the core, and performs on the pool, the disks and the workers.

    Other threads must not use it, but may use a `Snapshot`.
    """

    def __init__(
        self,
        machine: Machine,
        pool: HostPool,
        workers: Supervisor,
        limits: stimuli.CoreLimits,
        *,
        disks: Sequence[DiskFile] = (),
        pool_path: Path | None,
        pages_max: int,
        teller: Teller | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pages_max`: index pages, each of which takes a descriptor. `teller` passes news of blocks on
        to routers; None if there are none."""
        self._teller = teller
        self._machine = machine
        self._pool = pool
        self._workers = workers
        self._pool_path = pool_path
        self._clock = clock
        self._started_at_s = clock()
        self.boot_nonce = pool.boot_nonce
        self.pool_bytes = pool.geometry.capacity_bytes
        """Bytes that the host tier can hold once all of it has memory."""
        self._writers: dict[WorkerId, int] = {}
        """The pool's writer id of every worker that was ever live."""
        self.disks = DiskFiles(disks, workers, pool.boot_nonce, self.post)
        self.pages = SharedPages(machine, self.handle, pool.boot_nonce, pages_max)
        self._gate_deadline_ms = round(limits.gate_deadline_s * 1000)
        self._clearing = Clearing(machine, self.handle, self.disks, workers)
        self._sessions: dict[SessionId, _Session] = {}
        self._waiters = Waiters()
        self._busy = False
        self._posted: deque[stimuli.Stimulus] = deque()
        self.draining = False
        """Whether nothing new is taken."""
        self.mappings = Mappings(self.handle, workers)
        self.poisoned = asyncio.Event()
        """Set after an internal error: nothing is handled any more, and the daemon has to be started
        again."""

    # --- what is learnt of reuse ---

    @property
    def ranks(self) -> bool:
        """Whether what goes first is decided by what is learnt."""
        return self._machine.core.blocks.ranks

    def learnt(self) -> bytes:
        """What was learnt, for `restore_learnt`; empty if nothing is learnt."""
        return self._machine.core.blocks.table.learnt()

    def restore_learnt(self, saved: bytes) -> bool:
        """Goes on with what another daemon has learnt. False if this one cannot use it."""
        return self._machine.core.blocks.table.restore_learnt(saved)

    # --- deciding ---

    def handle(self, stimulus: stimuli.Stimulus) -> actions.Reply:
        """Decides and performs, completely, before it returns. Raises Refusal, and then nothing has changed.

        Any other exception is a bug or a broken pool, and poisons the daemon.
        """
        if self.poisoned.is_set():
            raise _stopping()
        assert not self._busy, "a stimulus was handled inside another one: use post"
        self._busy = True
        try:
            reply, decided = self._machine.handle(stimulus)
            try:
                for action in decided:
                    self._perform(action)
            except Refusal as refusal:
                raise RuntimeError(f"an action was refused: {refusal}") from refusal
        except Refusal:
            raise
        except Exception as error:
            self.poison(error, type(stimulus).__name__)
            raise _stopping() from error
        finally:
            self._busy = False
        self._run_posted()
        return reply

    def post(self, stimulus: stimuli.Stimulus) -> None:
        """Handles an event, which nobody can refuse, now or right after the stimulus that is being
        handled."""
        self._posted.append(stimulus)
        if not self._busy:
            self._run_posted()

    def _run_posted(self) -> None:
        while self._posted and not self._busy and not self.poisoned.is_set():
            stimulus = self._posted.popleft()
            try:
                self.handle(stimulus)
            except Refusal as refusal:
                log.warning("an event was refused", event=type(stimulus).__name__, why=str(refusal))

    def poison(self, error: BaseException, during: str) -> None:
        """Stops handling anything, because the state in memory cannot be trusted. The daemon then ends
        itself."""
        log.critical(
            "internal error: stopping; the pool is kept and the next start is warm",
            during=during,
            error=repr(error),
            exc_info=error,
        )
        self._posted.clear()
        self.poisoned.set()

    # --- doing ---

    def _perform(self, action: actions.Action) -> None:
        """At once: slot records in the pool and in disks' images, and packets to workers. Any exception means
        a bug or a broken pool."""
        match action:
            case actions.PostPart():
                generations = self._pool.records.generations(action.slots)
                self._workers.orders.post(action, generations, self._gate_deadline_ms)
            case actions.OpenSlots():
                self._open(action)
            case actions.CommitSlots():
                blocks, world = action.slots.shape
                clocks = np.uint64(action.first_clock) - np.arange(blocks, dtype=np.uint64)
                self._pool.records.commit(action.slots.reshape(-1), np.repeat(clocks, world))
            case actions.FreeSlots():
                self._records(action.disk).free(np.ascontiguousarray(action.slots).reshape(-1))
            case actions.QuarantineSlots():
                self._set_aside(action)
            case actions.PostDiskJob():
                on_disk = self._records(action.disk).generations(action.disk_slots)
                on_host = self._pool.records.generations(action.host_slots)
                self._workers.orders.post_disk_job(action, on_disk, on_host)
            case actions.WatchSpace() | actions.UnwatchSpace():
                self._workers.orders.watch_space(action)
            case actions.CheckSlots():
                self._workers.orders.check_slots(action, self._pool.records.generations(action.slots))
            case actions.Notify():
                self._notify(action)
            case actions.RevokePart():
                self._workers.orders.revoke(action.worker, action.part)
            case actions.ReleaseSession():
                self._workers.orders.release_session(action.worker, action.session)
            case actions.WithdrawPage():
                self.pages.withdraw(action.space)
            case actions.TellOfBlocks():
                assert self._teller is not None, "nobody is to be told"
                self._teller.tell(action.news)
            case actions.AssignExtent():
                self._records(action.disk).format_extent(action.extent, action.slot_bytes)
            case _:
                assert_never(action)

    def _records(self, disk: DiskId | None) -> PoolRecords:
        return self._pool.records if disk is None else self.disks[disk].image.records

    def _set_aside(self, action: actions.QuarantineSlots) -> None:
        if action.disk is None:
            self._pool.set_aside(action.slots)
            return
        disk = self.disks[action.disk]
        disk.image.set_aside(action.slots)
        self._workers.orders.persist_records(disk.device, action.slots)

    def _open(self, action: actions.OpenSlots) -> None:
        self._records(action.disk).open(
            action.slots,
            self._writers[action.worker] if action.disk is None else WRITER,
            self.boot_nonce,
            action.store,
            action.namespace,
            action.group,
            action.shard,
            action.world_size,
            action.hashes,
            action.data_bytes,
        )

    def _notify(self, action: actions.Notify) -> None:
        session = self._sessions.get(action.session)
        if session is None:
            return
        if isinstance(action.event, actions.TransferEnded):
            self._waiters.transfer_ended(session.epoch, action.event.ticket)
        elif isinstance(action.event, actions.SessionEnded):
            self._waiters.epoch_ended(session.epoch, action.event.why)
        session.listener(action.event)

    # --- sessions ---

    def attach(
        self, stimulus: stimuli.AttachSession, about: snapshot.SessionAbout, listener: Listener
    ) -> actions.Attached:
        """Attaches a session. From then on `listener` gets its events. Raises Refusal."""
        reply = self.handle(stimulus)
        assert isinstance(reply, actions.Attached)
        self._sessions[stimulus.session] = _Session(listener, about, reply.epoch)
        self.disks.attached(stimulus.owner.tenant)
        return reply

    def end_session(self, session: SessionId, why: str) -> None:
        """Ends a session if it is attached. Its listener gets no more events."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        self.mappings.session_ended(session)
        self._waiters.epoch_ended(known.epoch, Refusal(Reason.EPOCH_ENDED, f"a session has ended: {why}"))
        self.post(stimuli.EndSession(session, why))

    async def wait(
        self, session: SessionId, epoch: Epoch, tickets: Sequence[Ticket], timeout_s: float
    ) -> list[actions.TransferEnded | None]:
        """Waits until all these transfers have ended, at most `timeout_s`. None for those that have not.
        Raises Refusal."""
        return await self._waiters.wait(
            epoch, tickets, timeout_s, lambda ticket: self._machine.transfer(session, epoch, ticket)
        )

    # --- copy workers ---

    def worker_event(self, stimulus: WorkerStimulus) -> None:
        """Takes what the supervisor reports about a worker."""
        match stimulus:
            case stimuli.WorkerLive(worker):
                self._writers[worker] = self._workers.workers[worker].writer
            case stimuli.WorkerLost(worker):
                self.mappings.worker_lost(worker)
            case stimuli.WorkerExited(worker):
                self.mappings.worker_exited(worker)
            case stimuli.SessionReleased(worker, session):
                if not self.mappings.session_released(worker, session):
                    return
        if not self.disks.take(stimulus):
            self.post(stimulus)

    # --- the pool's memory ---

    def pool_populated(self, end: int) -> None:
        """The pool's file has memory up to the offset `end`, so the extents there can be used."""
        extents = self._pool.populated(end)
        self.post(stimuli.PoolPopulated(extents, complete=extents == self._pool.geometry.extents))

    def pool_stays(self, why: str) -> None:
        """There is no memory for the rest of the pool; `why` says so in words. It goes on with what it
        has."""
        self._pool.no_more(why)
        log.error(
            "the pool stays smaller than pool.size until the next start: there is no memory for the rest",
            why=why,
            populated_bytes=self._pool.populated_bytes,
            of_bytes=self.pool_bytes,
        )
        self.post(stimuli.PoolPopulated(self._pool.populated_extents, complete=True))

    # --- the life of the daemon ---

    def drain(self) -> None:
        """From now on new sessions, stores and loads are refused, and lookups return misses. Running
        transfers go on."""
        if not self.draining:
            self.draining = True
            self.post(stimuli.Drain())

    def resume(self) -> None:
        """Ends what `drain` began."""
        if self.draining:
            self.draining = False
            self.post(stimuli.Resume())

    def show_lookups(self, *, every: bool) -> None:
        """Whether clients are to ask about everything, also where an index page could have told them that
        nothing is there."""
        if not self.poisoned.is_set():
            self.post(stimuli.ShowLookups(every))

    @property
    def transfers_active(self) -> int:
        return self._machine.status().transfers_active

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held, under way or to be done soon, so that ticks may come more rarely."""
        return self._machine.is_idle

    @property
    def is_under_way(self) -> bool:
        """Whether a transfer is active, or blocks are being read from a disk to the host."""
        core = self._machine.status()
        return core.transfers_active > 0 or any(disk.reading_bytes for disk in core.disks)

    def scrub(self) -> list[str]:
        """Has every block on the disks compared with its checksum. Returns the paths of the disks where that
        has begun. Raises Refusal if there are no disks. A store is not compared as a whole."""
        if all(disk.shared for disk in self.disks):
            raise Refusal(
                Reason.MODE_UNSUPPORTED,
                "there is no disk tier: set disk.paths, and start the daemon again",
                field="disk.paths",
                value="",
            )
        begun = []
        for disk, status in zip(self.disks, self._machine.status().disks, strict=True):
            if status.state == "live" and not status.scrubbing and not disk.shared:
                self.handle(stimuli.StartScrub(disk.number))
                begun.append(disk.place)
        return begun

    async def clear(self, namespace: str, timeout_s: float) -> Cleared:
        """Drops the blocks of the one namespace whose digest begins with `namespace`, or all blocks if it is
        empty, as `ClearBlocks` says. Waits at most `timeout_s` for the disks' files to follow. Raises
        Refusal."""
        if self.poisoned.is_set():
            raise _stopping()
        return await self._clearing.clear(namespace, timeout_s)

    def explain(self, key: bytes, namespace: str, group: int | None, tenant: str | None) -> Explained:
        """Why a block can be read or not, in namespaces whose digest begins with `namespace`, of one tenant,
        or of all if `tenant` is None. Raises Refusal."""
        if self.poisoned.is_set():
            raise _stopping()
        return self._machine.explain(key, namespace, group, tenant)

    def namespaces(self, namespace: str, tenant: str | None) -> tuple[PlaceStatus, ...]:
        """How many blocks there are of each namespace whose digest begins with `namespace`, of one tenant or,
        if that is None, of all, and who uses it."""
        return self._machine.namespaces(namespace, tenant)

    def space_of(self, namespace: str, group: int, tenant: str) -> tuple[SpaceId, NamespaceAbout]:
        """One group of the namespace of this tenant that has this hexadecimal digest. Raises Refusal."""
        if self.poisoned.is_set():
            raise _stopping()
        return self._machine.space_of(namespace, group, tenant)

    def plan_of(self, session: SessionId, group: int) -> GroupPlan:
        """Where blocks of one group of a scheduler's instance live; it is only to be read. Raises Refusal."""
        return self._machine.plan_of(session, group)

    def find(self, space: SpaceId, hashes: Hashes) -> U8:
        """Where the block of each hash can be read now: NOWHERE, ON_HOST or ON_DISK. Holds, promotes and
        counts nothing."""
        if self.poisoned.is_set():
            raise _stopping()
        return self._machine.find(space, hashes)

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_at_s

    def snapshot(self) -> snapshot.Snapshot:
        """A picture of everything, for people and metrics. With 256 instances it
        takes between one and two milliseconds."""
        core, workers = self._machine.status(), self._workers
        mapped = {worker.worker: worker.mapped_bytes for worker in core.workers}
        return snapshot.Snapshot(
            state="draining" if self.draining or self.poisoned.is_set() else "serving",
            now_s=self._clock(),
            uptime_s=self.uptime_s,
            boot_nonce=self.boot_nonce,
            pool=snapshot.PoolSnapshot(
                path=str(self._pool_path or ""),
                size_bytes=self._pool.size_bytes,
                file_bytes=len(self._pool.array),
                capacity_bytes=self.pool_bytes,
                populated_bytes=self._pool.populated_bytes,
                shortage=self._pool.shortage,
                quarantined_slots=self._pool.quarantined_slots,
                start=self._pool.start,
            ),
            core=core,
            sessions={session: known.about for session, known in self._sessions.items()},
            devices=tuple(
                snapshot.DeviceSnapshot(
                    device.name,
                    device.idle,
                    device.respawns,
                    dict(device.refused_imports),
                    device.refused_why,
                )
                for device in workers.devices
                if device.is_known
            ),
            disks=tuple(
                snapshot.DiskSnapshot.of(disk, status, workers.devices[disk.device])
                for disk, status in zip(self.disks, core.disks, strict=True)
            ),
            workers=tuple(
                snapshot.WorkerSnapshot.of(handle, workers, mapped.get(handle.worker, 0))
                for handle in workers.workers.values()
            ),
            events=None if self._teller is None else self._teller.status(),
            copies={
                direction.name.lower(): snapshot.CopySnapshot(
                    total.copied_bytes, total.copy_ns / 1e9, dict(total.outcomes)
                )
                for direction, total in workers.totals.items()
            },
        )


def _stopping() -> Refusal:
    return Refusal(
        Reason.INTERNAL, "the daemon met an internal error and is stopping; attach again when it is back"
    )
