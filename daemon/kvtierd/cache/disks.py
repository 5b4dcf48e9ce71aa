"""The disks behind the façade: their images, what was found on them, and when the core is told."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.ids import DiskId, TenantTag, WorkerId
from kvtierd.core.stimuli import DiskRecovered, Stimulus, WorkerExited, WorkerLive
from kvtierd.logs import logger
from kvtierd.tiers.disk.image import DiskImage
from kvtierd.tiers.disk.keys import file_of_tenant
from kvtierd.workers.supervisor.kinds import disk_device
from kvtierd.workers.supervisor.supervisor import Supervisor, WorkerStimulus

KEYLESS_MAX = 1_000
"""Of so many tenants it is said that they have no key."""
log = logger(__name__)


@dataclass(frozen=True, slots=True)
class DiskStart:
    """What the first worker of a disk found, for people."""

    cold_reason: str
    """Why nothing of an earlier daemon was kept; empty if something was."""
    direct_io: bool
    blocks: int
    data_bytes: int
    seconds: float
    """Time to keep or free every record, without the time for reading them, which the worker does."""


@dataclass(slots=True, eq=False)
class DiskFile:
    """One disk of the disk tier. Only `DiskFiles` changes it."""

    number: DiskId
    place: str
    """The directory, or the URL of a store."""
    image: DiskImage
    encrypted: bool = False
    writable: frozenset[TenantTag] | None = None
    """The tenants for whose blocks there is a key; None for all."""
    shared: bool = False
    """Whether it is the store."""
    start: DiskStart | None = None
    """None until its first worker is live and the records are read."""
    held: list[WorkerStimulus] | None = None
    """What its workers report while the records are read, in order; None while they are not being read."""
    known: set[WorkerId] = field(default_factory=set)
    """Those of its workers that the core knows about and whose processes may still run."""

    @property
    def device(self) -> str:
        return disk_device(self.number)


class DiskFiles:
    """Recovers each disk in a thread when its first worker is live. Until then the core does not know about
    it, and what its workers report meanwhile is told afterwards, in order."""

    def __init__(
        self,
        disks: Sequence[DiskFile],
        workers: Supervisor,
        boot_nonce: int,
        post: Callable[[Stimulus], None],
    ) -> None:
        """`post` tells the core."""
        self._disks = tuple(disks)
        self._by_device = {disk.device: disk for disk in disks}
        self._workers = workers
        self._boot_nonce = boot_nonce
        self._post = post
        self._tasks: set[asyncio.Task[None]] = set()
        self._keyless: set[TenantTag] = set()
        """Tenants of which it has been said that they have no key."""

    def __getitem__(self, number: DiskId) -> DiskFile:
        return self._disks[number]

    def __iter__(self) -> Iterator[DiskFile]:
        """Disks in the order of the configuration, and after them the store."""
        return iter(self._disks)

    def __len__(self) -> int:
        return len(self._disks)

    def attached(self, tenant: str) -> None:
        """A session of a tenant is attached. Says once if its blocks are not written, for want of a key."""
        tag = tag_of(tenant)
        keyless = any(disk.writable is not None and tag not in disk.writable for disk in self._disks)
        if keyless and tag not in self._keyless and len(self._keyless) < KEYLESS_MAX:
            self._keyless.add(tag)
            log.warning(
                "blocks of a tenant are not written to disks, because there is no key for it, and no default",
                tenant=tenant,
                remedy=f"make {file_of_tenant(tenant)} in disk.encryption_keys, and restart the daemon",
            )

    def take(self, stimulus: WorkerStimulus) -> bool:
        """Takes what a disk's worker reports, and tells the core in due time. False if the worker is not a
        disk's."""
        handle = self._workers.workers[stimulus.worker]
        disk = self._by_device.get(handle.device)
        if disk is None:
            return False
        if disk.held is not None:
            disk.held.append(stimulus)
        elif disk.start is None and isinstance(stimulus, WorkerLive):
            disk.held = [stimulus]
            task = asyncio.create_task(self._recover(disk, handle.cold_reason, handle.direct_io))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._tell(disk, stimulus)
        return True

    def _tell(self, disk: DiskFile, stimulus: WorkerStimulus) -> None:
        worker = stimulus.worker
        if isinstance(stimulus, WorkerLive):
            disk.known.add(worker)
        elif worker not in disk.known:
            return  # its records could not be read, so the core does not know about it
        elif isinstance(stimulus, WorkerExited):
            disk.known.discard(worker)
        self._post(stimulus)

    async def _recover(self, disk: DiskFile, cold_reason: str, direct_io: bool) -> None:
        began_s = time.monotonic()
        try:
            found = await asyncio.to_thread(disk.image.recover, self._boot_nonce)
        except Exception as error:
            # Whatever is in the file, the loss must not go beyond this disk.
            log.error("a disk's records cannot be read", path=disk.place, error=repr(error), exc_info=error)
            disk.held = None
            self._workers.lives.reject(disk.device, f"its records cannot be read: {error}")
            return
        disk.start = DiskStart(
            cold_reason, direct_io, found.blocks, found.data_bytes, time.monotonic() - began_s
        )
        held, disk.held = disk.held or [], None
        first, *later = held
        self._tell(disk, first)
        self._post(DiskRecovered(disk.number, found.recovered))
        for stimulus in later:
            self._tell(disk, stimulus)
        if disk.shared:
            log.info("store is looked through", url=disk.place)
            return
        log.info(
            "disk starts cold" if cold_reason else "disk starts warm",
            path=disk.place,
            why=cold_reason,
            blocks=found.blocks,
            bytes=found.data_bytes,
            discarded_slots=found.discarded,
            direct_io=direct_io,
            seconds=round(disk.start.seconds, 3),
        )

    async def recovered(self, timeout_s: float) -> None:
        """Returns when the core knows what is on every disk whose first worker is live, or after
        `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
