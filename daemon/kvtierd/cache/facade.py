"""The façade, which alone performs what the core decides. Everything here runs on the event loop."""

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
"""Gets a session's events, in order and inside `handle`. It queues them, and calls nothing here except
`post`."""

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class _Session:
    listener: Listener
    about: SessionAbout
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
        limits: CoreLimits,
        *,
        disks: Sequence[DiskFile] = (),
        pool_path: Path | None,
        clock: Callable[[], float] = time.monotonic,
        observe_lag: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`observe_lag` is called with every tick, with the number of seconds by which the event loop was
        late."""
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
        """Set after an internal error: nothing is handled any more, and the daemon has to be started
        again."""

    # --- deciding and doing ---

    def handle(self, stimulus: Stimulus) -> Reply:
        """Decides and performs, completely, before it returns. Raises Refusal, and then nothing has changed.

        Any other exception is a bug or a broken pool, and poisons the daemon.
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
        """Attaches a session. From then on `listener` gets its events. Raises Refusal."""
        reply = self.handle(stimulus)
        assert isinstance(reply, Attached)
        self._sessions[stimulus.session] = _Session(listener, about, reply.epoch)
        return reply

    def end_session(self, session: SessionId, why: str) -> None:
        """Ends a session if it is attached. Its listener gets no more events."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        self.mappings.session_ended(session)
        self._waiters.epoch_ended(known.epoch, Refusal(Reason.EPOCH_ENDED, f"a session has ended: {why}"))
        self.post(EndSession(session, why))

    async def wait(
        self, session: SessionId, epoch: Epoch, tickets: Sequence[Ticket], timeout_s: float
    ) -> list[TransferEnded | None]:
        """Waits until all these transfers have ended, at most `timeout_s`. None for those that have not.
        Raises Refusal."""
        return await self._waiters.wait(
            epoch, tickets, timeout_s, lambda ticket: self._machine.transfer(session, epoch, ticket)
        )

    # --- copy workers ---

    def worker_event(self, stimulus: WorkerStimulus) -> None:
        """Takes what the supervisor reports about a worker."""
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
        except OSError as error:  # for example no descriptor is left to read /proc; the next try may work
            log.warning("whether writers of quarantined slots are gone cannot be told", error=str(error))
            return
        if len(proven):
            log.info("writers of quarantined slots are gone", slots=len(proven))
            self.post(SlotsProven(proven))

    def drain(self) -> None:
        """From now on new sessions, stores and loads are refused, and lookups return misses. Running
        transfers go on."""
        if not self._draining:
            self._draining = True
            self.post(Drain())

    def resume(self) -> None:
        """Ends what `drain` began."""
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
        """Whether a transfer is active, or blocks are being read from a disk to the host."""
        core = self._machine.status()
        return core.transfers_active > 0 or any(disk.reading_bytes for disk in core.disks)

    def scrub(self) -> list[str]:
        """Has every block on the disks compared with its checksum. Returns the paths of the disks where that
        has begun. Raises Refusal if there are no disks."""
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
        """Drops the blocks of the one namespace whose digest begins with `namespace`, or all blocks if it is
        empty, as `ClearBlocks` says. Waits at most `timeout_s` for the disks' files to follow. Raises
        Refusal."""
        if self.poisoned.is_set():
            raise _stopping()
        return await self._clearing.clear(namespace, timeout_s)

    def explain(self, key: bytes, namespace: str, group: int | None) -> Explained:
        """Why a block can be read or not, in namespaces whose digest begins with `namespace`. Raises
        Refusal."""
        if self.poisoned.is_set():
            raise _stopping()
        return self._machine.explain(key, namespace, group)

    def namespaces(self) -> tuple[PlaceStatus, ...]:
        """How many blocks there are of each namespace, and who uses it."""
        return self._machine.namespaces()

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._started_at_s

    @property
    def boot_nonce(self) -> int:
        return self._pool.boot_nonce

    @property
    def pool_bytes(self) -> int:
        """Bytes that the host tier can hold."""
        return self._pool.geometry.capacity_bytes

    def snapshot(self) -> Snapshot:
        """A picture of everything, for people and metrics. It costs about as much as a few lookups."""
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
        # The core knows nothing about a disk that was never live.
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
