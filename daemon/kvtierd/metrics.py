"""Prometheus metrics: what is counted as it happens, and what a scrape reads from a snapshot of the cache.

Served from threads of their own: a scrape costs milliseconds of Python that the event loop must not spend.
"""

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvtierd.cache import CPU, DiskSnapshot, Snapshot
from kvtierd.settings import ConfigError

SNAPSHOT_DEADLINE_S = 2.0
"""For the event loop to take a snapshot; after it a scrape shows the last one, and its age."""
SCRAPES_MAX = 16
"""At once. One more ends the oldest: whoever is slow gives way, so that nobody can use up the threads and
descriptors that the cache needs; the endpoint is open to every user of the host."""
SCRAPE_SILENCE_S = 10.0
ACCEPT_RETRY_S = 0.2
RPC_BUCKETS_S = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.25, 1.0)
LAG_BUCKETS_S = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 5.0)
RPCS = ("lookup", "touch", "prefetch", "store", "load", "release", "cancel", "heartbeat")
TIER = "host"
DISK_PREFIX = "disk-"
"""How the device names of disks begin."""
DISK_STATES = ("starting", "live", "off", "failing")


class Metrics:
    """All metrics of the daemon, in one registry."""

    def __init__(self, registry: CollectorRegistry, version: str) -> None:
        """Registers everything in `registry`; label values are a closed set."""
        self.registry = registry
        self._rpc_seconds = Histogram(
            "kvtier_rpc_seconds",
            "Time from a decoded request to its reply, by call; Wait and Attach are left out.",
            ["rpc"],
            buckets=RPC_BUCKETS_S,
            registry=registry,
        )
        self._by_rpc = {rpc: self._rpc_seconds.labels(rpc) for rpc in RPCS}
        self._loop_lag = Histogram(
            "kvtier_event_loop_lag_seconds",
            "How late the event loop was at each tick of 100 ms.",
            buckets=LAG_BUCKETS_S,
            registry=registry,
        )
        ProcessCollector(registry=registry)
        self._version = version

    def observe_rpc(self, rpc: str, seconds: float) -> None:
        if (histogram := self._by_rpc.get(rpc)) is not None:
            histogram.observe(seconds)

    def observe_lag(self, seconds: float) -> None:
        self._loop_lag.observe(seconds)

    def watch(self, snapshot: Callable[[], Snapshot], loop: asyncio.AbstractEventLoop) -> None:
        """From now on a scrape shows `snapshot()`, called on `loop`."""
        self.registry.register(_SnapshotCollector(snapshot, loop, self._version))


class _SnapshotCollector(Collector):
    """Asks the event loop for a snapshot, and waits for it no longer than a deadline."""

    def __init__(
        self, snapshot: Callable[[], Snapshot], loop: asyncio.AbstractEventLoop, version: str
    ) -> None:
        self._snapshot = snapshot
        self._loop = loop
        self._version = version
        self._last = snapshot()
        self._fresh = True

    def describe(self) -> list[Metric]:
        return []  # registering must not scrape

    def collect(self) -> Iterator[Metric]:
        answer: concurrent.futures.Future[Snapshot] = concurrent.futures.Future()

        def take() -> None:
            try:
                answer.set_result(self._snapshot())
            except Exception as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(take)
            self._last = answer.result(SNAPSHOT_DEADLINE_S)
            fresh = True
        except (TimeoutError, RuntimeError):  # the loop is stuck, or closed
            fresh = False
        yield _gauge("kvtier_snapshot_fresh", "0 if the event loop did not answer this scrape.", fresh)
        yield from families(self._last, self._version)


def families(snapshot: Snapshot, version: str) -> Iterator[Metric]:
    """A snapshot as Prometheus sees it."""
    yield from _daemon(snapshot, version)
    yield from _pool(snapshot)
    yield from _traffic(snapshot)
    yield from _clients(snapshot)
    yield from _workers(snapshot)
    if snapshot.disks:
        yield from _disks(snapshot)


def _daemon(snapshot: Snapshot, version: str) -> Iterator[Metric]:
    info = GaugeMetricFamily("kvtier_build_info", "1, with the daemon's version.", labels=["version"])
    info.add_metric([version], 1)
    yield info
    yield _gauge("kvtier_uptime_seconds", "Since the daemon started.", snapshot.uptime_s)
    yield _gauge("kvtier_draining", "1 while nothing new is accepted.", snapshot.state == "draining")


def _pool(snapshot: Snapshot) -> Iterator[Metric]:
    pool, core = snapshot.pool, snapshot.core
    free_bytes = pool.capacity_bytes - core.used_bytes
    yield _gauges(
        "kvtier_pool_bytes",
        "Bytes of the host pool, by whether they are in slots that hold a block.",
        "state",
        {"used": core.used_bytes, "free": free_bytes},
    )
    yield _gauges(
        "kvtier_pool_extents",
        "Extents of the host pool, by whether they are assigned to a slot size.",
        "state",
        {"assigned": core.extents - core.extents_free, "free": core.extents_free},
    )
    yield _gauges(
        "kvtier_blocks",
        "Blocks in the host tier.",
        "state",
        {"writing": core.blocks.writing, "ready": core.blocks.ready, "evicting": core.blocks.evicting},
    )
    yield _gauge("kvtier_blocks_max", "Blocks the block table has room for.", core.blocks.capacity)
    yield _gauge("kvtier_start_warm", "1 if the daemon started on a pool it could use.", pool.warm)
    yield _gauge("kvtier_recovered_blocks", "Blocks found in the pool at start.", pool.recovered_blocks)
    yield _gauge("kvtier_recovered_bytes", "Their bytes.", pool.recovered_bytes)
    yield _gauge("kvtier_recovery_seconds", "Time it took to open the pool.", pool.recovery_s)
    yield _gauge(
        "kvtier_quarantined_slots",
        "Slots whose writer from before the start is not proved gone.",
        pool.quarantined_slots,
    )
    yield _gauge(
        "kvtier_corrupt_slots",
        "Slots set aside because they have failed a check; they come back with a cold start.",
        core.corrupt_slots,
    )
    yield _gauge(
        "kvtier_discarded_slots",
        "Slots refused at start: bad checksum, missing shards.",
        pool.discarded_slots,
    )


def _traffic(snapshot: Snapshot) -> Iterator[Metric]:
    counters = snapshot.core.counters
    yield _counter("kvtier_lookups", "Lookups answered.", counters.lookups)
    yield _counter(
        "kvtier_index_lookups",
        "Lookups, all misses, that clients answered themselves from the index page.",
        counters.index_lookups,
    )
    yield _counter("kvtier_lookup_hashes", "Block hashes asked for in lookups.", counters.lookup_hashes)
    yield _by_tier("kvtier_lookup_hits", "Block hashes found readable by lookups.", counters.lookup_hits)
    yield _by_tier("kvtier_store_blocks", "Blocks stored and committed.", counters.stored_blocks)
    yield _by_tier("kvtier_store_bytes", "Bytes of blocks stored and committed.", counters.stored_bytes)
    yield _by_tier("kvtier_load_blocks", "Blocks loaded into engines.", counters.loaded_blocks)
    yield _by_tier("kvtier_load_bytes", "Bytes of blocks loaded into engines.", counters.loaded_bytes)
    yield _counter(
        "kvtier_store_deduplicated_blocks", "Blocks not stored: there already.", counters.deduplicated_blocks
    )
    yield _counter("kvtier_store_throttled_blocks", "Blocks not stored: no room.", counters.throttled_blocks)
    yield _by_tier("kvtier_evicted_blocks", "Blocks dropped to make room.", counters.evicted_blocks)
    yield _counter(
        "kvtier_extents_reclaimed",
        "Extents taken from one slot size for another.",
        counters.reclaimed_extents,
    )
    transfers = CounterMetricFamily("kvtier_transfers", "Transfers that ended, by how.", labels=["state"])
    transfers.add_metric(["done"], counters.done_transfers)
    transfers.add_metric(["failed"], counters.failed_transfers)
    transfers.add_metric(["cancelled"], counters.cancelled_transfers)
    yield transfers
    failures = CounterMetricFamily(
        "kvtier_integrity_failures",
        "Blocks whose record or checksum did not match, by when that was found: before a load, before the "
        "first load after a restart, by sampling, or when a disk read them. Never served after that.",
        labels=["tier", "found_by"],
    )
    failures.add_metric([TIER, "load"], counters.corrupt_on_load)
    failures.add_metric([TIER, "restart"], counters.corrupt_after_restart)
    failures.add_metric([TIER, "sample"], counters.corrupt_in_sample)
    if snapshot.disks:
        failures.add_metric(["disk", "read"], counters.corrupt_on_disk)
    yield failures
    yield _counter(
        "kvtier_sampled_bytes", "Bytes of the host pool that sampling has compared.", counters.sampled_bytes
    )
    yield _gauge("kvtier_transfers_active", "Transfers not terminal yet.", snapshot.core.transfers_active)


def _clients(snapshot: Snapshot) -> Iterator[Metric]:
    core = snapshot.core
    ending = sum(instance.fencing for instance in core.instances)
    ready = sum(instance.ready and not instance.fencing for instance in core.instances)
    yield _gauges(
        "kvtier_instances",
        "Engine instances: all ranks registered, some missing, or ended and not unmapped yet.",
        "state",
        {"ready": ready, "incomplete": len(core.instances) - ready - ending, "ending": ending},
    )
    yield _gauge("kvtier_sessions", "Sessions attached.", len(snapshot.sessions))
    yield _gauge(
        "kvtier_client_mapped_bytes",
        "Bytes of engines' memory mapped by copy workers.",
        sum(instance.mapped_bytes for instance in core.instances),
    )
    yield _gauge("kvtier_leases", "Leases held by clients.", core.leases)
    yield _gauge("kvtier_leased_blocks", "Blocks held by leases.", core.leased_blocks)
    yield _counter("kvtier_leases_expired", "Leases that ran out.", core.counters.expired_leases)
    yield _counter(
        "kvtier_leases_refused",
        "Leases that blocks hit for and a limit refused.",
        core.counters.refused_leases,
    )
    yield _counter("kvtier_epochs_ended", "Engine instances that ended.", core.counters.ended_epochs)


def _workers(snapshot: Snapshot) -> Iterator[Metric]:
    live = GaugeMetricFamily(
        "kvtier_worker_live",
        "1 for a device whose copy worker is live, 0 for one that needs one; absent for GPUs not in use.",
        labels=["device"],
    )
    respawns = CounterMetricFamily("kvtier_worker_respawns", "Copy workers replaced.", labels=["device"])
    mapped = GaugeMetricFamily(
        "kvtier_device_mapped_bytes",
        "Bytes of engines' memory mapped by the device's copy worker.",
        labels=["device"],
    )
    registered = GaugeMetricFamily(
        "kvtier_pool_registered_bytes",
        "Bytes of the host pool registered with the GPU's driver.",
        labels=["device"],
    )
    for device in snapshot.devices:
        workers = [worker for worker in snapshot.workers if worker.device == device.name]
        if not device.idle:
            live.add_metric([device.name], any(worker.state == "live" for worker in workers))
        respawns.add_metric([device.name], device.respawns)
        if device.name.startswith(DISK_PREFIX):
            continue
        mapped.add_metric([device.name], sum(worker.mapped_bytes for worker in workers))
        if device.name != CPU:
            registered.add_metric([device.name], sum(worker.registered_bytes for worker in workers))
    yield live
    yield respawns
    yield mapped
    yield registered
    copying = [worker for worker in snapshot.workers if not worker.device.startswith(DISK_PREFIX)]
    active = sum(worker.parts_active for worker in copying)
    yield _gauge("kvtier_parts_active", "Parts posted to copy workers and not finished.", active)
    copied = CounterMetricFamily("kvtier_copy_bytes", "Bytes copied.", labels=["direction"])
    seconds = CounterMetricFamily(
        "kvtier_copy_seconds", "Time spent in copies, checks included.", labels=["direction"]
    )
    parts = CounterMetricFamily("kvtier_parts", "Parts ended, by outcome.", labels=["direction", "outcome"])
    for direction, totals in snapshot.copies.items():
        copied.add_metric([direction], totals.copied_bytes)
        seconds.add_metric([direction], totals.copy_s)
        for outcome, count in totals.outcomes.items():
            parts.add_metric([direction, outcome.lower()], count)
    yield copied
    yield seconds
    yield parts


def _disks(snapshot: Snapshot) -> Iterator[Metric]:
    """Of the disk tier, by the path of the disk."""
    counters, disks = snapshot.core.counters, snapshot.disks
    state = GaugeMetricFamily("kvtier_disk_state", "1 for the state a disk is in.", labels=["disk", "state"])
    held = GaugeMetricFamily(
        "kvtier_disk_bytes",
        "Bytes of a disk, by whether they are in slots that hold a block.",
        labels=["disk", "state"],
    )
    queued = GaugeMetricFamily(
        "kvtier_disk_queued_bytes", "Bytes on their way to or from a disk.", labels=["disk", "direction"]
    )
    rate = GaugeMetricFamily(
        "kvtier_disk_bytes_per_second", "As measured lately; 0: not yet.", labels=["disk", "direction"]
    )
    scrubbed = GaugeMetricFamily(
        "kvtier_disk_scrub_blocks",
        "Blocks of the scrub that is on its way, or was last: all, and those looked at.",
        labels=["disk", "state"],
    )
    for disk in disks:
        core = disk.core
        for name in DISK_STATES:
            state.add_metric([disk.path, name], name == disk.state)
        held.add_metric([disk.path, "used"], core.used_bytes)
        held.add_metric([disk.path, "free"], disk.capacity_bytes - core.used_bytes)
        queued.add_metric([disk.path, "write"], core.writing_bytes)
        queued.add_metric([disk.path, "read"], core.reading_bytes)
        rate.add_metric([disk.path, "write"], core.write_bytes_per_s)
        rate.add_metric([disk.path, "read"], core.read_bytes_per_s)
        scrubbed.add_metric([disk.path, "all"], core.scrub_blocks)
        scrubbed.add_metric([disk.path, "done"], core.scrubbed_blocks)
    yield from (state, held, queued, rate, scrubbed)
    for name, text, value in (
        ("blocks", "Blocks on a disk.", lambda disk: disk.core.blocks),
        ("jobs", "Batches of blocks on their way to or from a disk.", lambda disk: disk.core.jobs),
        ("recovered_blocks", "Blocks found on a disk at start.", lambda disk: disk.recovered_blocks),
        ("recovered_bytes", "Their bytes.", lambda disk: disk.recovered_bytes),
        ("recovery_seconds", "Time it took to go through its records.", lambda disk: disk.recovery_s),
        ("direct_io", "1 if the kernel's cache is passed by.", lambda disk: disk.direct_io),
        ("corrupt_slots", "Slots set aside after a failed check.", lambda disk: disk.core.corrupt_slots),
    ):
        yield _by_disk(GaugeMetricFamily(f"kvtier_disk_{name}", text, labels=["disk"]), disks, value)
    for name, text, value in (
        ("written_blocks", "Blocks written to a disk.", lambda disk: disk.core.counters.written_blocks),
        ("written_bytes", "Their bytes.", lambda disk: disk.core.counters.written_bytes),
        ("read_blocks", "Blocks read from a disk.", lambda disk: disk.core.counters.read_blocks),
        ("read_bytes", "Their bytes.", lambda disk: disk.core.counters.read_bytes),
        (
            "evicted_blocks",
            "Blocks dropped to make room on a disk.",
            lambda disk: disk.core.counters.evicted_blocks,
        ),
        ("errors", "Jobs of a disk that failed, or were too slow.", lambda disk: disk.core.counters.errors),
        (
            "corrupt_blocks",
            "Blocks that did not match when they were read or checked. Never served.",
            lambda disk: disk.core.counters.corrupt_blocks,
        ),
    ):
        yield _by_disk(CounterMetricFamily(f"kvtier_disk_{name}", text, labels=["disk"]), disks, value)
    yield _counter("kvtier_promoted_blocks", "Blocks read from a disk to the host.", counters.promoted_blocks)
    yield _counter("kvtier_promoted_bytes", "Their bytes.", counters.promoted_bytes)
    yield _counter(
        "kvtier_recompute_blocks",
        "Blocks reported as misses because computing them is faster than loading them.",
        counters.recompute_blocks,
    )
    yield _counter(
        "kvtier_evicted_unwritten_blocks",
        "Blocks evicted from the host before a disk had them.",
        counters.evicted_unwritten_blocks,
    )


def _by_disk(
    family: GaugeMetricFamily | CounterMetricFamily,
    disks: Sequence[DiskSnapshot],
    value: Callable[[DiskSnapshot], float],
) -> Metric:
    for disk in disks:
        family.add_metric([disk.path], value(disk))
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _by_tier(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=["tier"])
    family.add_metric([TIER], value)
    return family


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_SILENCE_S

    def log_message(self, *_: object) -> None:
        """Scrapes are not worth a line."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each of a few scrapes."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self._scrapes: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:
            time.sleep(ACCEPT_RETRY_S)  # out of descriptors, most likely; the listener stays readable
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._scrapes[request] = None
            if len(self._scrapes) > SCRAPES_MAX:
                oldest = next(iter(self._scrapes))
                del self._scrapes[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._scrapes.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that goes away in the middle is its own affair."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class MetricsServer:
    """The scrape endpoint, on threads of its own."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        """Binds `host:port` at once; port 0 picks a free one. Raises ConfigError if it cannot."""
        host, _, port = listen.rpartition(":")
        host = host.strip("[]")
        try:
            family, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
            server_class = _Server6 if family == socket.AF_INET6 else _Server
            app = make_wsgi_app(registry)
            self._server = make_server(
                str(address[0]), int(port), app, server_class=server_class, handler_class=_Handler
            )
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(
                "metrics.listen",
                listen,
                f"cannot be bound ({why}): choose another port, 0 for a free one, or off",
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        bound = self._server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound}/metrics"

    def close(self) -> None:
        """Ends the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(SNAPSHOT_DEADLINE_S)
