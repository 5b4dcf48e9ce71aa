"""What a service manager is told while the daemon runs: one line of status, and that it is alive."""

import asyncio
from collections.abc import Awaitable, Callable

from kvtierd.cache import CPU, Snapshot
from kvtierd.config.settings import human_size
from kvtierd.logs import logger
from kvtierd.service.notify import Notifier

STATUS_PERIOD_S = 5.0
PINGS_PER_DEADLINE = 3
"""How many pings are sent per deadline of the watchdog, so that a late one does not end the daemon."""

log = logger(__name__)


def status_line(snapshot: Snapshot) -> str:
    """The state of the daemon, in one line."""
    if snapshot.state == "draining":
        return f"Draining: {snapshot.core.transfers_active} transfers active, nothing new is taken"
    pool, core = snapshot.pool, snapshot.core
    engines = sum(instance.ready and not instance.fencing for instance in core.instances)
    used = f"{human_size(core.used_bytes)} of {human_size(pool.populated_bytes)} used"
    parts = [f"Serving {engines} engines, {core.blocks.ready} blocks, {used}"]
    if pool.populated_bytes < pool.capacity_bytes:
        share = pool.populated_bytes / pool.capacity_bytes
        usable = f"{share:.0%} of {human_size(pool.capacity_bytes)} usable"
        parts.append(f"{usable}, no memory for the rest: {pool.shortage}" if pool.shortage else usable)
    for worker in snapshot.workers:
        if worker.state == "live" and 0 < worker.registered_bytes < pool.capacity_bytes:
            share = worker.registered_bytes / pool.capacity_bytes
            parts.append(f"{share:.0%} of the pool registered with {worker.device}")
    parts += [
        f"the worker of {device.name} is being replaced"
        for device in snapshot.devices
        if (device.name == CPU or not device.idle)
        and not any(worker.device == device.name and worker.state == "live" for worker in snapshot.workers)
    ]
    parts += [f"{disk.path} is {disk.state}" for disk in snapshot.disks if disk.state != "live"]
    return "; ".join(parts)


class ServiceManager:
    """Tells the manager about a daemon that serves, from its event loop, as long as all workers are looked
    after."""

    def __init__(
        self,
        notifier: Notifier,
        snapshot: Callable[[], Snapshot],
        unattended: Callable[[], list[str]],
        tell_live: Callable[[bool], Awaitable[None]],
    ) -> None:
        """`unattended()` returns which workers nobody looks after, one sentence for each. `tell_live` answers
        health checks."""
        self._notifier = notifier
        self._snapshot = snapshot
        self._unattended = unattended
        self._tell_live = tell_live
        self._doubts: list[str] = []
        self._said = ""

    def ready(self) -> None:
        """Tells the manager that the daemon serves, with the configuration as it is now."""
        self._said = status_line(self._snapshot())
        self._notifier.ready(self._said)

    async def run(self) -> None:
        """Runs until it is cancelled.

        A worker that hangs, is killed or is being replaced is looked after, and no reason to be silent: the
        daemon ends it itself, and other workers go on. A daemon that has lost sight of a worker is such a
        reason.
        """
        watchdog_s = self._notifier.watchdog_s
        period_s = min(STATUS_PERIOD_S, watchdog_s / PINGS_PER_DEADLINE) if watchdog_s else STATUS_PERIOD_S
        while True:
            await asyncio.sleep(period_s)
            doubts = self._unattended()
            if doubts and doubts != self._doubts:
                log.critical(
                    "workers are not looked after: the service manager is not told to go on", why=doubts
                )
            if bool(doubts) != bool(self._doubts):
                await self._tell_live(not doubts)
            self._doubts = doubts
            if watchdog_s and not doubts:
                self._notifier.alive()
            if self._notifier.is_heard and (line := status_line(self._snapshot())) != self._said:
                self._said = line
                self._notifier.status(line)
