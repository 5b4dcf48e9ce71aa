"""The façade: the only one that performs what the core decides. Everything here runs on the event loop."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtierd.cache.clearing import Cleared, Clearing
from kvtierd.cache.disks import DiskFile, DiskFiles
from kvtierd.cache.mappings import Mappings
from kvtierd.cache.pages import SharedPages
from kvtierd.cache.perform import Performer
from kvtierd.cache.snapshot import (
    CopySnapshot,
    DeviceSnapshot,
    DiskSnapshot,
    PoolSnapshot,
    SessionAbout,
    Snapshot,
    WorkerSnapshot,
)
from kvtierd.cache.waiters import Waiters
from kvtierd.core.actions import Attached, InstanceView, Notify, Reply, SessionEnded, TransferEnded
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import Epoch, SessionId, Ticket, WorkerId
from kvtierd.core.machine import Machine
from kvtierd.core.maintenance.explain import Explained, PlaceStatus
from kvtierd.core.status import DiskStatus
from kvtierd.core.stimuli import (
    AttachSession,
    CoreLimits,
    Drain,
    EndSession,
    Resume,
    SessionReleased,
    SlotsProven,
    StartScrub,
    Stimulus,
    Tick,
    WorkerExited,
    WorkerLive,
    WorkerLost,
)
from kvtierd.logs import logger
from kvtierd.memory import HostPool
from kvtierd.workers.supervisor.supervisor import Supervisor, WorkerStimulus

TICK_S = 0.1
QUARANTINE_RETRY_TICKS = 50

Event = TransferEnded | InstanceView | SessionEnded
Listener = Callable[[Event], None]
"""Gets a session's events, in order, inside `handle`: queues them, calls nothing here but `post`."""

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Session:
    listener: Listener
    about: SessionAbout
    epoch: Epoch


class Cache:
    """One host's cache: decides in the core, performs on the pool and the copy workers.

    Not for use from other threads; a `Snapshot` is.
    """

    def __init__(
        self,
        machine: Machine,
        pool: HostPool,
        workers: Supervisor,
        limits: CoreLimits,
        *,
        disks: Sequence[DiskFile] = (),
        pool_path: Path | None,
        clock: Callable[[], float] = time.monotonic,
        observe_lag: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`observe_lag` is told, with every tick, how many seconds late the event loop was."""
        self._machine = machine
        self._pool = pool
        self._workers = workers
        self._pool_path = pool_path
        self._clock = clock
        self._observe_lag = observe_lag
        self._started_at_s = clock()
        self._writers: dict[WorkerId, int] = {}
        self.disks = DiskFiles(disks, workers, pool.boot_nonce, self.post)
        self.pages = SharedPages(machine, self.handle, pool.boot_nonce)
        self._performer = Performer(
            pool,
            workers,
            self.disks,
            self._writers,
            self._notify,
            round(limits.gate_deadline_s * 1000),
            self.pages.withdraw,
        )
        self._clearing = Clearing(machine, self.handle, self.disks, workers)
        self._sessions: dict[SessionId, _Session] = {}
        self._waiters = Waiters()
        self._busy = False
        self._posted: deque[Stimulus] = deque()
        self._draining = False
        self.mappings = Mappings(self.handle, workers)
        self.poisoned = asyncio.Event()
        """Set after an internal error: nothing is handled any more, and the daemon must be started again."""

    # --- deciding and doing ---

    def handle(self, stimulus: Stimulus) -> Reply:
        """Decides and performs, wholly, before it returns. Raises Refusal; nothing has changed then.

        An exception other than a refusal is a bug or a broken pool: it poisons the daemon.
        """
        if self.poisoned.is_set():
            raise _stopping()
        assert not self._busy, "a stimulus was handled inside another one: use post"
        self._busy = True
        try:
            reply, actions = self._machine.handle(stimulus)
            try:
                self._performer.perform(actions)
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

    def post(self, stimulus: Stimulus) -> None:
        """Handles now, or right after what is being handled. For events, which nobody can refuse."""
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
        """Handles nothing from now on: what is in memory cannot be trusted. The daemon stops itself."""
        log.critical(
            "internal error: stopping; the pool is kept and the next start is warm",
            during=during,
            error=repr(error),
            exc_info=error,
        )
        self._posted.clear()
        self.poisoned.set()

    def _notify(self, action: Notify) -> None:
        session = self._sessions.get(action.session)
        if session is None:
            return
        if isinstance(action.event, TransferEnded):
            self._waiters.transfer_ended(session.epoch, action.event.ticket)
        elif isinstance(action.event, SessionEnded):
            self._waiters.epoch_ended(session.epoch, action.event.why)
        session.listener(action.event)

    # --- sessions ---

    def attach(self, stimulus: AttachSession, about: SessionAbout, listener: Listener) -> Attached:
        """Attaches a session; from then on `listener` gets its events. Raises Refusal."""
        reply = self.handle(stimulus)
        assert isinstance(reply, Attached)
        self._sessions[stimulus.session] = _Session(listener, about, reply.epoch)
        return reply

    def end_session(self, session: SessionId, why: str) -> None:
        """Ends a session if it is attached; its listener hears nothing more."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        self.mappings.session_ended(session)
        self._waiters.epoch_ended(known.epoch, Refusal(Reason.EPOCH_ENDED, f"a session has ended: {why}"))
        self.post(EndSession(session, why))

    async def wait(
        self, session: SessionId, epoch: Epoch, tickets: Sequence[Ticket], timeout_s: float
    ) -> list[TransferEnded | None]:
        """Waits until all these transfers are terminal, `timeout_s` at most; None for those that are not."""
        return await self._waiters.wait(
            epoch, tickets, timeout_s, lambda ticket: self._machine.transfer(session, epoch, ticket)
        )

    # --- copy workers ---

    def worker_event(self, stimulus: WorkerStimulus) -> None:
        """Takes what the supervisor reports."""
        match stimulus:
            case WorkerLive(worker):
                self._writers[worker] = self._workers.workers[worker].writer
            case WorkerLost(worker):
                self.mappings.worker_lost(worker)
            case WorkerExited(worker):
                self.mappings.worker_exited(worker)
            case SessionReleased(worker, session):
                if not self.mappings.session_released(worker, session):
                    return
        if not self.disks.take(stimulus):
            self.post(stimulus)

    # --- the life of the daemon ---

    async def run_ticks(self) -> None:
        """Ticks until it is cancelled, or the daemon is poisoned."""
        loop = asyncio.get_running_loop()
        ticks = 0
        while not self.poisoned.is_set():
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self._observe_lag(max(0.0, loop.time() - due))
            self.post(Tick())
            ticks += 1
            if ticks % QUARANTINE_RETRY_TICKS == 0:
                self._retry_quarantine()

    def _retry_quarantine(self) -> None:
        try:
            proven = self._pool.retry_quarantine()
        except OSError as error:  # /proc cannot be read, for want of descriptors for example: next time
            log.warning("whether writers of quarantined slots are gone cannot be told", error=str(error))
            return
        if len(proven):
            log.info("writers of quarantined slots are gone", slots=len(proven))
            self.post(SlotsProven(proven))

    def drain(self) -> None:
        """Refuses new sessions, stores and loads from now on, and lookups miss; what runs goes on."""
        if not self._draining:
            self._draining = True
            self.post(Drain())

    def resume(self) -> None:
        """Takes `drain` back."""
        if self._draining:
            self._draining = False
            self.post(Resume())

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._draining

    @property
    def transfers_active(self) -> int:
        return self._machine.status().transfers_active

    @property
    def is_under_way(self) -> bool:
        """Whether a transfer is active, or blocks are on their way from a disk to the host."""
        core = self._machine.status()
        return core.transfers_active > 0 or any(disk.reading_bytes for disk in core.disks)

    def scrub(self) -> list[str]:
        """Has every block on the disks compared with its checksum; returns the paths of those disks where
        that has begun. Raises Refusal if there are no disks."""
        if not len(self.disks):
            raise Refusal(
                Reason.MODE_UNSUPPORTED,
                "there is no disk tier: set disk.paths, and start the daemon again",
                field="disk.paths",
                value="",
            )
        begun = []
        for disk, status in zip(self.disks, self._machine.status().disks, strict=True):
            if status.state == "live" and not status.scrubbing:
                self.handle(StartScrub(disk.number))
                begun.append(str(disk.path))
        return begun

    async def clear(self, namespace: str, timeout_s: float) -> Cleared:
        """Drops the blocks of the one namespace whose digest begins so, of all if it is empty, as
        `ClearBlocks` says; waits for disks to keep that, `timeout_s` at most. Raises Refusal."""
        if self.poisoned.is_set():
            raise _stopping()
        return await self._clearing.clear(namespace, timeout_s)

    def explain(self, key: bytes, namespace: str, group: int | None) -> Explained:
        """Why a block can be read or not; `namespace` is how its digest begins. Raises Refusal."""
        if self.poisoned.is_set():
            raise _stopping()
        return self._machine.explain(key, namespace, group)

    def namespaces(self) -> tuple[PlaceStatus, ...]:
        """What there is of each namespace."""
        return self._machine.namespaces()

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_at_s

    @property
    def boot_nonce(self) -> int:
        return self._pool.boot_nonce

    @property
    def pool_bytes(self) -> int:
        """Of the host tier."""
        return self._pool.geometry.capacity_bytes

    def snapshot(self) -> Snapshot:
        """A picture of everything, for people and metrics. Costs about as much as a few lookups."""
        now = self._clock()
        start = self._pool.start
        core = self._machine.status()
        mapped = {worker.worker: worker.mapped_bytes for worker in core.workers}
        return Snapshot(
            state="draining" if self._draining or self.poisoned.is_set() else "serving",
            now_s=now,
            uptime_s=self.uptime_s,
            boot_nonce=self._pool.boot_nonce,
            pool=PoolSnapshot(
                path=str(self._pool_path or ""),
                size_bytes=self._pool.size_bytes,
                file_bytes=len(self._pool.array),
                capacity_bytes=self._pool.geometry.capacity_bytes,
                warm=start.warm,
                cold_reason=start.cold_reason,
                recovered_blocks=start.recovered_blocks,
                recovered_bytes=start.recovered_bytes,
                quarantined_slots=self._pool.quarantined_slots,
                discarded_slots=start.discarded_slots,
                recovery_s=start.seconds,
            ),
            core=core,
            sessions={session: known.about for session, known in self._sessions.items()},
            devices=tuple(
                DeviceSnapshot(device.name, device.idle, device.respawns)
                for device in self._workers.devices
                if device.is_known
            ),
            disks=tuple(map(self._disk_snapshot, self.disks, core.disks)),
            workers=tuple(
                WorkerSnapshot(
                    w.device,
                    w.pid,
                    w.state.value,
                    w.respawns,
                    w.parts_active,
                    mapped_bytes=mapped.get(w.worker, 0),
                    registered_bytes=self._workers.registered_bytes(w.worker),
                    remote_bytes=self._workers.remote_bytes(w.worker),
                )
                for w in self._workers.workers.values()
            ),
            copies={
                direction.name.lower(): CopySnapshot(
                    total.copied_bytes, total.copy_ns / 1e9, dict(total.outcomes)
                )
                for direction, total in self._workers.totals.items()
            },
        )

    def _disk_snapshot(self, disk: DiskFile, core: DiskStatus) -> DiskSnapshot:
        device, start = self._workers.devices[disk.device], disk.start
        # Of one that was never live the core knows nothing.
        state = "off" if core.state == "starting" and device.why else core.state
        return DiskSnapshot(
            path=str(disk.path),
            capacity_bytes=disk.image.geometry.capacity_bytes,
            state=state,
            why="" if state == "live" else device.why or core.why,
            cold_reason=start.cold_reason if start else "",
            direct_io=start is not None and start.direct_io,
            recovered_blocks=start.blocks if start else 0,
            recovered_bytes=start.data_bytes if start else 0,
            recovery_s=start.seconds if start else 0.0,
            core=core,
        )


def _stopping() -> Refusal:
    return Refusal(
        Reason.INTERNAL, "the daemon met an internal error and is stopping; attach again when it is back"
    )
