"""All metrics of the daemon: those counted as things happen, and those that a scrape reads from a
snapshot."""

import asyncio
import concurrent.futures
from collections.abc import Callable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvtierd.cache import Snapshot
from kvtierd.metrics.declared import BY_NAME
from kvtierd.metrics.families import families
from kvtierd.metrics.sheet import Sheet

SNAPSHOT_DEADLINE_S = 2.0
"""How long the event loop may take for a snapshot. After that, a scrape shows the last one, marked as not
fresh."""
RPC_BUCKETS_S = (25e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.25, 1.0)
LAG_BUCKETS_S = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 5.0)
RPCS = ("lookup", "touch", "prefetch", "store", "load", "release", "cancel", "heartbeat")


class Metrics:
    """All metrics of the daemon, in one registry."""

    def __init__(self, registry: CollectorRegistry, version: str, *, by_tenant: bool = False) -> None:
        """Registers everything in `registry`, with `by_tenant` also what each tenant has and does. Label
        values are a closed set. From then on no metric of this process has a `_created` series: nobody reads
        them, and they are as many as all others."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry
        rpc_seconds = _histogram("kvtier_rpc_seconds", RPC_BUCKETS_S, registry)
        self._by_rpc = {rpc: rpc_seconds.labels(rpc) for rpc in RPCS}
        self.observe_lag = _histogram("kvtier_event_loop_lag_seconds", LAG_BUCKETS_S, registry).observe
        ProcessCollector(registry=registry)
        self._families = partial(families, version=version, by_tenant=by_tenant)

    def observe_rpc(self, rpc: str, seconds: float) -> None:
        if (histogram := self._by_rpc.get(rpc)) is not None:
            histogram.observe(seconds)

    def watch(self, snapshot: Callable[[], Snapshot], loop: asyncio.AbstractEventLoop) -> None:
        """From now on a scrape shows `snapshot()`, which is called on `loop`."""
        self.registry.register(_SnapshotCollector(snapshot, loop, self._families))


class _SnapshotCollector(Collector):
    """Asks the event loop for a snapshot, and waits for it until a deadline."""

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        loop: asyncio.AbstractEventLoop,
        read: Callable[[Snapshot], Iterator[Metric]],
    ) -> None:
        self._snapshot = snapshot
        self._loop = loop
        self._read = read
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
        sheet = Sheet()
        sheet.set("kvtier_snapshot_fresh", fresh)
        yield from sheet
        yield from self._read(self._last)


def _histogram(name: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    declared = BY_NAME[name]
    return Histogram(name, declared.text, declared.labels, buckets=buckets, registry=registry)
