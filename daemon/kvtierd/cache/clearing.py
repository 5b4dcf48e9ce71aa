"""Admin.Clear behind the façade: blocks are dropped in batches, so that engines are served in between, and
then the disks' files follow."""

import asyncio
import operator
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Protocol

from kvtierd.cache.disks import DiskFile, DiskFiles
from kvtierd.core.actions import ClearReply, Reply
from kvtierd.core.ids import Hashes, SpaceId
from kvtierd.core.stimuli import ClearBlocks
from kvtierd.logs import logger
from kvtierd.workers.supervisor.supervisor import Supervisor

BATCH = 4_096
"""Blocks dropped at once, which takes a millisecond or two, like a large lookup."""
RETRY_S = 1.0

log = logger(__name__)


class ClearableCore(Protocol):
    """The part of the core that is used here."""

    def clearable(self, namespace: str) -> tuple[SpaceId, ...]: ...

    def keys(self, space: SpaceId) -> Hashes: ...


@dataclass(frozen=True, slots=True)
class Cleared:
    blocks: ClearReply
    """The sum over all batches."""
    unsettled: tuple[str, ...]
    """Paths of disks that may bring blocks back after a restart."""


class Clearing:
    """Clears blocks for any number of callers at once."""

    def __init__(
        self,
        core: ClearableCore,
        handle: Callable[[ClearBlocks], Reply],
        disks: DiskFiles,
        workers: Supervisor,
    ) -> None:
        self._core = core
        self._handle = handle
        self._disks = disks
        self._workers = workers
        self._settling: dict[str, _Disk] = {}
        """By the device name of a disk."""

    async def clear(self, namespace: str, timeout_s: float) -> Cleared:
        """Drops the blocks that a namespace, or all of them, have now. Returns when every disk's file says
        so, or after `timeout_s`. Raises Refusal; if it is NAMESPACE_INVALID, nothing has changed."""
        blocks = ClearReply(0, 0, 0, 0, 0)
        for space in self._core.clearable(namespace):
            keys = self._core.keys(space)
            for first in range(0, len(keys), BATCH):
                reply = self._handle(ClearBlocks(space, keys[first : first + BATCH]))
                assert isinstance(reply, ClearReply)
                blocks = ClearReply(*map(operator.add, astuple(blocks), astuple(reply)))
                await asyncio.sleep(0)
        log.info(
            "cleared",
            namespace=namespace or "all",
            blocks=blocks.cleared_blocks,
            held=blocks.held_blocks,
            under_way=blocks.under_way_blocks,
        )
        return Cleared(blocks, await self._settle(timeout_s))

    async def _settle(self, timeout_s: float) -> tuple[str, ...]:
        """Has all disks' files brought up to date. Even if nothing was dropped just now, a file may still
        have blocks that were evicted. Returns the paths of those that are not up to date in time."""
        late: set[asyncio.Task[None]] = set()
        waits = {
            disk: asyncio.create_task(
                self._settling.setdefault(disk.device, _Disk(disk, self._workers)).settled()
            )
            for disk in self._disks
            if disk.start is not None
        }
        if waits:
            _, late = await asyncio.wait(waits.values(), timeout=timeout_s)
            for wait in late:
                wait.cancel()
        settled = {disk for disk, wait in waits.items() if wait not in late}
        return tuple(disk.place for disk in self._disks if disk not in settled)


class _Disk:
    """Brings one disk's file up to date with its image whenever somebody asks, and tries until it has
    worked."""

    def __init__(self, disk: DiskFile, workers: Supervisor) -> None:
        self._disk = disk
        self._workers = workers
        self._wanted = 0
        self._done = 0
        """How many of those who asked have been answered, in the order in which they asked."""
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def settled(self) -> None:
        """Returns when the file says what the image says now. If the caller is cancelled, it is done all the
        same."""
        self._wanted += 1
        mine = self._wanted
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name=f"settle {self._disk.device}")
        async with self._changed:
            await self._changed.wait_for(lambda: self._done >= mine)

    async def _run(self) -> None:
        warned = False
        while self._done < self._wanted:
            asked = self._wanted
            why = await self._workers.orders.persist_all(self._disk.device)
            if why:  # a worker that is lost has a successor
                if not warned:
                    log.warning("a disk cannot keep yet what was cleared", path=self._disk.place, why=why)
                warned = True
                await asyncio.sleep(RETRY_S)
                continue
            self._done = asked
            async with self._changed:
                self._changed.notify_all()
