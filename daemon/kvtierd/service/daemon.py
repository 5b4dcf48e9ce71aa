"""The daemon: what is built around the workers and the pool, how it serves, and how it is taken down."""

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from kvtier_kernels import CAPACITY_MAX, BlockTable
from prometheus_client import CollectorRegistry

from kvtierd import logs
from kvtierd.cache import Cache, DiskFile, LearntFile, Teller, grow, run_ticks
from kvtierd.cli.interrupts import Noted
from kvtierd.config.daemon import Config, Loaded
from kvtierd.config.reload import Reloaded, compare
from kvtierd.config.settings import ConfigError
from kvtierd.core.blocks.namespaces import tag_of
from kvtierd.core.blocks.slots import PoolGeometry
from kvtierd.core.errors import Reason, Refusal
from kvtierd.core.ids import PAGE_BYTES, DiskId, TenantTag
from kvtierd.core.machine import Machine
from kvtierd.core.stimuli import CoreDisks, PoolPolicy, Reconfigure, Stimulus
from kvtierd.logs import logger
from kvtierd.metrics import Metrics, MetricsServer
from kvtierd.rpc.connections import Connections
from kvtierd.rpc.remote import RemoteCalls, RemoteServer
from kvtierd.rpc.server import RpcServer
from kvtierd.rpc.side import SideServer
from kvtierd.rpc.status import AboutDaemon
from kvtierd.service.greeting import command_line, greet, version
from kvtierd.service.manager import ServiceManager
from kvtierd.service.notify import EXTENSION_S, Notifier
from kvtierd.service.opening import Opened, writable_tenants
from kvtierd.service.steady import SteadyClock
from kvtierd.workers.supervisor.supervisor import Supervisor

EXIT_INTERNAL = 70
"""The exit status after an internal error (sysexits.h EX_SOFTWARE). A new start will be warm."""
EPOCH_BITS = 20
DRAIN_POLL_S = 0.05
SILENCE_CHECK_S = 0.5
STREAMS_GRACE_S = 2.0
WORKERS_GRACE_S = 5.0
END_S = 30.0
"""More than everything takes that follows the transfers: ending streams and workers, and killing some."""
log = logger(__name__)


def first_epoch(boot_nonce: int) -> int:
    """The first epoch of this boot: the upper 40 bits of its nonce, followed by a counter with room for a
    million epochs."""
    return (boot_nonce >> 24 << EPOCH_BITS) + 1


def disk_files(config: Config, opened: Opened) -> list[DiskFile]:
    """The disks in the order of the configuration, and behind them the store, if there is one."""
    encrypted, paths = config.disk.encryption_keys is not None, config.disk.paths
    files = []
    for number, image in enumerate(opened.images):
        if number < len(paths):
            place = str(paths[number])
            files.append(DiskFile(DiskId(number), place, image, encrypted, opened.writable))
        else:
            files.append(DiskFile(DiskId(number), config.store.url, image, shared=True))
    return files


def disk_policy(config: Config) -> CoreDisks:
    """The policy of the disks."""
    return replace(config.disk.to_core(), tenants=writable_tenants(config) if config.disk.paths else None)


def _shelf(disk: DiskFile) -> tuple[BlockTable, PoolGeometry]:
    """What the core is told of a disk or of the store."""
    return _block_table(disk.image.geometry, disk.image.bytes), disk.image.geometry


@dataclass(frozen=True, slots=True)
class _Serving:
    """The parts of a daemon that serves."""

    cache: Cache
    workers: Supervisor
    connections: Connections
    rpc: RpcServer
    remote: RemoteServer | None
    side: SideServer
    manager: ServiceManager
    metrics: Metrics


class Daemon:
    """One run of the daemon on an event loop."""

    def __init__(
        self,
        loaded: Loaded,
        read_again: Callable[[], Config],
        early: Noted,
        notifier: Notifier,
        opened: Opened,
        workers: Supervisor,
        starting: "asyncio.Task[None]",
        stack: AsyncExitStack,
    ) -> None:
        """Takes over what was found in the pool. `workers` are `starting` already, and from now on report to
        `worker_event`; `stack` ends them. `read_again` reads the configuration as it is now. Raises
        ConfigError."""
        self._config = loaded.config
        self._shares = opened.shares
        self._may_move_metrics = loaded.may_move_metrics
        self._read_again = read_again
        self._early = early
        self._notifier = notifier
        self._sockets = opened.sockets
        self._pool = opened.pool
        self._disks = disk_files(loaded.config, opened)
        self._rules = opened.rules
        self._learnt = LearntFile(loaded.config.pool.file)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._clock = SteadyClock()
        self._workers = workers
        self._starting = starting
        self._cache = self._make_cache(self._make_teller(lambda stimulus: self._cache.post(stimulus), stack))
        self.worker_event = self._cache.worker_event
        """Takes what the supervisor reports."""
        stack.push_async_callback(workers.lives.stop, 0)
        stack.callback(starting.cancel)
        self._cache.handle(self._pool.recovered)
        self._learnt.restore(self._cache)

    async def run(self) -> int:
        """Serves until it is told to stop; returns the exit status. Raises StoppedEarly after an earlier
        signal."""
        loop = asyncio.get_running_loop()
        with self._early.told(lambda number: loop.call_soon_threadsafe(self._signalled, number)):
            self._early.check()
            async with AsyncExitStack() as stack:
                serving = await self._or_stopped(self._start(stack))
                await self._serve(serving)
                await serving.workers.lives.stop(WORKERS_GRACE_S)
                return EXIT_INTERNAL if serving.cache.poisoned.is_set() else 0

    async def _serve(self, serving: "_Serving") -> None:
        cache = serving.cache
        background = [
            asyncio.create_task(run_ticks(cache, self._pool, serving.metrics.observe_lag), name="ticks"),
            asyncio.create_task(self._end_silent(serving.connections), name="silence"),
            asyncio.create_task(serving.manager.run(), name="service manager"),
            asyncio.create_task(grow(cache, self._pool), name="memory of the pool"),
            asyncio.create_task(self._learnt.keep_saving(cache), name="what is learnt"),
        ]
        try:
            await self._until_told(cache, background)
            self._notifier.stopping("Stopping", self._config.server.drain_s + END_S)
            await self._wind_down(serving)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            self._learnt.save(cache)

    # --- starting ---

    async def _or_stopped(self, start: Coroutine[Any, Any, "_Serving"]) -> "_Serving":
        """Waits for a start. If a signal comes first, cancels the start and raises StoppedEarly."""
        starting = asyncio.create_task(start, name="start")
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                self._early.check()
            return await starting
        finally:
            for task in (starting, stopped):
                task.cancel()
            await asyncio.gather(starting, stopped, return_exceptions=True)

    def _make_cache(self, teller: Teller | None) -> Cache:
        config, pool, disks = self._config, self._pool, self._disks
        limits = config.limits.to_core()
        machine = Machine(
            _block_table(pool.geometry, len(pool.array)),
            self._clock,
            limits,
            pool.geometry,
            populated=pool.populated_extents,
            first_epoch=first_epoch(pool.boot_nonce),
            integrity=config.integrity.to_core(),
            randomness=np.random.default_rng(),
            disks=[_shelf(disk) for disk in disks if not disk.shared],
            disk_policy=disk_policy(config),
            store=next((_shelf(disk) for disk in disks if disk.shared), None),
            store_policy=config.store.to_core(),
            shares={each.tenant: each.share for each in config.server.tenant_shares},
            policy=PoolPolicy(config.pool.policy),
            told_of=_told_of(config),
        )
        return Cache(
            machine,
            pool,
            self._workers,
            limits,
            disks=disks,
            pool_path=config.pool.file,
            pages_max=self._shares.pages,
            teller=teller,
            clock=self._clock,
        )

    async def _start(self, stack: AsyncExitStack) -> "_Serving":
        """Starts everything else, up to the greeting. `stack` takes it down again."""
        config, cache, workers = self._config, self._cache, self._workers
        limits = config.limits.to_core()
        metrics = Metrics(CollectorRegistry(), version(), by_tenant=config.metrics.by_tenant)
        await self._starting
        if self._disks:
            starting_s = config.disk.start_deadline_s + EXTENSION_S
            self._notifier.starting("Reading what the disks hold", starting_s)
        await self._wait_for_disks(workers, cache)
        connections = Connections(
            cache,
            sessions_max=self._shares.sessions,
            hello_deadline_s=config.server.hello_deadline_s,
            silence_s=config.server.session_silence_s,
            shared=self._rules.gid is not None,
            clock=self._clock,
        )
        metrics_url = self._serve_metrics(metrics, cache, stack)
        about = AboutDaemon(version(), os.getpid(), str(self._sockets.grpc_path), metrics_url, command_line())
        rpc = RpcServer(
            cache,
            connections,
            limits,
            config.server,
            self._shares.connections,
            int(self._pool.geometry.capacity_bytes * config.limits.leased_fraction_max) // PAGE_BYTES,
            about,
            self._rules,
            metrics.observe_rpc,
            self._drained,
            lambda: self._reload(cache, workers, connections, manager),
        )
        manager = ServiceManager(self._notifier, cache.snapshot, workers.lives.unattended, rpc.set_live)
        remote = self._make_remote(cache, about, rpc)
        side = await self._listen(rpc, connections, cache, stack)
        if remote is not None:
            stack.push_async_callback(remote.stop, 0)
            await remote.start()
        port = 0 if remote is None else remote.port
        # What is there now stays, so no collection has to look at it again.
        gc.freeze()
        gc.enable()
        greet(config, self._sockets.grpc_path, metrics_url, port, self._pool.start, cache.snapshot())
        manager.ready()
        return _Serving(cache, workers, connections, rpc, remote, side, manager, metrics)

    def _make_remote(self, cache: Cache, about: AboutDaemon, rpc: RpcServer) -> RemoteServer | None:
        """The server for other hosts, its port bound, if there is to be one. Raises ConfigError."""
        remote, most = self._config.remote, self._config.limits.lookup_hashes_max
        if not remote.on:
            return None
        calls = RemoteCalls(cache, about, self._rules.tenants, most, insecure=remote.insecure)
        return RemoteServer(remote, calls, rpc.health)

    def _make_teller(self, post: Callable[[Stimulus], object], stack: AsyncExitStack) -> Teller | None:
        """What publishes KV events, if there is to be something. Raises ConfigError."""
        events = self._config.events
        if not events.on:
            return None
        import zmq

        from kvtierd.events.publisher import EventPublisher

        options = events.options(store=next((disk.number for disk in self._disks if disk.shared), None))
        try:
            publisher = EventPublisher(options, post, asyncio.get_running_loop())
        except zmq.ZMQError as error:
            names = "events.endpoint, events.replay_endpoint"
            values = f"{events.endpoint}, {events.replay_endpoint}"
            raise ConfigError(names, values, f"one of them cannot be bound: {error}") from error
        stack.push_async_callback(asyncio.to_thread, publisher.close)
        return publisher

    async def _wait_for_disks(self, workers: Supervisor, cache: Cache) -> None:
        """Waits for the disks, so that the first lookup can hit their blocks. A disk that takes too long
        joins later."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._config.disk.start_deadline_s
        await workers.lives.settle_disks(self._config.disk.start_deadline_s)
        await cache.disks.recovered(max(0.0, deadline_s - loop.time()))

    def _serve_metrics(self, metrics: Metrics, cache: Cache, stack: AsyncExitStack) -> str:
        """Starts the metrics endpoint; returns its URL, or an empty text if metrics are off. Raises
        ConfigError."""
        listen = self._config.metrics.listen
        if listen == "off":
            return ""
        metrics.watch(cache.snapshot, asyncio.get_running_loop())
        server = MetricsServer(listen, metrics.registry, may_move=self._may_move_metrics)
        # This runs on a thread, because a scrape that is under way may be waiting for this loop.
        stack.push_async_callback(asyncio.to_thread, server.close)
        return server.url

    async def _listen(
        self, rpc: RpcServer, connections: Connections, cache: Cache, stack: AsyncExitStack
    ) -> SideServer:
        with self._sockets.binding():
            rpc.bind(self._sockets.grpc_path)
        listener = self._sockets.bind_side()
        self._sockets.open_to_group()
        side = SideServer(listener, connections, cache, self._rules, self._shares.in_transit)
        stack.callback(side.close)
        stack.push_async_callback(rpc.stop, 0)
        await rpc.start()
        return side

    # --- running and stopping ---

    def _reload(
        self, cache: Cache, workers: Supervisor, connections: Connections, manager: ServiceManager
    ) -> Reloaded:
        """Reads the configuration again and takes over what can change. Raises ConfigError, and then nothing
        has changed."""
        self._notifier.reloading()
        try:
            found = compare(self._config, self._read_again())
            config = found.config
            if found.applied:
                rate = config.integrity.sample_bytes_per_s
                policy = PoolPolicy(config.pool.policy)
                self._learnt.save(cache)  # another policy forgets it
                ranked = cache.ranks
                cache.handle(Reconfigure(rate, disk_policy(config), policy, config.store.to_core()))
                if not ranked:
                    self._learnt.restore(cache)
                connections.silence_s = config.server.session_silence_s
                logs.set_level(config.log.level)
                workers.lives.set_log_level(config.log.level)
                self._config = config
        finally:
            manager.ready()
        for change in found.applied:
            log.info("a setting has changed", key=change.key, before=change.before, after=change.after)
        for change in found.needs_restart:
            log.warning(
                "a setting takes a restart to change (kvtierctl drain --for-restart)",
                key=change.key,
                in_force=change.before,
                configured=change.after,
            )
        return found

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            self._hurry.set()
        log.info(
            "stopping" if not self._hurry.is_set() else "stopping now", signal=signal.Signals(number).name
        )
        self._stop.set()

    def _drained(self) -> None:
        log.info("stopping: drained for a restart")
        self._stop.set()

    async def _until_told(self, cache: Cache, background: list[asyncio.Task[None]]) -> None:
        """Returns when the daemon is to stop. A background task that ends by itself is an internal error."""
        told = {asyncio.create_task(self._stop.wait()), asyncio.create_task(cache.poisoned.wait())}
        try:
            await asyncio.wait({*told, *background}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in told:
                waiting.cancel()
        for task in background:
            if task.done() and not cache.poisoned.is_set():
                error = task.exception() or RuntimeError("it ended")
                cache.poison(error, f"background task {task.get_name()}")

    async def _end_silent(self, connections: Connections) -> None:
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            connections.end_silent()

    async def _wind_down(self, serving: "_Serving") -> None:
        """Refuses anything new, lets transfers finish, and ends the sessions."""
        cache, rpc = serving.cache, serving.rpc
        await rpc.draining.stopping()
        if cache.poisoned.is_set():
            why = Refusal(Reason.INTERNAL, "the daemon met an internal error and is stopping")
        else:
            cache.drain()
            await self._transfers_over(cache)
            why = Refusal(Reason.DRAINING, "the daemon is stopping: attach again when it is back")
        serving.connections.end_all(why)
        if serving.remote is not None:
            await serving.remote.stop(0)
        await rpc.stop(STREAMS_GRACE_S)

    async def _transfers_over(self, cache: Cache) -> None:
        deadline_s = time.monotonic() + self._config.server.drain_s
        while active := cache.transfers_active:
            if self._hurry.is_set() or time.monotonic() >= deadline_s or cache.poisoned.is_set():
                log.warning(
                    "stopping with transfers still active: their clients see them fail", active=active
                )
                return
            await asyncio.sleep(DRAIN_POLL_S)


def _told_of(config: Config) -> Callable[[TenantTag], bool] | None:
    """Whose blocks are told of to routers; None if nobody's are."""
    events = config.events
    if not events.on:
        return None
    tags = frozenset(map(tag_of, events.tenants))
    return lambda tenant: events.everybody or tenant in tags


def _block_table(geometry: PoolGeometry, file_bytes: int) -> BlockTable:
    """A table with room for a block in every slot of the smallest size. Its memory is used only as blocks
    come."""
    slots = geometry.extents * geometry.slots_per_extent(PAGE_BYTES)
    return BlockTable(min(slots, CAPACITY_MAX), file_bytes // PAGE_BYTES)
